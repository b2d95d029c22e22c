"""Gemma 3: windows in five layers of six, with a RoPE of their own. After `src/models/gemma3.cpp`.

Norms of Gemma are 1 + w; converters add the 1, so files hold w as it is used.
"""

from __future__ import annotations

import math
from dataclasses import replace

from localkv.arch import plain
from localkv.arch.facts import Facts
from localkv.arch.mixer_spec import AttentionParams
from localkv.arch.rope_spec import RopeSpec
from localkv.arch.spec import ModelSpec
from localkv.errors import ModelFileError

PERIOD = 6
WINDOW_THETA = 10000.0
SCALED_BY_EMBEDDING = 62
"""Layers of the 27B model, whose queries are scaled by the embedding's width for a head."""


def _windows(facts: Facts) -> list[bool]:
    """Of each layer, whether it has a window.

    Raises:
        ModelFileError: the pattern is of another length than the model.
    """
    key = "attention.sliding_window_pattern"
    pattern = facts.keys.get(facts.key(key))
    if isinstance(pattern, list):
        if len(pattern) != facts.n_layers:
            raise ModelFileError(
                f"key {facts.key(key)!r} has {len(pattern)} items for {facts.n_layers} layers"
            )
        return [bool(item) for item in pattern]
    period = facts.integer(key, PERIOD)
    return [period > 0 and i % period < period - 1 for i in range(facts.n_layers)]


def gemma3(facts: Facts) -> ModelSpec:
    full = replace(plain.attention(facts, interleaved=False), **plain.head_norms(facts))
    scale = full.params.softmax_scale
    if facts.n_layers == SCALED_BY_EMBEDDING:
        scale = 1.0 / math.sqrt(facts.n_embd // full.n_heads)
    full = replace(full, params=AttentionParams(scale))
    assert full.rope is not None
    theta = facts.number("rope.freq_base_swa", WINDOW_THETA)
    windowed = replace(
        full,
        params=AttentionParams(scale, facts.integer("attention.sliding_window", 0)),
        rope=RopeSpec(full.rope.n_dims, theta, interleaved=False),
    )
    mlp = replace(plain.mlp(facts), activation="gelu")
    seeing_all, seeing_some = (
        replace(
            plain.layer(facts, attention, mlp),
            post_attn_norm=facts.rms_norm("post_attention_norm"),
            post_ffn_norm=facts.rms_norm("post_ffw_norm"),
        )
        for attention in (full, windowed)
    )
    layers = [seeing_some if has_window else seeing_all for has_window in _windows(facts)]
    return plain.model(
        facts,
        layers,
        embedding_scale=math.sqrt(facts.n_embd),
        logit_softcap=facts.number("final_logit_softcapping", 0.0),
    )


ARCHITECTURES = {"gemma3": gemma3}
