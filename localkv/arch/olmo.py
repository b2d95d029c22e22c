"""OLMo 1, whose norms have no weights, and OLMo 2 and 3, which norm what their blocks give.

After llama.cpp's `src/models/olmo.cpp` and `olmo2.cpp`.
"""

from __future__ import annotations

from dataclasses import replace

from localkv.arch import plain
from localkv.arch.facts import Facts
from localkv.arch.spec import LayerSpec, ModelSpec
from localkv.arch.windows import layers_with_windows, window_rope, windows

PERIOD = 4


def olmo(facts: Facts) -> ModelSpec:
    norm = facts.layer_norm("")
    layer = LayerSpec(plain.attention(facts, interleaved=True), plain.mlp(facts), norm, norm)
    return plain.model(facts, [layer] * facts.n_layers, output_norm=norm)


def olmo2(facts: Facts) -> ModelSpec:
    """OLMo 3 is this with windows; layers that have one rotate without YaRN."""
    attention = plain.attention(facts, interleaved=False)
    assert attention.rope is not None
    layer = LayerSpec(
        replace(attention, **plain.row_norms(facts)),
        plain.mlp(facts),
        None,
        None,
        **plain.post_norms(facts),
    )
    rope = window_rope(facts, attention.rope, scaled=False)
    return plain.model(facts, layers_with_windows(layer, windows(facts, PERIOD), rope))
