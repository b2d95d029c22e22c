"""localkv, llama.cpp and ik_llama.cpp on the same CPU, with the same model, in turn.

Each program runs alone and with its own defaults: while one is timed, all others are stopped
(SIGSTOP), and no environment is set for any of them. For localkv these are the defaults of
`localkv complete`, and it is loaded as that loads it. For llama.cpp they are llama-cli's
defaults, which the library's Python package does not have: a thread for each physical core, n_batch
2048, n_ubatch 512, flash attention "auto", the file mapped. `--threads` sets both.

PYTHON is an interpreter that has llama-cpp-python; without `--peer` it does not run. BENCH is
llama-bench of ik_llama.cpp, which takes part twice: as it is, and with `-rtr 1`, which repacks
weights as it loads them; tables have the better figure. `--tables` measures all
tables of docs/benchmarks-tables.md in an hour and a half on two cores, or some of them by name;
`speed_tables.py` lists what each takes. docs/make_speed_tables.py then writes the pages from the
file of all figures. The table "published" has the models of `--files`:

    python benchmarks/cpu_vs_llama_cpp.py --peer PYTHON --second-peer BENCH --files MODEL.gguf ... \
        --tables --json docs/cpu-speed.json
    python benchmarks/cpu_vs_llama_cpp.py --peer PYTHON --tables types --json docs/cpu-speed.json
    python docs/make_speed_tables.py

Other models are asked for by options:

    python benchmarks/cpu_vs_llama_cpp.py --peer PYTHON --types all
    python benchmarks/cpu_vs_llama_cpp.py --peer PYTHON --moe --types q4_0 q4_K
    python benchmarks/cpu_vs_llama_cpp.py --peer PYTHON --pairs f16 q4_0 --depths 0 4096 32768
    python benchmarks/cpu_vs_llama_cpp.py --peer PYTHON --shapes gemma3-1b gpt-oss-20b@4
    python benchmarks/cpu_vs_llama_cpp.py --peer PYTHON --parallel 1 2 4 8 16 --depths 1024
    python benchmarks/cpu_vs_llama_cpp.py --second-peer BENCH --files MODEL.gguf --pairs f16

Without `--shapes` the model is a Llama of 1.1 billion weights; "NAME@4" are the first four layers
of a shape that `localkv bench --synthetic` knows, "NAME@4x8" those with eight experts.

For every pair of cache types each program loads the model in a process of its own and fills its
cache with a prompt of the depth's length (`--repeat`: with copies of the rows of a short one). Then
they take turns: a round is, for every process, a
decode of `--decode` tokens (tg) or a prompt of 512 tokens (pp). Each goes on where the one before
ended, since neither windows nor recurrent layers can be cut back, except that a prompt at depth 0
starts with an empty cache. A token that is
not timed comes first, since a process that was stopped finds nothing of its own in the caches.
With `--tests load` the programs load the model and decode
a token in turn, after once that does not count: libraries and the file are in memory then.

llama-bench is a process of its own for each test of a round, which loads the model first, untimed.
It keeps no cache from one to the next. So at a depth it evaluates a prompt of that length (whatever
`--repeat` says), and decodes once as many tokens as the others do in all rounds. That is done up to
`--second-depth`. It measures no prompts at a depth and no sequences at the same time.

`--parallel` decodes that many sequences at the same time, each after a prompt of its own. It counts
tokens per second of all together, with the scheduler's steps beside llama.cpp's batches.

A share "of the memory" is what a decoded token has to read of weights and cache, per second, next
to the memory's bandwidth in the same round. The bandwidth is the best of six reads of half a
gigabyte by all threads.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from alone import Worker, end_on_signals
from speed_programs import BENCHES, PROMPT, work, work_by_bench
from speed_report import OURS, PEER, REPACKS, SECOND_PEER, Figure, Report, several

SETTLE_SECONDS = 4
"""From imports to loading, where that is timed. A virtual machine gives memory that a program has
freed back to its host within seconds; who loads right after another program would get it sooner
than who imports longer.
"""

LOAD_TESTS = ("load", "load and a token")


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
        worker += ["--second-peer", options.second_peer] if name in BENCHES else []
        super().__init__([interpreter, __file__, *worker])
        self.is_bench = name in BENCHES
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


class Model:
    """A file, and who runs it.

    Attributes:
        interpreters: by program.
        sessions: the interpreters of programs that keep a model, and not llama-bench.
        report: where figures go.
    """

    def __init__(
        self,
        path: Path,
        place: tuple[str, str, str],
        interpreters: dict[str, str],
        report: Report,
        options: argparse.Namespace,
    ) -> None:
        self.path, self.place, self.options = path, place, options
        self.interpreters, self.report = interpreters, report
        self.sessions = {name: it for name, it in interpreters.items() if name not in BENCHES}

    def add(
        self,
        test: str,
        depth: int,
        pair: str,
        program: str,
        values: list[float],
        n_bytes: float = 0,
        reads: Sequence[float] = (),
    ) -> None:
        figure = Figure(*self.place, pair, depth, test, program, values, n_bytes, reads)
        self.report.add([figure])

    def programs(self, stack: contextlib.ExitStack) -> Iterator[Program]:
        """All that take turns, loaded."""
        options = self.options
        more = PROMPT * (2 + options.prompt_rounds) + (options.rounds + 1) * (options.decode + 1)
        n_ctx = max(options.depths) + more * len(options.depths)
        for pair, (name, interpreter) in itertools.product(
            options.pairs, self.interpreters.items()
        ):
            say(f"load {name} {pair}")
            try:
                program = Program(interpreter, name, pair, self.path, n_ctx, options)
            except SystemExit as error:
                if name == OURS:
                    raise
                say(str(error))
                continue
            stack.callback(program.close)
            if name != REPACKS:
                self.report.programs[name] = str(program)
            yield program

    def measure_speeds(self) -> None:
        with contextlib.ExitStack() as stack:
            programs = list(self.programs(stack))
            for depth in sorted(self.options.depths):
                if depth > self.options.peer_depth:
                    programs = [program for program in programs if program.name != PEER]
                if depth > self.options.second_depth:
                    programs = [program for program in programs if not program.is_bench]
                self.measure(programs, depth)

    def measure(self, programs: list[Program], depth: int) -> None:
        """Tokens per second of every program at a depth, in turn."""
        options = self.options
        repeats = options.repeat and depth > 0
        for program in programs:
            say(f"fill {program.name} {program.pair} to {depth}")
            program.ask(f"fill {PROMPT if repeats else depth}")
            if repeats:
                program.ask(f"repeat {depth}")
        counts = {"tg": (options.decode, options.rounds), "pp": (PROMPT, options.prompt_rounds)}
        for test in (test for test in options.tests if test in counts):
            count, rounds = counts[test]
            speeds, reads = [list[float]() for _ in programs], list[float]()
            for turn in range(-1, rounds):
                say(f"{test} at {depth}, round {turn + 1} of {rounds}")
                if test == "tg" and turn >= 0:
                    reads.append(programs[0].ask("bandwidth"))
                for program, values in zip(programs, speeds, strict=True):
                    command = "fresh" if test == "pp" and depth == 0 else test
                    n = count if turn >= 0 else max(1, count // 8)
                    if program.is_bench and depth > 0:
                        if turn != 0:
                            continue
                        n *= rounds
                    seconds = program.ask(f"{command} {n}")
                    if turn >= 0 and seconds is not None:  # the first is for warming up
                        values.append(1 / seconds)
            for program, values in zip(programs, speeds, strict=True):
                is_read = test == "tg" and program.name == OURS
                figures = (program.ask(f"bytes {depth}"), reads) if is_read else ()
                if values:
                    self.add(test, depth, program.pair, program.name, values, *figures)

    def measure_parallel(self) -> None:
        """Tokens per second of several sequences together, in turn."""
        options = self.options
        (depth,), n_more = options.depths, (options.rounds + 2) * (options.decode + 1)
        for pair in options.pairs:
            with contextlib.ExitStack() as stack:
                programs = []
                for name, interpreter in self.sessions.items():
                    say(f"load {name} {pair}")
                    program = Program(interpreter, name, pair, self.path, PROMPT, options)
                    stack.callback(program.close)
                    self.report.programs[name] = str(program)
                    programs.append(program)
                for n in options.parallel:
                    for program in programs:
                        say(f"{n} prompts of {depth} tokens, {pair}: {program.name}")
                        program.ask(f"begin {n} {depth} {n_more}")
                    speeds = [list[float]() for _ in programs]
                    for turn in range(-1, options.rounds):
                        for program, values in zip(programs, speeds, strict=True):
                            speed = n / program.ask(f"many {options.decode}")
                            if turn >= 0:
                                values.append(speed)
                    for program, values in zip(programs, speeds, strict=True):
                        self.add(several(n), depth, pair, program.name, values)

    def measure_loads(self) -> None:
        """Seconds by test and program, in turn, after the imports.

        A program that only maps the file reads it with the first token, so that counts, too.
        """
        options, pair = self.options, self.options.pairs[0]
        seconds = {test: {name: list[float]() for name in self.sessions} for test in LOAD_TESTS}
        for turn in range(-1, options.rounds):
            say(f"load, round {turn + 1} of {options.rounds}")
            for name, interpreter in self.sessions.items():
                start = (interpreter, name, pair, self.path, 1024, options)
                with contextlib.closing(Program(*start, wait=SETTLE_SECONDS)) as program:
                    first_token = program.ask("first")
                    self.report.programs[name] = str(program)
                if turn >= 0:
                    load = program.load_seconds
                    for test, value in zip(LOAD_TESTS, (load, load + first_token), strict=True):
                        seconds[test][name].append(value)
        for test, of_programs in seconds.items():
            for name, values in of_programs.items():
                self.add(test, 0, pair, name, values)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--peer", help="interpreter with llama-cpp-python")
    add("--second-peer", metavar="BENCH", help="llama-bench of ik_llama.cpp")
    add("--files", nargs="+", type=Path, metavar="MODEL", help="in place of random models")
    add("--tables", nargs="*", metavar="NAME", help="of the documentation; without names all")
    add("--types", nargs="+", default=["q4_0"], help='of the weights; "all" for every one')
    add("--pairs", nargs="+", default=["f16", "q8_0", "q4_0/q8_0", "q8_0/q4_0", "q4_0"])
    add("--depths", nargs="+", type=int, default=[0])
    add("--repeat", action="store_true", help="make depths of copies of rows")
    add("--tests", nargs="+", choices=["load", "tg", "pp"], default=["tg", "pp"])
    add("--parallel", nargs="+", type=int, metavar="N", help="sequences at the same time")
    add("--rounds", type=int, default=5, help="of decoding and of loading")
    add("--prompt-rounds", type=int, default=2)
    add("--decode", type=int, default=16, help="tokens of a decode")
    add("--peer-depth", type=int, default=1 << 20, help="how deep llama.cpp takes part")
    add("--second-depth", type=int, default=8192, help="how deep ik_llama.cpp takes part")
    add("--threads", type=int, default=0, help="of all; without it each takes its own number")
    add("--json", type=Path, help="add all figures to this file, in place of older ones")
    add("--shapes", nargs="+", default=["llama-1.1b"], help="of the model, NAME[@LAYERS[xEXPERTS]]")
    add("--moe", action="store_true", help="two shapes with experts: many small ones, few large")
    add("--small", action="store_true", help="a model of a few megabytes, to try this program")
    add("--worker", nargs=5, help=argparse.SUPPRESS)
    return parser.parse_args()


def jobs(options: argparse.Namespace) -> Iterator[tuple[str, argparse.Namespace]]:
    """What is to be measured: a table's name, and the options for it."""
    from speed_tables import ALL_TYPES, EXPERT_SHAPES, TABLES

    if options.tables is None:
        if options.types == ["all"]:
            options.types = list(ALL_TYPES)
        options.shapes = EXPERT_SHAPES if options.moe else options.shapes
        options.of_files = bool(options.files)
        yield "", options
        return
    for name in options.tables or TABLES:
        if name not in TABLES:
            raise SystemExit(f"no table {name!r}; there are {', '.join(map(repr, TABLES))}")
        if TABLES[name].of_files and not options.files:
            say(f"table {name!r} is left out, as there are no --files")
            continue
        facts = dict(vars(TABLES[name]))
        facts["repeat"] = facts.pop("repeats")
        yield name, argparse.Namespace(**{**vars(options), **facts})


