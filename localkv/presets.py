"""Pairs of cache types by what they are for, so that nobody has to know fifteen names to begin.

A preset is nothing but the two flags it stands for. The pairs follow from figures: divergence from
an f16 cache in docs/quality.md, speed behind 4,096 tokens in the README. K gets at least as many
bits as V, since an error of K moves the softmax's weights and one of V only what is averaged.
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
    "quality": Preset(
        "f16", "f16", "predictions as with an f32 cache; more bits change nothing (KLD below 1e-8)"
    ),
    "balanced": Preset(
        "q8_0", "q8_0", "about half of f16's memory, and hardly a prediction moves (KLD 6e-6)"
    ),
    "speed": Preset(
        "q8_0",
        "q4_0",
        "as fast behind a long context as 4 bits for both, while K keeps 8 (KLD 5e-4)",
    ),
    "memory": Preset(
        "q4_0", "q4_0", "the fewest bits, 28 % of f16's; the largest divergence (KLD 1e-3), rotated"
    ),
}
"""From the most bits to the fewest."""
