"""Gemma 1 to 3: GELU, scaled embeddings; from 2 on norms after each block, and windows.

After llama.cpp's `src/models/gemma.cpp`, `gemma2.cpp` and `gemma3.cpp`. Norms of Gemma are 1 + w;
converters add the 1, so files hold w as it is used.
"""

from __future__ import annotations

import math
from dataclasses import replace

from localkv.arch import plain
from localkv.arch.facts import Facts
from localkv.arch.spec import AttentionParams, AttentionSpec, ModelSpec
from localkv.arch.windows import layers_with_windows, window_rope, windows

GEMMA2_PERIOD, GEMMA3_PERIOD = 2, 6
GEMMA2_WINDOW = 4096
WINDOW_THETA = 10000.0
GEMMA2_SCALED_BY_EMBEDDING, GEMMA3_SCALED_BY_EMBEDDING = 46, 62
"""Layers of the 27B models, whose queries are scaled by the embedding's width for a head."""


def _attention(facts: Facts, scaled_by_embedding: int) -> AttentionSpec:
    attention = plain.attention(facts, interleaved=False)
    if facts.n_layers != scaled_by_embedding:
        return attention
    return replace(
        attention,
        params=AttentionParams(1.0 / math.sqrt(facts.n_embd // attention.n_heads)),
    )


def gemma(facts: Facts) -> ModelSpec:
    attention, mlp = plain.attention(facts, interleaved=False), plain.mlp(facts, "gelu")
    return plain.model(
        facts,
        [plain.layer(facts, attention, mlp)] * facts.n_layers,
        embedding_scale=math.sqrt(facts.n_embd),
    )


def gemma2(facts: Facts) -> ModelSpec:
    attention = _attention(facts, GEMMA2_SCALED_BY_EMBEDDING)
    full = attention.rope
    assert full is not None
    softcap = facts.number("attn_logit_softcapping", 50.0)
    attention = replace(attention, params=replace(attention.params, softcap=softcap))
    layer = replace(
        plain.layer(facts, attention, plain.mlp(facts, "gelu")), **plain.post_norms(facts)
    )
    seen = windows(facts, GEMMA2_PERIOD, default=GEMMA2_WINDOW)
    return plain.model(
        facts,
        layers_with_windows(layer, seen, window_rope(facts, full)),
        embedding_scale=math.sqrt(facts.n_embd),
        logit_softcap=facts.number("final_logit_softcapping", 30.0),
    )


def gemma3(facts: Facts) -> ModelSpec:
    attention = _attention(facts, GEMMA3_SCALED_BY_EMBEDDING)
    full = attention.rope
    assert full is not None
    attention = replace(attention, **plain.head_norms(facts))
    layer = replace(
        plain.layer(facts, attention, plain.mlp(facts, "gelu")), **plain.post_norms(facts)
    )
    rope = window_rope(facts, full, theta=WINDOW_THETA, scaled=False)
    return plain.model(
        facts,
        layers_with_windows(layer, windows(facts, GEMMA3_PERIOD), rope),
        embedding_scale=math.sqrt(facts.n_embd),
        logit_softcap=facts.number("final_logit_softcapping", 0.0),
    )


ARCHITECTURES = {"gemma": gemma, "gemma2": gemma2, "gemma3": gemma3}
