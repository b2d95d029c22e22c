"""Granite: a Llama with factors on the embedding, the residual, the softmax and the logits.

After llama.cpp's `src/models/granite.cpp`, `granite-moe.cpp`, `granite-swa.cpp` and `minicpm.cpp`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from localkv.arch import plain
from localkv.arch.checkpoint import Config, Keys, Named, Weight, with_neighbours
from localkv.arch.experts import experts
from localkv.arch.facts import Facts
from localkv.arch.llama import LLAMA, llama_keys
from localkv.arch.spec import AttentionParams, AttentionSpec, LayerSpec, ModelSpec
from localkv.arch.windows import windows, with_window

ROPE_PATTERN = "attention.rope_pattern"


def attention(facts: Facts, layer: int | None = None) -> AttentionSpec:
    """Its scale is given, and `rope.scaling.finetuned` says whether there is RoPE."""
    spec = plain.attention(facts, interleaved=True, divisors=True, long_divisors=True, layer=layer)
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
    return plain.model(facts, layer, **scales(facts))


def granite_moe(facts: Facts) -> ModelSpec:
    """Its experts are as wide as dense blocks would be; the shared one may be missing."""
    moe = experts(
        facts,
        n_ff=facts.same_in_all_layers("feed_forward_length"),
        n_ff_shared=facts.integer("expert_shared_feed_forward_length", 0),
    )
    layer = residual(facts, plain.layer(facts, attention(facts), moe))
    return plain.model(facts, layer, **scales(facts))


def granite_swa(facts: Facts) -> ModelSpec:
    """Windows by a pattern, sinks, and RoPE in layers that another pattern names."""
    full = plain.layer(facts, attention(facts), plain.mlp(facts))
    full = replace(full, mixer=replace(full.attention, sinks="attn_sinks"))
    facts.integer("attention.sliding_window")  # no default
    rotated = [True] * facts.n_layers
    if facts.has(ROPE_PATTERN):
        rotated = list(facts.flags_per_layer(ROPE_PATTERN))
    rope = full.attention.rope
    layers = [
        with_window(residual(facts, full), window, rope if turns else None)
        for window, turns in zip(windows(facts, None), rotated, strict=True)
    ]
    return plain.model(facts, layers, **scales(facts))


def minicpm(facts: Facts) -> ModelSpec:
    """MiniCPM 1, 2B, and 4, 8B: Granite without a scale of the softmax."""
    spec = plain.attention(facts, interleaved=True, divisors=True, long_divisors=True)
    layer = residual(facts, plain.layer(facts, spec, plain.mlp(facts)))
    return plain.model(facts, layer, **scales(facts))


_FACTORS = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}


def granite_keys(config: Config) -> Keys:
    """A Llama's; heads are as wide as the embedding leaves them."""
    config = Config({**config.values, "head_dim": None})
    keys = llama_keys(config)
    return keys | {key: config.number(name) for key, name in _FACTORS.items() if config.has(name)}


def _moe_keys(config: Config) -> Keys:
    keys = granite_keys(config)
    if config.get("shared_intermediate_size"):
        keys["expert_shared_feed_forward_length"] = config.integer("shared_intermediate_size")
    return keys


def _moe_weights(config: Config, name: str, weight: Weight) -> Named:
    """Gates and what they gate are in one matrix; without experts the shared one is the block."""
    suffix = "exps"
    if ".shared_mlp." in name:
        suffix = "shexp" if config.get("num_local_experts") else ""
    block = name.removeprefix("model.layers.").partition(".")[0]
    part = f"_{suffix}" if suffix else ""
    if name.endswith(".input_linear.weight"):
        half = weight.shape[-2] // 2
        yield f"blk.{block}.ffn_gate{part}.weight", weight.rows(range(half))
        yield f"blk.{block}.ffn_up{part}.weight", weight.rows(range(half, 2 * half))
    elif name.endswith("mlp.output_linear.weight") and not suffix:
        yield f"blk.{block}.ffn_down.weight", weight
    else:
        yield from with_neighbours(config, name, weight)


_MOE = replace(LLAMA, architecture="granitemoe", keys=_moe_keys, weights=_moe_weights)


CHECKPOINTS = {
    "GraniteForCausalLM": replace(LLAMA, architecture="granite", keys=granite_keys),
    "GraniteMoeForCausalLM": _MOE,
    "GraniteMoeSharedForCausalLM": _MOE,
}
