"""localkv and llama.cpp on the same CPU, with the same random model, in turn.

Each program runs alone and with its own defaults: while one is timed, all others are stopped
(SIGSTOP), and no environment is set for any of them. For localkv these are the defaults of
`localkv complete`, and it is loaded as that loads it. For llama.cpp they are those of llama-cli,
which the library's Python package does not have: a thread for each physical core, n_batch 2048,
n_ubatch 512, flash attention "auto", the file mapped. `--threads` sets both.

PYTHON is an interpreter that has llama-cpp-python; without `--peer` only localkv runs. The tables
of docs/benchmarks.md, in about 20 minutes on two cores:

    python benchmarks/cpu_vs_llama_cpp.py --peer PYTHON --types q4_0 --depths 0 4096
    python benchmarks/cpu_vs_llama_cpp.py --peer PYTHON --types q8_0 q4_K --pairs f16 --depths 0
    python benchmarks/cpu_vs_llama_cpp.py --peer PYTHON --types q4_0 q4_K q8_0 --tests load
    python benchmarks/cpu_vs_llama_cpp.py --peer PYTHON --pairs f16 --depths 0 4096 \\
        --shapes gemma3-1b gpt-oss-20b@4 phi-4-mini@8

Without `--shapes` the model is a Llama of 1.1 billion weights; "NAME@4" are the first four layers
of a shape that `localkv bench --synthetic` knows, "NAME@4x8" those with eight experts.

For every pair of cache types each program loads the model in a process of its own and fills its
cache with a prompt of the depth's length. Then they take turns: a round is, for every process, a
decode of `--decode` tokens (tg) or a prompt of 512 tokens (pp). Each goes on where the one before
ended, since neither windows nor recurrent layers can be cut back, except that a prompt at depth 0
starts with an empty cache. A token that is
not timed comes first, since a process that was stopped finds nothing of its own in the caches.
Beyond `--peer-depth` only localkv runs. With `--tests load` the programs load the model and decode
a token in turn, after once that does not count: libraries and the file are in memory then.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from alone import Worker, answer, commands, end_on_signals

SETTLE_SECONDS = 4
"""From imports to loading, where that is timed. A virtual machine gives memory that a program has
freed back to its host within seconds; who loads right after another program would get it sooner
than who imports longer.
"""

LOAD_TESTS = ("load", "load and a token")

PROMPT = 512

Evaluate = Callable[[list[int], int], None]
"""Evaluate ids at a position: the end of what the cache holds, or 0 to start anew."""


def load_localkv(path: str, pair: str, n_ctx: int, n_threads: int) -> tuple[Evaluate, int]:
    from localkv.cli.complete import complete
    from localkv.cli.loading import load_llm

    type_k, type_v = sides(pair)
    flags = ["-m", path, "-c", str(n_ctx), "-ctk", type_k, "-ctv", type_v, "-p", ""]
    flags += ["-t", str(n_threads)] if n_threads else []
    with complete.make_context("complete", flags) as context:
        engine = load_llm(context.params, quiet=True).engine

    def evaluate(ids: list[int], position: int) -> None:
        if position == 0:
            engine.reset()
        engine.evaluate(ids, generated=len(ids) == 1)

    from localkv.system.threads import n_threads as threads

    return evaluate, threads()


def physical_cores() -> int:
    """As llama.cpp counts them (`cpu_get_num_physical_cores`)."""
    siblings = set()
    for cpu in Path("/sys/devices/system/cpu").glob("cpu[0-9]*"):
        with contextlib.suppress(OSError):
            siblings.add((cpu / "topology" / "thread_siblings").read_text())
    n = os.cpu_count() or 1
    return len(siblings) or (n if n <= 4 else n // 2)


def load_llama_cpp(path: str, pair: str, n_ctx: int, n_threads: int) -> tuple[Evaluate, int]:
    import llama_cpp

    @llama_cpp.llama_log_callback
    def silent(level, text, data):
        pass

    load_llama_cpp.keep = silent
    llama_cpp.llama_log_set(silent, None)
    llama_cpp.llama_backend_init()
    params = llama_cpp.llama_model_default_params()
    model = llama_cpp.llama_model_load_from_file(path.encode(), params)
    options = llama_cpp.llama_context_default_params()
    options.n_ctx, options.n_batch, options.n_ubatch = n_ctx, 2048, 512
    options.n_threads = options.n_threads_batch = n_threads or physical_cores()
    options.swa_full = False  # as the programs have it; the library's default is another
    options.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_AUTO
    kinds = {"f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "bf16": 30}
    options.type_k, options.type_v = (kinds[name] for name in sides(pair))
    context = llama_cpp.llama_init_from_model(model, options)
    memory = llama_cpp.llama_get_memory(context)
    batch = llama_cpp.llama_batch_init(PROMPT, 0, 1)

    def evaluate(ids: list[int], position: int) -> None:
        if position == 0:
            llama_cpp.llama_memory_clear(memory, True)
        batch.n_tokens = len(ids)
        for i, token in enumerate(ids):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position + i, 1
            batch.seq_id[i][0], batch.logits[i] = 0, i == len(ids) - 1
        if llama_cpp.llama_decode(context, batch):
            raise RuntimeError("llama_decode failed")
        llama_cpp.llama_get_logits_ith(context, len(ids) - 1)  # waits

    return evaluate, options.n_threads


LOADERS = {"localkv": load_localkv, "llama.cpp": load_llama_cpp}
MODULES = {
    "localkv": ("localkv.llm", "localkv.cli.complete", "localkv.cli.loading"),
    "llama.cpp": ("llama_cpp",),
}
"""What a program imports before it loads; the first one's package has the version."""