FILE_TYPE = re.compile(r"[-.]((?:i?q\d|mxfp4|b?f16|f32)\w*)$", re.IGNORECASE)
"""A type of weights at the end of a file's name."""


@contextlib.contextmanager
def random_model(name: str, weights: str) -> Iterator[tuple[Path, int]]:
    """A file of a shape, and the tokens of its vocabulary."""
    from random_model import shape_of, write_model

    shape = shape_of(name)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        write_model(path, shape, weights)
        yield path, shape.n_vocab


def models(
    options: argparse.Namespace,
) -> Iterator[tuple[str, str, contextlib.AbstractContextManager[tuple[Path, int]]]]:
    """Name, type of weights and file of each model."""
    if not options.of_files:
        shapes = ["llama-tiny"] if options.small else options.shapes
        for name, weights in itertools.product(shapes, options.types):
            yield name, weights, random_model(name, weights)
        return
    from localkv.loader.gguf_file import open_gguf

    for path in options.files:
        found = FILE_TYPE.search(path.stem)
        weights = found.group(1).upper() if found else ""
        n_vocab = open_gguf(path).tensors["token_embd.weight"].shape[0]
        name = path.stem[: found.start()] if found else path.stem
        yield name, weights, contextlib.nullcontext((path, n_vocab))


