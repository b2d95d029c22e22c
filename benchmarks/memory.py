#!/usr/bin/env python3
"""Count the bytes of K and V over the length of the context, by `localkv plan`.

    python benchmarks/memory.py --files MODEL.gguf ... --json benchmarks/results/memory.json

Reads the headers of the files, and of a shape of Llama 3.1 8B that needs no file. Nothing is loaded
and nothing is timed: the bytes are those that a CPU's cache allocates. `docs/make_drawings.py`
draws docs/memory-context.svg from the result.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

SHAPE = "llama-8b:q4_K"
"""A model whose file is large, and whose shape `plan` knows."""
PAIRS = ("f16/f16", "q8_0/q4_0", "q4_1c/q4_0")
N_POINTS = 8
"""Contexts of each model, up to the one that it was trained for."""


def plan(model: list[str], pair: str, n_ctx: int) -> dict:
    """What `localkv plan` says of a model with one pair of types and one context, as JSON."""
    type_k, _, type_v = pair.partition("/")
    options = ["-c", str(n_ctx), "-ctk", type_k, "-ctv", type_v, "--device", "cpu", "--json"]
    command = [sys.executable, "-m", "localkv", "plan", *model, *options, "--memory", "1TiB"]
    return json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout)


def measure(model: list[str]) -> dict:
    """A model's name, and for each pair points of context and bytes."""
    facts = plan(model, PAIRS[0], 512)["model"]
    trained = facts["n_ctx_train"]
    lines: dict[str, list[list[int]]] = {}
    for pair in PAIRS:
        lines[pair] = []
        for number in range(1, N_POINTS + 1):
            n_ctx = trained * number // N_POINTS
            (found,) = plan(model, pair, n_ctx)["pairs"]
            lines[pair].append([n_ctx, found["cache_k"] + found["cache_v"]])
    return {"model": facts["name"], "n_ctx_train": trained, "bytes": lines}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--files", nargs="*", default=[], help="GGUF files, beside the shape")
    parser.add_argument("--json", type=Path, help="write the points to this file")
    arguments = parser.parse_args()
    models = [measure([name]) for name in arguments.files]
    models.append(measure(["--synthetic", SHAPE]))
    for one in models:
        last = {pair: points[-1][1] / 2**20 for pair, points in one["bytes"].items()}
        sizes = ", ".join(f"{pair} {size:,.1f} MiB" for pair, size in last.items())
        print(f"{one['model']}, {one['n_ctx_train']:,} tokens: {sizes}")
    if arguments.json:
        facts = {"date": f"{datetime.now(UTC):%Y-%m-%d}", "models": models}
        arguments.json.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
