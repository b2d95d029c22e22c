"""Types by layer beside one pair for all layers: the model that ships and its outlier twins.

    python benchmarks/kv_profiles.py

A profile is measured on some rows of the corpus generator as `localkv calibrate` does it; then its
types by layer, and every pair of at most 5.25 bits, are measured on other rows: the divergence of
predictions from those with an f16 cache. Bits are those after 16,384 tokens, tail and sink
included; a pair has the tail and the sink of the profile, too, where it then has at most 5.25 bits,
and its own where not. All pairs are measured on the first row, and the best of them on all rows.
Prints a Markdown table for each model: the types by layer, and the pairs that diverge least.
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

from localkv.cache.layer_types import in_words, with_types  # noqa: E402
from localkv.cache.profile import COUNTED_TOKENS  # noqa: E402
from localkv.cache.profiled import with_profile_types  # noqa: E402
from localkv.config import CacheConfig  # noqa: E402
from localkv.memory.kv_bytes import bits_after  # noqa: E402
from localkv.model import Transformer  # noqa: E402
from localkv.quality.layer_costs import ChunkCosts, base_types  # noqa: E402

ROW_TOKENS = 2048
BUDGETS = (3.5, 4.0, 4.5, 4.75, 5.0, 5.25, 6.0, 6.5)
MOST_UNIFORM = 5.25
"""Bits of pairs for all layers."""
TRIED, SHOWN = 12, 4
"""Pairs that are measured on all rows, and of these those that are printed."""


def divergences(
    model: Transformer, text: Sequence[Sequence[int]], caches: Sequence[CacheConfig]
) -> list[float]:
    """Of each cache, in nats, with types by layer."""
    totals, n_scored = [0.0] * len(caches), 0
    for ids in text:
        chunk = ChunkCosts(model, ids, CacheConfig(n_ctx=ROW_TOKENS))
        n_scored += len(chunk.targets)
        totals = [
            total + chunk.divergence(cache.layer_types, cache)
            for total, cache in zip(totals, caches, strict=True)
        ]
    return [total / n_scored for total in totals]


def uniform(bench: Bench, names: Sequence[str]) -> Iterator[tuple[float, CacheConfig]]:
    """(bits, cache) of every pair within the budget, with the profile's tail or its own."""
    profile, config = bench.profile, bench.llm.config
    own = CacheConfig(n_ctx=ROW_TOKENS, kv_codebooks=bench.plain_codebooks)
    tailed = replace(own, kv_tail=profile.kv_tail, kv_sink=profile.kv_sink)
    for pair in ((k, v) for k in names for v in names):
        layers = tuple(layer and pair for layer in base_types(bench.model))
        for cache in (with_types(tailed, layers), with_types(own, layers)):
            if (bits := bits_after(cache, config, COUNTED_TOKENS)) <= MOST_UNIFORM:
                yield bits, cache
                break


def least(
    bench: Bench, found: Sequence[tuple[float, CacheConfig]], rows: int, n: int
) -> list[tuple[float, tuple[float, CacheConfig]]]:
    """(divergence, (bits, cache)) of the `n` that diverge least on the first rows of text."""
    klds = divergences(bench.model, bench.text[:rows], [cache for _, cache in found])
    return sorted(zip(klds, found, strict=True), key=lambda one: one[0])[:n]


def measure_model(name: str, path: Path, args: argparse.Namespace) -> None:
    """One model; prints its table."""
    scope = Scope(args.rows, ROW_TOKENS, budgets=BUDGETS)
    bench = Bench(name, path, scope, device="auto", threads=args.threads, seed=args.seed)
    profile = bench.profile
    bench.tell("")
    own = CacheConfig(
        n_ctx=ROW_TOKENS, kv_codebooks=profile.codebooks, smoothing=profile.smoothing_name
    )
    by_layer = [with_profile_types(own, profile, one) for one in profile.lists]
    klds = divergences(bench.smooth_model, bench.text, by_layer)
    print(f"{name}\n\n| bits | tail | KLD | K/V by layer |\n|---|---|---|---|")
    for one, kld in zip(profile.lists, klds, strict=True):
        print(f"| {one.bits:.3f} | {profile.kv_tail} | {kld:.1e} | {in_words(one.layers)} |")
    found = list(uniform(bench, scope.profile_types))
    tried = [one for _, one in least(bench, found, 1, TRIED)]
    for kld, (bits, cache) in least(bench, tried, args.rows, SHOWN):
        tail = "its own" if cache.kv_tail is None else str(cache.kv_tail)
        print(f"| {bits:.3f} | {tail} | {kld:.1e} | all {'/'.join(cache.shown_types)} |")
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