def sides(pair: str) -> tuple[str, str]:
    """The types of K and V: "q4_0/q8_0", or "f16" for both."""
    type_k, _, type_v = pair.partition("/")
    return type_k, type_v or type_k


def work(program: str, path: str, pair: str, n_ctx: int, n_vocab: int, n_threads: int) -> None:
    """Answer commands; the first answer is the program's version.

    "load" loads the model and answers with the seconds and the threads. The others answer with
    seconds per token: "fill N" makes the depth N, "tg N" decodes N tokens from there on, "pp N"
    evaluates a prompt, and "anew" comes before a prompt at depth 0.
    """
    if program == "localkv":
        from localkv.system.limits import before_model

        before_model()
    package, *_ = [__import__(name) for name in MODULES[program]]
    answer(package.__version__)
    at = 0

    def go_on(n: int) -> None:
        nonlocal at
        evaluate([((at + i) * 7919 + 13) % n_vocab for i in range(n)], at)
        at += n

    for line in commands():
        command, _, count = line.partition(" ")
        n = int(count or 1)
        if command == "load":
            started = time.perf_counter()
            evaluate, n_threads = LOADERS[program](path, pair, n_ctx, n_threads)
            answer([time.perf_counter() - started, n_threads])
            continue
        if command in ("tg", "pp", "anew"):
            go_on(1)  # caches are cold, threads asleep
        started = time.perf_counter()
        if command == "fill":
            n -= at
            for start in range(0, n, PROMPT):
                go_on(min(PROMPT, n - start))
        elif command == "pp":
            go_on(n)
        elif command == "anew":
            at = 0
            go_on(n)
        else:  # "tg", and "first", which nothing goes before
            for _ in range(n):
                go_on(1)
        answer((time.perf_counter() - started) / max(1, n))


class Program(Worker):
    """A process that has loaded the model with a pair of cache types."""

    def __init__(
        self,
        interpreter: str,
        name: str,
        pair: str,
        path: Path,
        n_ctx: int,
        options: argparse.Namespace,
        wait: int = 0,
    ) -> None:
        worker = ["--worker", name, str(path), pair, str(n_ctx), str(options.n_vocab)]
        worker += ["--threads", str(options.threads)]
        super().__init__([interpreter, __file__, *worker])
        self.name, self.pair, self.version = name, pair, self.ready
        try:
            time.sleep(wait)
            self.load_seconds, self.n_threads = self.ask("load")
        except BaseException:
            self.close()
            raise

    def __str__(self) -> str:
        threads = f"{self.n_threads} thread{'s' if self.n_threads > 1 else ''}"
        return f"{self.name} {self.version} with {threads}"


def measure(programs: list[Program], depth: int, options: argparse.Namespace) -> list[dict]:
    """Tokens per second of every program at a depth, in turn."""
    for program in programs:
        say(f"fill {program.name} {program.pair} to {depth}")
        program.ask(f"fill {depth}")
    counts = {"tg": (options.decode, options.rounds), "pp": (PROMPT, options.prompt_rounds)}
    rows = []
    for test in (test for test in options.tests if test in counts):
        count, rounds = counts[test]
        speeds = {(program.name, program.pair): list[float]() for program in programs}
        for turn in range(-1, rounds):
            say(f"{test} at {depth}, round {turn + 1} of {rounds}")
            for program in programs:
                command = "anew" if test == "pp" and depth == 0 else test
                speed = 1 / program.ask(f"{command} {count if turn >= 0 else max(1, count // 8)}")
                if turn >= 0:  # the first is for warming up
                    speeds[program.name, program.pair].append(speed)
        for (name, pair), values in speeds.items():
            row = {"test": test, "depth": depth, "pair": pair, "program": name, "values": values}
            rows.append(row)
    return rows


