"""Kimi Delta Attention with latent attention: Kimi Linear and Ling 3.

After llama.cpp's `src/models/kimi-linear.cpp` and `bailingmoe3.cpp`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from localkv.arch import deepseek, plain
from localkv.arch.experts import dense, expert_width, experts, leading_dense
from localkv.arch.facts import Facts
from localkv.arch.spec import (
    DeltaNetSpec,
    Ffn,
    LatentAttentionSpec,
    LayerSpec,
    ModelSpec,
    NormSpec,
    RopeSpec,
)
from localkv.errors import ModelFileError


def kimi_linear(facts: Facts) -> ModelSpec:
    """Attention has no RoPE; decays and gates come of latents."""
    net = replace(_delta(facts), low_rank=facts.integer("kda.head_dim"))
    moe = experts(
        facts,
        gating=None,
        scaled=True,
        n_ff_shared=expert_width(facts) * facts.integer("expert_shared_count"),
        selection_bias=True,
    )
    return _model(facts, net, deepseek.attention(facts, None, rank=0), [moe] * facts.n_layers)


def ling3(facts: Facts) -> ModelSpec:
    """A decay has a lower bound, heads of attention have gates, and experts may have limits."""
    if not facts.boolean("kda.safe_gate", True):
        raise ModelFileError(f"key {facts.key('kda.safe_gate')!r} is false, which is not supported")
    net = replace(_delta(facts), least_log_decay=facts.number("kda.gate_lower_bound"))
    rank = facts.integer("attention.q_lora_rank", 0)
    attention = deepseek.attention(facts, _rope(facts), rank=rank)
    width = facts.integer("expert_shared_feed_forward_length", 0)
    n_shared = width or expert_width(facts) * max(1, facts.integer("expert_shared_count"))
    moe = experts(
        facts, gating=None, renormalise=None, scaled=True, n_ff_shared=n_shared, selection_bias=True
    )
    every = facts.every_block if facts.predicts else facts
    limits = zip(
        every.numbers_per_layer("swiglu_clamp_exp", 0.0),
        every.numbers_per_layer("swiglu_clamp_shexp", 0.0),
        strict=True,
    )
    blocks = [replace(moe, limit=limit, shared_limit=shared) for limit, shared in limits]
    attention = replace(attention, head_gated=True)
    last = blocks[facts.n_layers] if facts.predicts else moe
    prediction = facts.prediction(plain.layer(facts, attention, last))
    return replace(_model(facts, net, attention, blocks), prediction=prediction)


def _rope(facts: Facts) -> RopeSpec:
    """RoPE of neighbours; of halves where the file has sections for images."""
    interleaved = not facts.turns_sections()
    rope = facts.rope(facts.integer("rope.dimension_count"), interleaved=interleaved)
    if rope.scaling != "none":
        key = facts.key("rope.scaling.type")
        raise ModelFileError(f"key {key!r} is {rope.scaling!r}, which is not supported")
    return rope


def _delta(facts: Facts) -> DeltaNetSpec:
    n_heads = facts.same_in_all_layers("attention.head_count")
    return DeltaNetSpec(
        n_key_heads=n_heads,
        n_value_heads=n_heads,
        head_dim=facts.integer("kda.head_dim"),
        conv_kernel=facts.integer("ssm.conv_kernel"),
        norm=NormSpec("ssm_norm", "rms", facts.number("attention.layer_norm_rms_epsilon")),
        heads_in_turn=False,
        gate_activation="sigmoid",
        fades_by_channel=True,
    )


def _model(
    facts: Facts, net: DeltaNetSpec, attention: LatentAttentionSpec, blocks: Sequence[Ffn]
) -> ModelSpec:
    """Layers without KV heads are recurrent, and the first ones dense.

    Raises:
        ModelFileError: all layers are recurrent.
    """
    attends = [n > 0 for n in facts.per_layer("attention.head_count_kv")]
    if not any(attends):
        raise ModelFileError("a model of recurrent layers only is not supported")
    layers: list[LayerSpec] = []
    for i, is_dense in enumerate(leading_dense(facts)):
        ffn = dense(facts) if is_dense else blocks[i]
        layers.append(plain.layer(facts, attention if attends[i] else net, ffn))
    return plain.model(facts, layers)
