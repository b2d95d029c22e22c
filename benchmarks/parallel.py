"""Generated tokens of several sequences at once: tokens per second of all together.

    python benchmarks/parallel.py [--shape llama-1.1b] [--type q4_0] [--pairs q8_0/q4_0 f16/f16]
        [--depth 1024] [--sequences 1 2 4 8 16] [--steps 8] [--rounds 3] [--json FILE]

Every sequence is as deep and has pages of its own, copies of those of one prompt. A step evaluates
one token of each. Numbers of sequences take turns, round by round; a figure is the median of all
rounds' steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from random_model import shape_of, write_model

from localkv.cache.kv_cache import KVCache
from localkv.cache.pages import Sequence as Rows
from localkv.config import CacheConfig
from localkv.engine.engine import Engine
from localkv.kernels.cpu.cpu_backend import cpu_backend
from localkv.loader.gguf_file import open_gguf
from localkv.loader.weights import load_model
from localkv.model import Transformer
from localkv.system.threads import use_threads


class Company:
    """Sequences of one depth in a cache.

    Args:
        pair: types of K and V.
        n_more: tokens that each can grow by.
    """

    def __init__(
        self, model: Transformer, pair: tuple[str, str], depth: int, n_sequences: int, n_more: int
    ) -> None:
        self.model, self.depth = model, depth
        config = CacheConfig(*pair, n_ctx=depth + n_more)
        engine = Engine(model, config)
        layouts = engine.cache.layouts
        self.cache = KVCache(
            layouts,
            n_ctx=depth + n_more,
            n_sequences=n_sequences,
            arrays=model.backend.arrays,
            states=model.config.states,
        )
        self.sequences = [self.cache.new_sequence() for _ in range(n_sequences)]
        self.ids = np.random.default_rng(0).integers(model.config.n_vocab, size=depth).tolist()
        first = self.sequences[0]
        for at in range(0, depth, 512):
            part = self.ids[at : min(at + 512, depth)]
            self.run([(first, part)], wanted="none", generated=False)
        for other in self.sequences[1:]:
            self._copy(first, other)

    def run(
        self, parts: Sequence[tuple[Rows, list[int]]], wanted: str = "last", generated: bool = True
    ) -> None:
        batch = self.cache.batch(parts, logits=wanted, generated=generated)  # type: ignore[arg-type]
        self.model.forward(batch, self.cache)
        for sequence, ids in parts:
            sequence.length += len(ids)

    def _copy(self, first: Rows, other: Rows) -> None:
        self.cache.reserve(other, self.depth)
        other.length = other.n_stepped = self.depth
        for layer in self.cache.layers:
            for rows, segment in zip(self.cache.parts[layer.part :], layer.segments, strict=False):
                for plane in (*segment.k, *segment.v):
                    plane[other.pages[rows.pool]] = plane[first.pages[rows.pool]]
        if self.cache.states:
            self.cache.states.data[other.slot] = self.cache.states.data[first.slot]

    def step_seconds(self, n_sequences: int, n_steps: int) -> list[float]:
        """Of steps of so many sequences, after which all are as deep as before."""
        chosen, seconds = self.sequences[:n_sequences], list[float]()
        for i in range(n_steps + 1):
            started = time.perf_counter()
            self.run([(sequence, [7 + i]) for sequence in chosen])
            if i:  # the first one may make chains
                seconds.append(time.perf_counter() - started)
        for sequence in chosen:
            sequence.length = sequence.n_stepped = self.depth
        return seconds


def measure(company: Company, counts: Sequence[int], n_steps: int, n_rounds: int) -> list[float]:
    """Tokens per second for each number of sequences."""
    seconds = {n: list[float]() for n in counts}
    for _ in range(n_rounds):
        for n in counts:
            seconds[n] += company.step_seconds(n, n_steps)
    return [n / statistics.median(seconds[n]) for n in counts]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--shape", default="llama-1.1b", help="NAME[@LAYERS]")
    add("--type", default="q4_0", help="of the weights")
    add("--pairs", nargs="+", default=["q8_0/q4_0", "f16/f16"], help="types of K and V")
    add("--depth", type=int, default=1024)
    add("--sequences", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    add("--steps", type=int, default=8)
    add("--rounds", type=int, default=3)
    add("--threads", type=int, default=2)
    add("--json", type=Path, help="write all figures to this file")
    options = parser.parse_args()
    use_threads(options.threads)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        write_model(path, shape_of(options.shape), options.type)
        model, _ = load_model(open_gguf(path), cpu_backend())
        print("K/V         " + "".join(f"{n:4} sequences " for n in options.sequences))
        for pair in options.pairs:
            type_k, _, type_v = pair.partition("/")
            most, n_more = max(options.sequences), options.steps + 1
            company = Company(model, (type_k, type_v), options.depth, most, n_more)
            speeds = measure(company, options.sequences, options.steps, options.rounds)
            figures = (f"{x:7.1f} {x / speeds[0]:4.2f} x " for x in speeds)
            print(f"{pair:11} " + "".join(figures), flush=True)
            facts = {"shape": options.shape, "type": options.type, "pair": pair}
            facts |= {"depth": options.depth, "threads": options.threads}
            rows += [
                {**facts, "sequences": n, "tokens per second": speed}
                for n, speed in zip(options.sequences, speeds, strict=True)
            ]
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
