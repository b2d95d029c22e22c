"""What each table of `cpu_vs_llama_cpp.py` takes; docs/benchmarks-tables.md shows them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gguf import GGMLQuantizationType

from localkv.quant_formats import WEIGHT_FORMATS

ALL_TYPES = tuple(
    fmt.name
    for fmt in WEIGHT_FORMATS.values()
    if fmt.name != "f32" and fmt.name.upper() in GGMLQuantizationType.__members__
)
"""What gguf-py can write."""
EXPERT_SHAPES = ("qwen3-30b-a3b@6x64", "mixtral-8x7b@2")
"""Many small experts, and few large ones."""
PAIRS = ("f16", "q8_0", "q8_0/q4_0", "q4_0")
BY_CHANNEL = ("q4_1c/q4_0", "q4_1c128/kv3_0")
"""Pairs that other programs don't have."""


@dataclass(frozen=True)
class SpeedTable:
    """One table: every shape with every type of weights, by pair of cache types and depth.

    Attributes:
        rounds, prompt_rounds, decode: of decoding and loading, and of a prompt; tokens of a decode.
        repeats: depths are made of copies of rows, not with prompts of that length.
        parallel: sequences that are decoded at the same time; none for one after the other.
        of_files: of the models of `--files`, in place of random ones.
    """

    shapes: Sequence[str] = ("llama-1.1b",)
    types: Sequence[str] = ("q4_0",)
    pairs: Sequence[str] = ("f16",)
    depths: Sequence[int] = (0,)
    tests: Sequence[str] = ("tg", "pp")
    rounds: int = 5
    prompt_rounds: int = 3
    decode: int = 64
    repeats: bool = False
    parallel: Sequence[int] = ()
    of_files: bool = False


TABLES: Mapping[str, SpeedTable] = {
    "types": SpeedTable(shapes=("llama-1.1b@4",), types=ALL_TYPES),
    "experts": SpeedTable(shapes=EXPERT_SHAPES, types=("q4_0", "q4_K", "mxfp4")),
    "depth": SpeedTable(
        pairs=(*PAIRS, *BY_CHANNEL), depths=(0, 8192, 32768), tests=("tg",), decode=16, repeats=True
    ),
    "heads": SpeedTable(
        shapes=("qwen3-1.7b@4", "gemma3-1b@6"), pairs=PAIRS, depths=(0, 8192), tests=("tg",)
    ),
    "sequences": SpeedTable(
        pairs=("f16", "q8_0/q4_0"), depths=(1024,), decode=16, parallel=(1, 4, 8)
    ),
    "models": SpeedTable(
        shapes=("gemma3-1b", "lfm2-1.2b", "qwen35-2b", "gemma4-e2b", "phi-4-mini@8"),
        types=("q4_0", "q4_K"),
        depths=(0, 4096),
    ),
    "models with experts": SpeedTable(
        shapes=("gpt-oss-20b@4", "deepseek-v2-lite@27x8"), types=("q4_0", "q4_K"), depths=(0, 4096)
    ),
    "published": SpeedTable(pairs=PAIRS, depths=(0, 4096), of_files=True),
}
