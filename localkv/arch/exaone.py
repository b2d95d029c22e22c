"""EXAONE 3 and 4, and K-EXAONE with experts.

After llama.cpp's `src/models/exaone.cpp`, `exaone4.cpp` and `exaone-moe.cpp`.
"""

from __future__ import annotations

from dataclasses import replace

from localkv.arch import plain
from localkv.arch.experts import (
    expert_width,
    experts,
    has_selection_bias,
    leading_dense,
    with_dense,
)
from localkv.arch.facts import Facts
from localkv.arch.spec import LayerSpec, ModelSpec
from localkv.arch.windows import layers_with_windows, window_rope, windows

LAYERS_WITH_WINDOWS = 64
"""Layers of the 32B model, the only one of EXAONE 4 with windows."""
PERIOD, WINDOW = 4, 4096


def exaone(facts: Facts) -> ModelSpec:
    attention = plain.attention(facts, interleaved=False, divisors=True)
    return plain.model(facts, plain.layer(facts, attention, plain.mlp(facts)))


def exaone4(facts: Facts) -> ModelSpec:
    """In the 32B model layers that see everything don't rotate."""
    attention = replace(
        plain.attention(facts, interleaved=False, divisors=True), **plain.head_norms(facts)
    )
    layer = LayerSpec(attention, plain.mlp(facts), None, None, **plain.post_norms(facts))
    if facts.n_layers != LAYERS_WITH_WINDOWS:
        return plain.model(facts, layer)
    assert attention.rope is not None
    unrotated = replace(layer, mixer=replace(attention, rope=None))
    rope = window_rope(facts, attention.rope)
    return plain.model(
        facts, layers_with_windows(unrotated, windows(facts, PERIOD, default=WINDOW), rope)
    )


def exaone_moe(facts: Facts) -> ModelSpec:
    """K-EXAONE: only layers with a window rotate."""
    attention = plain.attention(facts, interleaved=False, divisors=True)
    attention = replace(attention, **plain.head_norms(facts))
    assert attention.rope is not None
    moe = experts(
        facts,
        gating=None,
        renormalise=None,
        scaled=True,
        n_ff_shared=facts.integer("expert_shared_feed_forward_length", 0) or expert_width(facts),
        selection_bias=has_selection_bias(facts),
    )
    layer = plain.layer(facts, replace(attention, rope=None), moe)
    facts.integer("attention.sliding_window")  # no default
    rope = window_rope(facts, attention.rope)
    layers = layers_with_windows(layer, windows(facts, PERIOD), rope)
    return plain.model(facts, with_dense(facts, layers, leading_dense(facts)))
