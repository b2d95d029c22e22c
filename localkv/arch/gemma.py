"""Gemma 3: windows in five layers of six, with a RoPE of their own. After `src/models/gemma3.cpp`.

Norms of Gemma are 1 + w; converters add the 1, so files hold w as it is used.
"""

from __future__ import annotations

import math
from dataclasses import replace

from localkv.arch import plain
from localkv.arch.facts import Facts
from localkv.arch.mixer_spec import AttentionParams
from localkv.arch.spec import ModelSpec
from localkv.arch.windows import layers_with_windows, window_rope, windows

PERIOD = 6
WINDOW_THETA = 10000.0
SCALED_BY_EMBEDDING = 62
"""Layers of the 27B model, whose queries are scaled by the embedding's width for a head."""


def gemma3(facts: Facts) -> ModelSpec:
    full = replace(plain.attention(facts, interleaved=False), **plain.head_norms(facts))
    if facts.n_layers == SCALED_BY_EMBEDDING:
        scale = 1.0 / math.sqrt(facts.n_embd // full.n_heads)
        full = replace(full, params=AttentionParams(scale))
    assert full.rope is not None
    layer = replace(plain.layer(facts, full, plain.mlp(facts, "gelu")), **plain.post_norms(facts))
    rope = window_rope(facts, full.rope, theta=WINDOW_THETA, scaled=False)
    return plain.model(
        facts,
        layers_with_windows(layer, windows(facts, PERIOD), rope),
        embedding_scale=math.sqrt(facts.n_embd),
        logit_softcap=facts.number("final_logit_softcapping", 0.0),
    )


ARCHITECTURES = {"gemma3": gemma3}
