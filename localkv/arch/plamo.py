"""PLaMo 1, whose blocks are side by side, and PLaMo 3, with windows and norms after each block.

After llama.cpp's `src/models/plamo.cpp` and `plamo3.cpp`.
"""

from __future__ import annotations

from dataclasses import replace

from localkv.arch import plain
from localkv.arch.facts import Facts
from localkv.arch.spec import LayerSpec, ModelSpec
from localkv.arch.windows import window_rope, windows, with_window

PERIOD = 8
WINDOW_THETA = 10000.0


def plamo(facts: Facts) -> ModelSpec:
    norm = facts.rms_norm("attn_norm")
    attention = plain.attention(facts, interleaved=False)
    layer = LayerSpec(attention, plain.mlp(facts), norm, norm, parallel=True)
    return plain.model(facts, [layer] * facts.n_layers)


def _layer(facts: Facts, index: int, window: int) -> LayerSpec:
    attention = plain.attention(facts, interleaved=False, layer=index)
    assert attention.rope is not None
    rope = attention.rope
    if window:
        rope = window_rope(facts, rope, theta=WINDOW_THETA, scaled=False)
    attention = replace(attention, **plain.head_norms(facts))
    layer = plain.layer(facts, attention, plain.mlp(facts, layer=index))
    return with_window(replace(layer, **plain.post_norms(facts)), window, rope)


def plamo3(facts: Facts) -> ModelSpec:
    return plain.model(
        facts, [_layer(facts, i, window) for i, window in enumerate(windows(facts, PERIOD))]
    )
