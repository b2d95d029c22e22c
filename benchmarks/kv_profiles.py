"""Types by layer beside one pair for all layers: the model that ships and its outlier twins.

    python benchmarks/kv_profiles.py

A profile is measured on some rows of the corpus generator; then its types by layer, and every pair
of at most 5.25 bits, are measured on other rows: the divergence of predictions from those with an
f16 cache. Prints a Markdown table for each model.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "models"))

from outliers import write_twin  # noqa: E402
from quality import TWINS  # noqa: E402
from quality_bench import Bench, Scope, text_options  # noqa: E402

from localkv.cache.layer_types import in_words  # noqa: E402
from localkv.cache.profile import LayerTypes  # noqa: E402
from localkv.config import CacheConfig  # noqa: E402
from localkv.memory.kv_bytes import mean_bits  # noqa: E402
from localkv.model import Transformer  # noqa: E402
from localkv.quality.kv_profile import Plan, measure  # noqa: E402
from localkv.quality.layer_costs import ChunkCosts, base_types  # noqa: E402

ROW_TOKENS = 1024
TYPES = ("f16", "q8_0", "q6_0", "q5_1", "q5_0", "q4_1", "q4_0")
BUDGETS = (4.5, 5.0, 5.25, 6.0, 6.5)
MOST_UNIFORM = 5.25
"""Bits of pairs for all layers."""


def fresh(
    model: Transformer, text: Sequence[Sequence[int]], lists: Sequence[LayerTypes]
) -> list[float]:
    """The divergence of each, in nats."""
    totals, n_scored = [0.0] * len(lists), 0
    for ids in text:
        chunk = ChunkCosts(model, ids, CacheConfig(n_ctx=ROW_TOKENS))
        n_scored += len(chunk.targets)
        totals = [t + chunk.divergence(types) for t, types in zip(totals, lists, strict=True)]
    return [total / n_scored for total in totals]


def measure_model(name: str, path: Path, args: argparse.Namespace) -> None:
    """One model; prints its table."""
    scope = Scope(args.rows, ROW_TOKENS)
    bench = Bench(name, path, scope, device="auto", threads=args.threads, seed=args.seed)
    model, known = bench.model, bench.rows(args.rows, "profile")
    profile = measure(model, known, Plan(TYPES, BUDGETS, ROW_TOKENS), digest="", text="corpus")
    found: list[tuple[float, str, LayerTypes]] = [
        (one.bits, in_words(one.layers), one.layers) for one in profile.lists
    ]
    for pair in ((k, v) for k in TYPES for v in TYPES):
        if (bits := mean_bits(pair, model.config)) <= MOST_UNIFORM:
            types = tuple(layer and pair for layer in base_types(model))
            found.append((bits, f"all {'/'.join(pair)}", types))
    klds = fresh(
        model,
        bench.text,
        [types for _, _, types in found],
    )
    print(f"{name}\n\n| bits | KLD | K/V by layer |\n|---|---|---|")
    for (bits, words, _), kld in zip(found, klds, strict=True):
        print(f"| {bits:.4g} | {kld:.1e} | {words} |")
    print(flush=True)


def main() -> None:
    parser = text_options(__doc__, rows=4)
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
