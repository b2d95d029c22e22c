"""Granite: a Llama with factors on the embedding, the residual, the softmax and the logits.

After llama.cpp's `src/models/granite.cpp` and `granite-moe.cpp`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from localkv.arch import plain
from localkv.arch.experts import experts
from localkv.arch.facts import Facts
from localkv.arch.mixer_spec import AttentionParams, AttentionSpec
from localkv.arch.spec import LayerSpec, ModelSpec


def attention(facts: Facts) -> AttentionSpec:
    """Its scale is given, and `rope.scaling.finetuned` says whether there is RoPE."""
    spec = plain.attention(facts, interleaved=True, divisors=True, long_divisors=True)
    scale = facts.number("attention.scale", 0.0) or spec.params.softmax_scale
    rope = spec.rope if facts.boolean("rope.scaling.finetuned", True) else None
    return replace(spec, params=AttentionParams(scale), rope=rope)


def residual(facts: Facts, layer: LayerSpec) -> LayerSpec:
    """The layer with the factor on what its blocks add."""
    return replace(layer, residual_scale=facts.number("residual_scale", 0.0) or 1.0)


def scales(facts: Facts) -> dict[str, Any]:
    """Fields of `ModelSpec`; the logits are divided by what the file calls their scale."""
    return {
        "embedding_scale": facts.number("embedding_scale", 0.0) or 1.0,
        "logit_scale": 1.0 / facts.number("logit_scale"),
    }


def granite(facts: Facts) -> ModelSpec:
    layer = residual(facts, plain.layer(facts, attention(facts), plain.mlp(facts)))
    return plain.model(facts, [layer] * facts.n_layers, **scales(facts))


def granite_moe(facts: Facts) -> ModelSpec:
    """Its experts are as wide as dense blocks would be; the shared one may be missing."""
    moe = experts(
        facts,
        n_ff=facts.same_in_all_layers("feed_forward_length"),
        n_ff_shared=facts.integer("expert_shared_feed_forward_length", 0),
    )
    layer = residual(facts, plain.layer(facts, attention(facts), moe))
    return plain.model(facts, [layer] * facts.n_layers, **scales(facts))


ARCHITECTURES = {"granite": granite, "granitemoe": granite_moe}
