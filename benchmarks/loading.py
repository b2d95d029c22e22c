"""Loading a model, its first token and 32 tokens: localkv and llama.cpp, in turn.

Each program loads a random model in a process of its own, with its own defaults, and is the only
one that runs. The file is in memory: a round that does not count comes first. It also writes the
bytecode that an installed package has.

    load                of a model and a cache for 1,024 tokens, once all is imported. No file has
                        a tokenizer. localkv links its kernels and runs a layer, llama.cpp plans
                        its buffers, and copies the weights that it lays out in another order.
    load and a token    and what either has put off. llama.cpp reads a mapped file with the first
                        token. localkv makes panels during the next 16, which the next column has.
    load and 32 tokens
    start to a token    the first of these and, before it, Python and its imports, in which
                        llama.cpp's library is opened.

PYTHON is an interpreter that has llama-cpp-python; without `--peer` only localkv runs. The table of
docs/benchmarks-tables.md, of all types of weights and of models with experts, takes an hour:

    python benchmarks/loading.py --peer PYTHON

Others are asked for by `--models`, SHAPE:TYPE each, with shapes as in `cpu_vs_llama_cpp.py`:

    python benchmarks/loading.py --peer PYTHON --models llama-1.1b:q5_0 qwen3-30b-a3b@6x64:q4_K

Cells are medians in seconds, localkv / llama.cpp, and their ratio.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from alone import end_on_signals
from cpu_vs_llama_cpp import SETTLE_SECONDS, Program, say
from random_model import shape_of, write_model
from speed_report import OURS, PEER
from speed_tables import ALL_TYPES, EXPERT_SHAPES

COLUMNS = ("load", "load and a token", "load and 32 tokens", "start to a token")
TOKENS = 32
N_CTX = 1024
MODELS = (
    *(f"llama-1.1b:{name}" for name in ALL_TYPES),
    *(f"{shape}:{name}" for shape in EXPERT_SHAPES for name in ("q4_0", "q4_K", "mxfp4")),
)

Seconds = dict[str, list[tuple[float, ...]]]
"""The seconds of each program's rounds, a tuple of all columns each."""


def run(path: Path, interpreters: Mapping[str, str], options: argparse.Namespace) -> Seconds:
    """Each program's rounds, in turn."""
    found: Seconds = {name: [] for name in interpreters}
    for turn in range(-1, options.rounds):
        say(f"round {turn + 1} of {options.rounds}")
        for name, interpreter in interpreters.items():
            start = interpreter, name, "f16", path, N_CTX, options
            with contextlib.closing(Program(*start, wait=options.settle)) as program:
                first = program.load_seconds + program.ask("first")
                last = first + (TOKENS - 1) * program.ask(f"first {TOKENS - 1}")
            if turn >= 0:
                begun = program.start_seconds + first
                found[name].append((program.load_seconds, first, last, begun))
    return found


def row(model: str, found: Seconds) -> list[str]:
    """A row of the table."""
    cells = [model]
    for values in zip(*(zip(*rounds, strict=True) for rounds in found.values()), strict=True):
        middle = [statistics.median(of_program) for of_program in values]
        text = " / ".join(f"{seconds:.3f}" for seconds in middle)
        cells.append(f"{text} = {middle[0] / middle[1]:.2f}" if len(middle) > 1 else text)
    return cells


def table(rows: Sequence[Sequence[str]]) -> str:
    head = ["Model", *COLUMNS]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--peer", help="interpreter with llama-cpp-python")
    add("--models", nargs="+", default=MODELS, metavar="SHAPE:TYPE")
    add("--rounds", type=int, default=3)
    add("--json", type=Path, help="write all figures to this file")
    add("--threads", type=int, default=0, help="of both; without it each takes its own number")
    add(
        "--settle",
        type=int,
        default=SETTLE_SECONDS,
        help="seconds from imports to loading, in which a virtual machine takes freed memory back",
    )
    return parser.parse_args()


def main() -> None:
    options = parse()
    interpreters = {OURS: sys.executable, **({PEER: options.peer} if options.peer else {})}
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package has bytecode
    end_on_signals()
    rows, figures = list[list[str]](), dict[str, Seconds]()
    for model in options.models:
        name, _, weights = model.partition(":")
        shape = shape_of(name)
        options.n_vocab = shape.n_vocab
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.gguf"
            say(model)
            write_model(path, shape, weights or "q4_0")
            figures[model] = run(path, interpreters, options)
        rows.append(row(model, figures[model]))
        if options.json:
            options.json.write_text(json.dumps(figures, indent=1))
    from localkv.system.processor import processor_name

    print(
        f"{processor_name()}, {os.cpu_count()} processors; seconds, {' / '.join(interpreters)}.\n"
    )
    print(table(rows))


if __name__ == "__main__":
    main()
