"""The first token of a model: localkv and llama.cpp, from the command to the text.

A script that calls a model in a loop waits for all of it each time: the interpreter, libraries, the
file, the prompt. Programs take turns; each runs alone, with its own defaults, as one process that
ends after `-n` tokens of one prompt. localkv runs three times: as on most days, then
in a new home, as at the very first start, with the kernels that the package carries (`make run`
builds them). The third time it carries none, so that all are compiled.

PEER is an interpreter that has llama-cpp-python, and LLAMA_CLI llama.cpp's own program
(llama-completion or llama-cli), which are left out if they are not named:

    python benchmarks/start.py --model MODEL --peer PEER --llama-cli LLAMA_CLI

Columns are seconds: *start* until the model is opened, *load* until it is ready, *first token* from
then on, *longest gap* between two pieces of text after that. *Whole process* is from its start to
its end, as its parent sees it. The last column is the most memory that it had, which counts pages
of mapped files that it touched. The gap of localkv is that of another process, whose output is read
through a pipe. A round that does not count comes first, so that files are in memory, and bytecode
is written, which an installed package has.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

MODEL = Path(__file__).parents[1] / "models" / "tales-4M-F16.gguf"
PARTS = ("start", "load", "first token")
GAP = "longest gap"


@dataclass(frozen=True)
class Run:
    """One process: seconds of its parts by name, seconds from start to end, its peak in bytes."""

    parts: dict[str, float]
    whole: float
    peak: int


@dataclass(frozen=True)
class Program:
    """What is measured.

    Attributes:
        command: what to run.
        read: finds the parts in what it wrote on stdout and stderr.
        cold: it gets an empty folder for kernels each time.
        variables: of its environment.
        streams: a command that writes text as it comes, to time the gaps.
    """

    command: Sequence[str]
    read: Callable[[str, str], dict[str, float]]
    cold: bool = False
    variables: Mapping[str, str] = field(default_factory=dict)
    streams: Sequence[str] = ()

    @contextmanager
    def environment(self) -> Iterator[dict[str, str]]:
        """The variables of one process."""
        with tempfile.TemporaryDirectory() as folder:
            env = {**os.environ, **self.variables, "STARTED": str(time.monotonic())}
            if self.cold:
                env["XDG_CACHE_HOME"] = folder
            yield env

    def run(self) -> Run:
        """Raises SystemExit: it failed."""
        with self.environment() as env:
            started = time.perf_counter()
            with (
                tempfile.TemporaryFile() as out,
                tempfile.TemporaryFile() as err,
                subprocess.Popen(
                    self.command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=env
                ) as process,
            ):
                _, status, usage = os.wait4(process.pid, 0)  # of this child, not of all
                whole = time.perf_counter() - started
                process.returncode = os.waitstatus_to_exitcode(status)
                said, errors = (text_of(file) for file in (out, err))
        if process.returncode != 0:
            raise SystemExit(f"{' '.join(self.command)}: {errors}")
        parts = self.read(said, errors)
        if self.streams:
            with self.environment() as env:
                parts[GAP] = longest_gap(self.streams, env)
        return Run(parts, whole, usage.ru_maxrss * 1024)


def longest_gap(command: Sequence[str], env: Mapping[str, str]) -> float:
    """Seconds between two pieces of what a program writes; 0 if there is one piece."""
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=env,
    ) as process:
        assert process.stdout is not None
        times = []
        while os.read(process.stdout.fileno(), 1 << 16):
            times.append(time.perf_counter())
    return max((later - before for before, later in pairwise(times)), default=0.0)


def text_of(file) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def localkv_parts(out: str, err: str) -> dict[str, float]:
    timings = json.loads(out)["timings"]
    return {name: timings[f"{name.replace(' ', '_')}_seconds"] for name in PARTS}


def peer_parts(out: str, err: str) -> dict[str, float]:
    return json.loads(out.splitlines()[-1])


def llama_cli_parts(out: str, err: str) -> dict[str, float]:
    """It says how long loading took, from its own start to the first evaluation."""
    found = re.search(r"load time = +([\d.]+) ms", err)
    return {"load": float(found[1]) / 1000} if found else {}


def be_peer(model: str, prompt: str, n: int) -> None:
    """llama-cpp-python as its documentation has it; says what it took as JSON."""
    started = float(os.environ["STARTED"])
    import llama_cpp

    imported = time.monotonic()
    llm = llama_cpp.Llama(model, n_ctx=0, verbose=False)
    loaded = time.monotonic()
    pieces = llm.create_completion(prompt, max_tokens=n, stream=True)
    next(iter(pieces))
    times = [time.monotonic()]
    times += [time.monotonic() for _ in pieces]
    gap = max((later - before for before, later in pairwise(times)), default=0.0)
    seconds = (imported - started, loaded - imported, times[0] - loaded, gap)
    print(json.dumps(dict(zip((*PARTS, GAP), seconds, strict=True))))


def programs(options: argparse.Namespace) -> dict[str, Program]:
    model, n = str(options.model), str(options.n)
    ours = [sys.executable, "-m", "localkv", "complete", "-m", model, "-p", options.prompt]
    ours += ["-n", n, "-c", "0", "-q"]
    kinds: dict[str, dict[str, Any]] = {
        "localkv": {},
        "localkv, first start": {"cold": True},
        "localkv, first start without kernels": {
            "cold": True,
            "variables": {"LOCALKV_CPU": "native"},
        },
    }
    found = {
        name: Program([*ours, "--json"], localkv_parts, streams=ours, **kind)
        for name, kind in kinds.items()
    }
    if options.peer:
        command = [options.peer, __file__, "--model", model, "-p", options.prompt, "-n", n]
        found["llama-cpp-python"] = Program([*command, "--be-peer"], peer_parts)
    if options.llama_cli:
        command = [options.llama_cli, "-m", model, "-p", options.prompt, "-n", n, "-no-cnv"]
        found[Path(options.llama_cli).name] = Program(command, llama_cli_parts)
    return found


def measure(found: Mapping[str, Program], rounds: int) -> dict[str, list[Run]]:
    """The runs of each program, in turn."""
    runs = {name: list[Run]() for name in found}
    for turn in range(-1, rounds):
        print(f"round {turn + 1} of {rounds}", file=sys.stderr, flush=True)
        for name, program in found.items():
            if turn < 0 and program.cold:
                continue  # nothing is kept from one first start to the next
            run = program.run()
            if turn >= 0:
                runs[name].append(run)
    return runs


def spread(values: Sequence[float], form: str) -> str:
    """Median, least and largest; nothing if there are none."""
    if not values:
        return ""
    middle, *ends = (statistics.median(values), min(values), max(values))
    return f"{middle:{form}} ({ends[0]:{form}}-{ends[1]:{form}})"


def table(runs: Mapping[str, Sequence[Run]]) -> str:
    parts_shown = (*PARTS, GAP)
    rows = [["", *parts_shown, "whole process", "peak, MiB"]]
    rows.append(["---"] * len(rows[0]))
    for name, of_program in runs.items():
        parts = [
            [run.parts[part] for run in of_program if part in run.parts] for part in parts_shown
        ]
        rows.append([name, *(spread(values, ".2f") for values in parts)])
        rows[-1].append(spread([run.whole for run in of_program], ".2f"))
        rows[-1].append(spread([run.peak / 2**20 for run in of_program], ".0f"))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--peer", help="interpreter with llama-cpp-python")
    add("--llama-cli", help="llama.cpp's llama-completion or llama-cli")
    add("--model", type=Path, default=MODEL)
    add("-p", "--prompt", default="Once upon a time")
    add("-n", type=int, default=32, help="tokens")
    add("--rounds", type=int, default=7)
    add("--json", type=Path, help="write all figures to this file")
    add("--be-peer", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    options = parse()
    if options.be_peer:
        be_peer(str(options.model), options.prompt, options.n)
        return
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package has bytecode
    runs = measure(programs(options), options.rounds)
    if options.json:
        values = {name: [asdict(run) for run in of_program] for name, of_program in runs.items()}
        options.json.write_text(json.dumps(values, indent=1))
    from localkv.system.processor import processor_name

    print(f"{processor_name()}, {os.cpu_count()} processors; {options.model.name}", end="")
    print(f", {options.n} token{'s' if options.n > 1 else ''}. Medians, and ranges.\n")
    print(table(runs))


if __name__ == "__main__":
    main()
