"""What it costs to change the types of rows one after the other, beside packing them at once.

    python benchmarks/ladder_rounding.py models/tales-4M-F16.gguf

prints, for chains of types, the error of K and of V (RMS, relative to the rows) after the whole
chain, and the error of packing rows of f16 in its last type. Rows are from a model's own text, all
layers, rotated as the cache rotates them.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from localkv import LLM
from localkv.cache.layout import SegmentSpec, cache_segments
from localkv.cache.repack import hadamard
from localkv.cache.row_copies import held_rows, planes, rows_out
from localkv.config import CacheConfig
from localkv.quant_formats import FORMATS

CHAINS = ("q8_0,q4_0", "q8_0,q5_1", "q8_0,q5_1,q4_0", "q8_0,q6_0", "q8_0,q6_0,q4_0", "q5_1,q4_0",
          "q8_0,kv3_1", "q8_0,q4_0,kv3_1", "q8_0,q4_1c", "q8_0,q4_1c,q4_1c128", "q8_0,q4_1c128",
          "q8_0,q4_0,kv3_0", "q8_0,kv3_0")  # fmt: skip
GROUP = 128
"""Tokens that types with scales by channel pack together at most."""
Floats = NDArray[np.float32]


def rows_of(llm: LLM, side: str) -> Iterator[Floats]:
    """K or V of whole groups of tokens, layer by layer: [heads, tokens, channels]."""
    cache, sequence = llm.engine.cache, llm.engine.sequence
    held = held_rows(cache, sequence)
    for plane in planes(cache):
        if plane.side == side:
            found = np.concatenate(list(rows_out(cache, sequence, plane, held[plane.pool])))
            rows = plane.fmt.codec.decode([found])
            yield rows[: len(rows) - len(rows) % GROUP].swapaxes(0, 1)


def packed(x: Floats, specs: Sequence[SegmentSpec], side: str) -> Floats:
    """Rows after the types of some specs, one after the other."""
    for spec in specs:
        fmt, rotation = FORMATS[getattr(spec, f"type_{side}")], getattr(spec, f"rotation_{side}")
        x = hadamard(fmt.codec.decode(fmt.codec.encode(hadamard(x, rotation))), rotation)
    return x


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=1500)
    options = parser.parse_args()
    llm = LLM(options.model, device="cpu")
    stream = llm.complete("Once upon a time", max_tokens=options.tokens, seed=1, ignore_eos=True)
    print(f"{stream.usage.total_tokens} tokens of {llm.config.name}")
    rows = {side: np.concatenate(list(rows_of(llm, side)), axis=1) for side in "kv"}
    (group,) = llm.config.groups
    print("| after f16 | K | K at once | V | V at once |\n|---|---|---|---|---|")
    for chain in CHAINS:
        names = chain.split(",")
        ladder = tuple((name, name) for name in names)
        specs = cache_segments(CacheConfig(kv_budget=1, kv_ladder=ladder), group)
        cells = []
        for side in "kv":
            x = rows[side]
            size = float(np.sqrt(np.square(x, dtype=np.float64).mean()))
            for of in (specs, specs[-1:]):
                error = np.square(packed(x, of, side) - x, dtype=np.float64).mean()
                cells.append(f"{100 * float(np.sqrt(error)) / size:.3g} %")
        print(f"| {', '.join(names)} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
