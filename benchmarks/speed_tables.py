"""The tables of docs/benchmarks.md that `cpu_vs_llama_cpp.py` measures: what each one takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from localkv.formats import WEIGHT_FORMATS

ALL_TYPES = tuple(fmt.name for fmt in WEIGHT_FORMATS.values() if fmt.name != "f32")
EXPERT_SHAPES = ("qwen3-30b-a3b@6x64", "mixtral-8x7b@2")
"""Many small experts, and few large ones."""
PAIRS = ("f16", "q8_0", "q4_0/q8_0", "q8_0/q4_0", "q4_0")


@dataclass(frozen=True)
class SpeedTable:
    """One table: every shape with every type of weights, by pair of cache types and depth.

    Attributes:
        title: what the documentation says above it.
        rounds, prompt_rounds: of decoding and loading, and of a prompt.
        repeats: depths are made of copies of rows, not with prompts of that length.
    """

    title: str
    shapes: Sequence[str] = ("llama-1.1b",)
    types: Sequence[str] = ("q4_0",)
    pairs: Sequence[str] = ("f16",)
    depths: Sequence[int] = (0,)
    tests: Sequence[str] = ("tg", "pp")
    rounds: int = 3
    prompt_rounds: int = 1
    repeats: bool = False


TABLES: Mapping[str, SpeedTable] = {
    "types": SpeedTable(
        "Every type of weights: four layers of the Llama of 1.1 billion parameters",
        shapes=("llama-1.1b@4",),
        types=ALL_TYPES,
    ),
    "experts": SpeedTable(
        "Experts: many small ones (64 of 768, 8 for each token) and few large ones (8 of 14336, 2)",
        shapes=EXPERT_SHAPES,
        types=("q4_0", "q4_K", "mxfp4"),
    ),
    "caches": SpeedTable(
        "Cache types, with Q4_0 weights", pairs=PAIRS, depths=(0, 4096), rounds=5, prompt_rounds=2
    ),
    "depth": SpeedTable(
        "What a long context costs",
        pairs=PAIRS,
        depths=(0, 8192, 32768),
        tests=("tg",),
        repeats=True,
    ),
    "models": SpeedTable(
        "Other kinds of models",
        shapes=("gemma3-1b", "lfm2-1.2b", "qwen35-2b", "gemma4-e2b", "phi-4-mini@8"),
        types=("q4_0", "q4_K"),
        depths=(0, 4096),
    ),
    "models with experts": SpeedTable(
        "Other kinds of models, with experts",
        shapes=("gpt-oss-20b@4", "deepseek-v2-lite@27x8"),
        types=("q4_0", "q4_K"),
        depths=(0, 4096),
    ),
    "loading": SpeedTable(
        "Loading",
        types=("q4_0", "q8_0", "q4_K", "q6_K", "iq2_xxs", "iq4_xs", "mxfp4", "f16"),
        tests=("load",),
    ),
}
