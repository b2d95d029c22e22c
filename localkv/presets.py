"""Pairs of cache types by purpose, so that nobody has to know all names to begin.

A preset is nothing but the two flags it stands for. The pairs follow from figures: divergence from
an f16 cache in docs/kv-cache.md (KLD, rotated: of the model that ships, to its twin with K x16),
speed at a depth of 4,096 tokens in docs/benchmarks.md. K gets at least as many bits as V, since an
error of K moves the softmax's weights and an error of V only the values that are averaged.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Preset:
    """A pair of cache types.

    Attributes:
        type_k, type_v: names in `KV_FORMATS`.
        reason: why this pair, in one line.
    """

    type_k: str
    type_v: str
    reason: str


PRESETS = {
    "quality": Preset("f16", "f16", "predictions as with an f32 cache (KLD 7.5e-7)"),
    "balanced": Preset(
        "q8_0",
        "q8_0",
        "53 % of f16's memory, and hardly a prediction moves (KLD 2.9e-4 to 3.7e-3)",
    ),
    "speed": Preset(
        "q8_0",
        "q4_0",
        "as fast in a long context as 4 bits for both, while K keeps 8 (KLD 2.3e-2 to 4.2e-2)",
    ),
    "memory": Preset(
        "q4_0",
        "q4_0",
        "28 % of f16's memory; with outliers in K facts from far back get lost "
        "(KLD 5.9e-2 to 7.1e-1)",
    ),
}
"""From the most bits to the fewest."""

PAIRS = (
    ("f16", "f16"),
    ("q8_0", "q8_0"),
    ("q8_0", "q5_1"),
    ("q8_0", "q4_0"),
    ("q5_1", "q4_0"),
    ("q4_0", "q4_0"),
)
"""The presets' pairs and those between them, from the most bits to the fewest."""
