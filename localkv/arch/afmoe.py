"""AFMoE, Arcee's Trinity models: gated attention, windows, norms around both blocks, experts.

After llama.cpp's `src/models/afmoe.cpp`.
"""

from __future__ import annotations

import math
from dataclasses import replace

from localkv.arch import plain
from localkv.arch.experts import expert_width, experts
from localkv.arch.facts import Facts
from localkv.arch.mixtures import leading_dense, with_dense
from localkv.arch.spec import LayerSpec, ModelSpec
from localkv.arch.windows import layers_with_windows, window_rope, windows

PERIOD = 4
UNROTATED_INTERVAL = 4
"""Every fourth layer isn't rotated, whether it has a window or not."""


def afmoe(facts: Facts) -> ModelSpec:
    attention = plain.attention(facts, interleaved=False)
    attention = replace(attention, gated=True, **plain.head_norms(facts))
    assert attention.rope is not None
    moe = experts(
        facts,
        gating="sigmoid",
        gating_varies=True,
        renormalise=None,
        scaled=True,
        n_ff_shared=expert_width(facts) * facts.integer("expert_shared_count"),
        selection_bias=True,
    )
    layer = replace(plain.layer(facts, attention, moe), **plain.post_norms(facts))
    rope = window_rope(facts, attention.rope)
    layers = layers_with_windows(layer, windows(facts, PERIOD), rope)
    layers = [
        layer if (i + 1) % UNROTATED_INTERVAL else _unrotated(layer)
        for i, layer in enumerate(layers)
    ]
    return plain.model(
        facts,
        with_dense(facts, layers, leading_dense(facts)),
        embedding_scale=math.sqrt(facts.n_embd),
    )


def _unrotated(layer: LayerSpec) -> LayerSpec:
    return replace(layer, mixer=replace(layer.attention, rope=None))


ARCHITECTURES = {"afmoe": afmoe}