def main() -> None:
    options = parse()
    if options.worker:
        program, path, pair, n_ctx, n_vocab = options.worker
        if program in BENCHES:
            work_by_bench(options.second_peer, program, path, pair, options.threads)
        else:
            work(program, path, pair, int(n_ctx), int(n_vocab), options.threads)
        return
    from localkv.simd.cpu_features import CPU_LEVEL
    from localkv.system.processor import processor_name

    interpreters = {OURS: sys.executable, **({PEER: options.peer} if options.peer else {})}
    if options.second_peer:
        interpreters |= dict.fromkeys((SECOND_PEER, REPACKS), sys.executable)
    report = Report(f"{processor_name()} ({CPU_LEVEL})", os.cpu_count() or 1)
    if options.json and options.json.exists():
        kept = Report.read(options.json)
        if (kept.cpu, kept.n_processors) != (report.cpu, report.n_processors):
            raise SystemExit(f"{options.json} has figures of another machine: {kept.cpu}")
        report = kept
    end_on_signals()
    todo = list(jobs(options))
    for table, chosen in todo:
        for name, weights, file in models(chosen):
            say(f"{table or 'model'}: {name} {weights}")
            with file as (path, chosen.n_vocab):
                model = Model(path, (table, name, weights), interpreters, report, chosen)
                if chosen.parallel:
                    model.measure_parallel()
                elif "load" in chosen.tests:
                    model.measure_loads()
                if not chosen.parallel and set(chosen.tests) != {"load"}:
                    model.measure_speeds()
            if options.json:
                report.write(options.json)
    print(report.about())
    print("Medians; each ratio pairs runs of the same round, and brackets give the range.\n")
    print("\n".join(report.tables(table) for table, _ in todo), end="")


if __name__ == "__main__":
    main()
