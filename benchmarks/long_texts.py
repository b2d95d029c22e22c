"""What packed caches do over long texts, by position, in recall and in what they write.

    python benchmarks/long_texts.py MODEL --json long.json --plot docs/kv-cache-long.png

- Divergence (KLD) of every prediction from that with an f16 cache, by position: a text is read once
  with each pair of types, all of it through the cache. The text is the handbook of tests/data, and
  then the pages of docs/, which are as this version has them.
- Recall (`localkv perplexity --needle`): a sentence far back, at the whole context, half and a
  quarter of it.
- Tokens that the model writes by itself through each cache, drawn with a seed. How many of four
  successive tokens came before in the same order, and in which loop does it end, if any?

Prints tables. `--from FILE` shows again what `--json FILE` wrote.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from localkv import LLM
from localkv.commands.pictures import BLUE, GREEN, INK, ORANGE, PINK, quiet
from localkv.config import CacheConfig
from localkv.engine.engine import Engine
from localkv.engine.logprobs import score
from localkv.quality.needle import plant, recall
from localkv.quality.scores import base_cache

ROOT = Path(__file__).parents[1]
PAIRS = "q8_0/q8_0,q8_0/q4_0,q4_1c/q4_0,q4_1c128/kv3_0,q4_0/q4_0,kv2_0/kv2_0"
COLOURS = (INK, BLUE, GREEN, PINK, ORANGE, "#999999")
BIN = 1024
"""Positions whose mean is a point of the picture, and a column of the table."""
ROWS = 64
"""Logits that are compared at a time."""
NGRAM = 4
PROMPT = "Write a very long story about a village by the sea, with many chapters.\n"


def long_text() -> str:
    pages = sorted((ROOT / "docs").glob("*.md"))
    return "\n\n".join(p.read_text() for p in (ROOT / "tests" / "data" / "handbook.txt", *pages))


def divergences(llm: LLM, ids: Sequence[int], cache: CacheConfig) -> list[float]:
    """The mean divergence of each `BIN` positions, in nats."""
    model, n_ctx = llm.engine.model, len(ids)
    engines = [Engine(model, one, n_batch=512) for one in (base_cache(n_ctx), cache)]
    found, at = np.empty(n_ctx - 1), 0
    parts = zip(*(engine.logit_batches(ids[:-1], n_rows=ROWS) for engine in engines), strict=True)
    while at < n_ctx - 1:
        base, packed = (np.array(part) for part in next(parts))
        targets = np.array(ids[at + 1 : at + 1 + len(base)])
        found[at : at + len(base)] = score(packed, targets, base).kld
        at += len(base)
    return [float(found[i : i + BIN].mean()) for i in range(0, n_ctx - 1, BIN)]


def recalled(llm: LLM, ids: Sequence[int], cache: CacheConfig) -> dict[int, tuple[int, int, float]]:
    """By distance: right answers, of how many, and the mean log-probability."""

    def encode(text: str) -> list[int]:
        return llm.tokenize(text, add_special=False)

    found = (recall(llm.engine.model, cache, one) for one in plant(encode, ids, cache.n_ctx))
    return {one.distance: (one.right, one.count, one.log_p) for one in found}


def written(path: Path, pair: tuple[str, str], n_tokens: int) -> dict[str, Any]:
    """What the model writes through a cache."""
    llm = LLM(
        path, n_ctx=n_tokens + 256, progress=False, cache_type_k=pair[0], cache_type_v=pair[1]
    )
    stream = llm.stream(PROMPT, max_tokens=n_tokens, seed=1, temperature=0.8, ignore_eos=True)
    ids = llm.tokenize(stream.completion.text, add_special=False)
    grams = [tuple(ids[i : i + NGRAM]) for i in range(len(ids) - NGRAM + 1)]
    loop = stream.degeneration().loop
    return {
        "tokens": len(ids),
        "repeated": 1 - len(set(grams)) / len(grams),
        "loop": None if loop is None else [loop.period, loop.n_repeats],
    }


def measure(args: argparse.Namespace) -> dict[str, Any]:
    llm = LLM(args.model, n_ctx=args.n_ctx, progress=False)
    ids = llm.tokenize(long_text())[: args.n_ctx]
    report: dict[str, Any] = {"model": args.model.name, "n_ctx": len(ids), "pairs": {}}
    for name in args.pairs.split(","):
        k, v = name.split("/")
        cache = CacheConfig(k, v, n_ctx=len(ids))
        report["pairs"][name] = {
            "kld": divergences(llm, ids, cache),
            "recall": recalled(llm, ids, cache) if args.needles else {},
            "written": written(args.model, (k, v), args.generate) if args.generate else None,
        }
        print(name, json.dumps(report["pairs"][name]), flush=True)
    return report


def draw(report: dict[str, Any], path: Path) -> None:
    figure = Figure(figsize=(10, 5.5), layout="constrained", facecolor="white")
    axes = figure.subplots()
    axes.set_yscale("log")
    quiet(axes, grid="y")
    for (name, found), colour in zip(report["pairs"].items(), COLOURS, strict=False):
        at = [BIN * (i + 0.5) for i in range(len(found["kld"]))]
        axes.plot(at, found["kld"], color=colour, lw=1.5, label=name)
    axes.set_xlabel(f"position in the text, means of {BIN:,} tokens", color=INK)
    axes.set_ylabel("mean KL divergence from an f16 cache (nats)", color=INK)
    axes.set_title(report["model"], fontsize=11, color=INK, loc="left")
    axes.legend(frameon=False, ncols=3)
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("-c", "--n-ctx", type=int, default=32768, help="tokens of the text")
    parser.add_argument("--pairs", default=PAIRS, help=f"K/V,K/V,... (default {PAIRS})")
    parser.add_argument("--generate", type=int, default=4000, metavar="N", help="tokens to write")
    parser.add_argument("--no-needles", dest="needles", action="store_false")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--from", dest="source", type=Path, metavar="FILE")
    parser.add_argument("--plot", type=Path, metavar="PICTURE")
    args = parser.parse_args()
    report = json.loads(args.source.read_text()) if args.source else measure(args)
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    if args.plot is not None:
        draw(report, args.plot)


if __name__ == "__main__":
    main()
