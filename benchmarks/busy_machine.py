"""Decoding while other programs run: localkv and llama.cpp, each with its own defaults.

The same random model is decoded by each program in turn, alone, beside processes that do nothing
but compute (one, then as many as there are cores), and beside another localkv that decodes the same
model. In about five minutes on two cores:

    python benchmarks/busy_machine.py --peer PYTHON

PYTHON is an interpreter that has llama-cpp-python; without `--peer` only localkv runs. `--threads`
adds localkv with other numbers of threads.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import cpu_vs_llama_cpp
from alone import end_on_signals
from cpu_vs_llama_cpp import Program, say
from random_model import shape_of, write_model

from localkv.system.processor import processor_name, usable_cores

N_CTX = 16384
SETTLE_SECONDS = 0.3
"""Until the system has put those that compute on cores of their own."""


@contextlib.contextmanager
def running(commands: list[list[str]], said: str = "") -> Iterator[list[subprocess.Popen[str]]]:
    """Some processes, which are told something and then compute until the end."""
    processes = list[subprocess.Popen[str]]()
    try:
        for command in commands:
            pipe, nowhere = subprocess.PIPE, subprocess.DEVNULL
            process = subprocess.Popen(command, stdin=pipe, stdout=nowhere, text=True)
            processes.append(process)
            assert process.stdin
            process.stdin.write(said)
            process.stdin.flush()
        time.sleep(SETTLE_SECONDS)
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()
            assert process.stdin
            process.stdin.close()


@contextlib.contextmanager
def company(load: str, path: Path, n_vocab: int) -> Iterator[None]:
    """What else runs: some processes that compute, or another localkv."""
    if load == "another localkv":
        worker = ["--worker", "localkv", str(path), "f16", str(N_CTX), str(n_vocab)]
        command = [sys.executable, cpu_vs_llama_cpp.__file__, *worker]
        with running([command], f"load\ntg {N_CTX - 1}\n"):
            time.sleep(3)  # it loads
            yield
        return
    n = int(load.split()[0]) if load != "alone" else 0
    with running([[sys.executable, "-c", "while True: pass"]] * n):
        yield


def measure(programs: dict[str, Program], path: Path, options: argparse.Namespace) -> dict:
    """Tokens per second of each program by what else runs: every round's."""
    loads = ["alone", *(f"{n} busy" for n in sorted({1, usable_cores()})), "another localkv"]
    speeds = {load: {name: list[float]() for name in programs} for load in loads}
    for turn, load in itertools.product(range(options.rounds), loads):
        say(f"round {turn + 1} of {options.rounds}: {load}")
        with company(load, path, options.n_vocab):
            for name, program in programs.items():
                program.ask(f"fresh {options.depth}")
                speeds[load][name].append(1 / program.ask(f"tg {options.decode}"))
    return speeds


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--peer", help="interpreter with llama-cpp-python")
    add("--shape", default="llama-1.1b@8", help="of the model, NAME[@LAYERS]")
    add("--type", default="q4_0", help="of its weights")
    add("--depth", type=int, default=128, help="tokens of context")
    add("--decode", type=int, default=64, help="tokens of a round")
    add("--rounds", type=int, default=5)
    add("--threads", type=int, nargs="*", default=[], help="of further localkvs")
    add("--json", type=Path, help="write all figures to this file")
    return parser.parse_args()


def main() -> None:
    options = parse()
    end_on_signals()
    shape = shape_of(options.shape)
    options.n_vocab = shape.n_vocab
    kinds = [("localkv", sys.executable, 0)]
    kinds += [("llama.cpp", options.peer, 0)] if options.peer else []
    kinds += [("localkv", sys.executable, n) for n in options.threads]
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        path = Path(folder, "model.gguf")
        write_model(path, shape, options.type)
        programs = dict[str, Program]()
        for name, interpreter, n in kinds:
            given = argparse.Namespace(**{**vars(options), "threads": n})
            program = Program(interpreter, name, "f16", path, N_CTX, given)
            stack.callback(program.close)
            programs[str(program)] = program
        speeds = measure(programs, path, options)
    print(f"{processor_name()}, {usable_cores()} cores; {options.shape} {options.type}, t/s\n")
    print("| | " + " | ".join(speeds) + " |")
    print("|---|" + "---|" * len(speeds))
    for name in programs:
        row = (f"{statistics.median(of[name]):.1f}" for of in speeds.values())
        print(f"| {name} | " + " | ".join(row) + " |")
    if options.json:
        options.json.write_text(json.dumps({"cpu": processor_name(), "speeds": speeds}, indent=1))


if __name__ == "__main__":
    main()