def measure_loads(
    interpreters: dict[str, str], path: Path, options: argparse.Namespace
) -> tuple[list[dict], dict[str, str]]:
    """Seconds by test and program, in turn, after the imports; and each program's version.

    A program that only maps the file reads it with the first token, so that counts, too.
    """
    pair, about = options.pairs[0], dict[str, str]()
    seconds = {test: {name: list[float]() for name in interpreters} for test in LOAD_TESTS}
    for turn in range(-1, options.rounds):
        say(f"load, round {turn + 1} of {options.rounds}")
        for name, interpreter in interpreters.items():
            loaded = Program(interpreter, name, pair, path, 1024, options, wait=SETTLE_SECONDS)
            with contextlib.closing(loaded) as program:
                first_token = program.ask("first")
                about[name] = str(program)
            if turn >= 0:
                load = program.load_seconds
                for test, value in zip(LOAD_TESTS, (load, load + first_token), strict=True):
                    seconds[test][name].append(value)
    return [
        {"test": test, "depth": 0, "pair": pair, "program": name, "values": values}
        for test, of_programs in seconds.items()
        for name, values in of_programs.items()
    ], about


def measure_speeds(
    interpreters: dict[str, str], path: Path, options: argparse.Namespace
) -> tuple[list[dict], dict[str, str]]:
    """The figures of one file, and what each program says of itself."""
    depths, rows, about = sorted(options.depths), list[dict](), dict[str, str]()
    with contextlib.ExitStack() as stack:
        programs = list[Program]()
        for pair in options.pairs:
            for name, interpreter in interpreters.items():
                say(f"load {name} {pair}")
                more = PROMPT * (2 + options.prompt_rounds) + options.rounds * (options.decode + 1)
                program = Program(interpreter, name, pair, path, depths[-1] + more, options)
                programs.append(program)
                stack.callback(program.close)
                about[name] = str(program)
        for depth in depths:
            if depth > options.peer_depth:
                programs = [program for program in programs if program.name == "localkv"]
            rows += measure(programs, depth, options)
    return rows, about


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--peer", help="interpreter with llama-cpp-python")
    add("--types", nargs="+", default=["q4_0"], help="of the weights")
    add("--pairs", nargs="+", default=["f16", "q8_0", "q4_0/q8_0", "q8_0/q4_0", "q4_0"])
    add("--depths", nargs="+", type=int, default=[0])
    add("--tests", nargs="+", choices=["load", "tg", "pp"], default=["tg", "pp"])
    add("--rounds", type=int, default=5, help="of decoding and of loading")
    add("--prompt-rounds", type=int, default=2)
    add("--decode", type=int, default=16, help="tokens of a decode")
    add("--peer-depth", type=int, default=4096, help="how deep llama.cpp takes part")
    add("--threads", type=int, default=0, help="of both; without it each takes its own number")
    add("--json", type=Path, help="write all figures to this file")
    add("--shapes", nargs="+", default=["llama-1.1b"], help="of the model, NAME[@LAYERS[xEXPERTS]]")
    add("--small", action="store_true", help="a model of a few megabytes, to try this program")
    add("--worker", nargs=5, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    options = parse()
    if options.worker:
        program, path, pair, n_ctx, n_vocab = options.worker
        work(program, path, pair, int(n_ctx), int(n_vocab), options.threads)
        return
    from random_model import shape_of, write_model

    from localkv.system.processor import processor_name

    interpreters = {"localkv": sys.executable}
    if options.peer:
        interpreters["llama.cpp"] = options.peer
    results, about = list[dict](), dict[str, str]()
    end_on_signals()
    shapes = ["llama-tiny"] if options.small else options.shapes
    for name, weights in itertools.product(shapes, options.types):
        shape = shape_of(name)
        options.n_vocab = shape.n_vocab
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.gguf"
            write_model(path, shape, weights)
            rows = list[dict]()
            if "load" in options.tests:
                rows, about = measure_loads(interpreters, path, options)
            if options.tests != ["load"]:
                speeds, about = measure_speeds(interpreters, path, options)
                rows += speeds
        label = weights if len(shapes) == 1 else f"{name} {weights}"
        results += [{"weights": label, **row} for row in rows]
        if options.json:
            options.json.write_text(json.dumps(results, indent=1))
    cpu = f"{processor_name()}, {os.cpu_count()} processors"
    print(f"{cpu}; each program alone, with its own defaults", end="")
    print(f": {', '.join(about.values())}." if about else ".")
    print("Medians; each ratio pairs runs of the same round, and brackets give the range.\n")
    from llama_cpp_tables import tables

    print(tables(results), end="")


if __name__ == "__main__":
    main()
