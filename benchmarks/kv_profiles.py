"""Types by layer beside one pair for all layers: the model that ships and its outlier twins.

    python benchmarks/kv_profiles.py

A profile is measured on some rows of the corpus generator as `localkv calibrate` does it. Then
other rows measure how far predictions diverge from f16's: with the types by layer that it gives
within some bits, and with every pair of at most 5.25 bits. Bits of types by layer are all that a
cache of 16,384 tokens takes, tail and sink included. Bits of pairs are of packed rows only, though
every pair gets a tail of 64 tokens and a sink of 4, which help any type. All pairs are measured on
half a row, and the best of them on all rows. Prints a Markdown table for each model: the types by
layer, and the pairs that diverge least.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "models"))

from outliers import write_twin  # noqa: E402
from quality import TWINS  # noqa: E402
from quality_bench import Bench, Scope, text_options  # noqa: E402

from localkv.cache.layout import (  # noqa: E402
    DEFAULT_SINK,
    DEFAULT_TAIL,
    allocated_bits,
    in_words,
    mean_bits,
    with_types,
)
from localkv.cache.profile import TypeList, with_profile_types  # noqa: E402
from localkv.config import CacheConfig  # noqa: E402
from localkv.model import Transformer  # noqa: E402
from localkv.quality.kv_profile import ChunkCosts, base_types  # noqa: E402

ROW_TOKENS = 2048
CONTEXT, N_BATCH = 16384, 512
BUDGETS = (4.0, 4.5, 5.0, 5.25, 6.0, 6.5)
MOST_UNIFORM = 5.25
"""Bits of pairs for all layers."""
TRIED, SHOWN = 12, 4
"""Pairs that are measured on all rows, and of these those that are printed."""


def divergences(
    model: Transformer, text: Sequence[Sequence[int]], caches: Sequence[CacheConfig]
) -> list[float]:
    """The divergence with each cache, in nats, with types by layer."""
    totals, n_scored = [0.0] * len(caches), 0
    for ids in text:
        chunk = ChunkCosts(model, ids, CacheConfig(n_ctx=ROW_TOKENS))
        n_scored += len(chunk.targets)
        totals = [
            total + chunk.divergence(cache.layer_types, cache)
            for total, cache in zip(totals, caches, strict=True)
        ]
    return [total / n_scored for total in totals]


def uniform(bench: Bench) -> Iterator[CacheConfig]:
    """Every pair within the budget, with a tail and a sink."""
    types, config = bench.scope.profile_types, bench.llm.config
    tailed = CacheConfig(
        n_ctx=ROW_TOKENS,
        kv_codebooks=bench.codebooks[False, "auto"],
        kv_tail=DEFAULT_TAIL,
        kv_sink=DEFAULT_SINK,
    )
    for pair in ((k, v) for k in types for v in types):
        if mean_bits(pair, config) <= MOST_UNIFORM:
            yield with_types(tailed, tuple(of and pair for of in base_types(bench.model)))


def least(
    bench: Bench, caches: Sequence[CacheConfig], text: Sequence[Sequence[int]], n: int
) -> list[tuple[float, CacheConfig]]:
    """(divergence, cache) of the `n` that diverge least."""
    klds = divergences(bench.model, text, caches)
    return sorted(zip(klds, caches, strict=True), key=lambda one: one[0])[:n]


def chosen(bench: Bench) -> dict[TypeList, float]:
    """The profile's types by layer within each budget, and the bits that they take."""
    profile, groups = bench.profile, bench.llm.config.groups
    long = CacheConfig(n_ctx=CONTEXT)

    def takes(types: TypeList) -> float:
        return allocated_bits(with_profile_types(long, types), groups, N_BATCH)

    found = [profile.within(bits, takes) for bits in BUDGETS]
    return {types: takes(types) for types in found}


def measure_model(name: str, path: Path, args: argparse.Namespace) -> None:
    """One model; prints its table."""
    scope = Scope(args.rows, ROW_TOKENS)
    bench = Bench(name, path, scope, device="auto", threads=args.threads, seed=args.seed)
    profile, by_layer = bench.profile, chosen(bench)
    bench.tell("")
    own = CacheConfig(
        n_ctx=ROW_TOKENS, kv_codebooks=profile.codebooks, smoothing=profile.smoothing_name
    )
    caches = [with_profile_types(own, types) for types in by_layer]
    klds = divergences(bench.smooth_model, bench.text, caches)
    print(f"{name}\n\n| bits | of rows | tail | KLD | K/V by layer |\n|---|---|---|---|---|")
    for (types, bits), kld in zip(by_layer.items(), klds, strict=True):
        words = in_words(types.layers)
        print(f"| {bits:.3f} | {types.bits:.3f} | {types.kv_tail} | {kld:.1e} | {words} |")
    found = list(uniform(bench))
    tried = [cache for _, cache in least(bench, found, [bench.text[0][: ROW_TOKENS // 2]], TRIED)]
    for kld, cache in least(bench, tried, bench.text, SHOWN):
        types = cache.shown_types
        bits = allocated_bits(replace(cache, n_ctx=CONTEXT), bench.llm.config.groups, N_BATCH)
        print(
            f"| {bits:.3f} | {mean_bits(types, bench.llm.config):.3f} "
            f"| {cache.kv_tail} | {kld:.1e} | all {'/'.join(types)} |"
        )
    print(f"\n{len(found)} pairs of at most {MOST_UNIFORM:g} bits\n", flush=True)


def main() -> None:
    parser = text_options(__doc__, rows=2)
    parser.add_argument("-t", "--threads", type=int)
    args = parser.parse_args()
    measure_model("plain", args.model, args)
    with tempfile.TemporaryDirectory() as folder:
        for name, outliers in TWINS.items():
            path = Path(folder) / "twin.gguf"
            write_twin(args.model, path, outliers)
            measure_model(name, path, args)


if __name__ == "__main__":
    main()
