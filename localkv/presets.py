"""Pairs of cache types by purpose, so that nobody has to know all names to begin.

A preset is nothing but the two flags it stands for. The pairs follow from figures: each is on the
frontier of docs/kv-cache.md, where no other pair of as few bits after 16,384 tokens has a smaller
divergence on the worst of three models (KLD: of the model that ships, and of its twins with
outliers in K); "speed" among pairs without a tail, as those are read fastest. K has at least as
many bits as V, since an error of K moves the softmax's weights and an error of V only the values
that are averaged. Types by channel keep the newest 64 tokens in f16 as well.
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
        "q8_0c",
        "q4_1",
        "43 % of f16's memory in a long context, and hardly a prediction moves "
        "(KLD 3.8e-4 to 4.1e-4)",
    ),
    "speed": Preset(
        "q8_0",
        "q4_0",
        "as fast in a long context as 4 bits for both, while K keeps 8 (KLD 2.3e-2 to 4.2e-2)",
    ),
    "memory": Preset(
        "q3_1c",
        "q3_1",
        "25 % of f16's memory in a long context; 1 token in 40 changes (KLD 1.6e-2)",
    ),
}
"""From the most bits to the fewest."""

USUAL = (("f16", "f16"), ("q8_0", "q8_0"), ("q8_0", "q4_0"), ("q4_0", "q4_0"))
"""What is suggested where memory is short, from the most bits to the fewest: these have no tail, so
they take the same for each token of a context, however short it is."""

PAIRS = (
    ("f16", "f16"),
    ("q8_0", "q8_0"),
    ("q8_0", "q5_1"),
    ("q8_0", "q4_0"),
    ("q5_1", "q4_0"),
    ("q4_0", "q4_0"),
)
"""These and those between them."""


def of_presets() -> tuple[tuple[str, str], ...]:
    """Their pairs, f16 left out."""
    pairs = [(preset.type_k, preset.type_v) for preset in PRESETS.values()]
    return tuple(pair for pair in pairs if pair != USUAL[0])
