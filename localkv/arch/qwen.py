"""Qwen 1 to 3, dense and with experts, and Qwen3-Next and Qwen 3.5.

The last two have a gated delta rule in three layers of four, and gated attention in the other.
After llama.cpp's `src/models/qwen2.cpp` and its kin, `qwen3next.cpp`, `qwen35.cpp` and
`qwen35moe.cpp`.
"""

from __future__ import annotations

from dataclasses import replace

from localkv.arch import plain
from localkv.arch.experts import expert_width, experts
from localkv.arch.facts import Facts
from localkv.arch.spec import (
    AttentionSpec,
    DeltaNetSpec,
    LayerSpec,
    MlpSpec,
    ModelSpec,
    MoeSpec,
    NormSpec,
)
from localkv.errors import ModelFileError


def _model(facts: Facts, attention: AttentionSpec, ffn: MlpSpec | MoeSpec) -> ModelSpec:
    return plain.model(facts, plain.layer(facts, attention, ffn))


def _biased(facts: Facts) -> AttentionSpec:
    return replace(plain.attention(facts, interleaved=False), qkv_bias=True)


def _normed(facts: Facts) -> AttentionSpec:
    return replace(plain.attention(facts, interleaved=False), **plain.head_norms(facts))


def qwen(facts: Facts) -> ModelSpec:
    """The first Qwen; its files give the width of gate and up together."""
    mlp = plain.mlp(facts)
    return _model(facts, _biased(facts), replace(mlp, n_ff=mlp.n_ff // 2))


def qwen2(facts: Facts) -> ModelSpec:
    return _model(facts, _biased(facts), plain.mlp(facts))


def qwen2moe(facts: Facts) -> ModelSpec:
    """A shared expert, gated by a sigmoid; weights of routed ones as the softmax leaves them."""
    n_ff = facts.same_in_all_layers("feed_forward_length", 0)
    n_shared = facts.integer("expert_shared_feed_forward_length", n_ff)
    moe = experts(facts, renormalise=False, n_ff_shared=n_shared, shared_gated=True)
    return _model(facts, _biased(facts), moe)


def qwen3(facts: Facts) -> ModelSpec:
    """A file may have a head with a class for yes and one for no (Qwen 3 Reranker)."""
    spec = _model(facts, _normed(facts), plain.mlp(facts))
    return replace(spec, classifier=plain.classifier(facts, "last", is_softmax=True))


def qwen3moe(facts: Facts) -> ModelSpec:
    return _model(facts, _normed(facts), experts(facts))


def qwen2vl(facts: Facts) -> ModelSpec:
    """The part that reads text, of Qwen2-VL and Qwen2.5-VL."""
    facts.turns_sections()
    return qwen2(facts)


def qwen3vl(facts: Facts) -> ModelSpec:
    facts.turns_sections()
    return qwen3(facts)


def qwen3vlmoe(facts: Facts) -> ModelSpec:
    facts.turns_sections()
    return qwen3moe(facts)


ATTENDING_INTERVAL = 4
"""Every fourth layer attends, if the file does not say otherwise."""


def recurrent_layers(facts: Facts) -> tuple[bool, ...]:
    """Whether each layer is recurrent."""
    if facts.has("attention.recurrent_layers"):
        return facts.flags_per_layer("attention.recurrent_layers")
    interval = facts.integer("full_attention_interval", ATTENDING_INTERVAL)
    return tuple((i + 1) % interval != 0 for i in range(facts.n_layers))


def delta_net(facts: Facts, *, heads_in_turn: bool) -> DeltaNetSpec:
    """The mixer of the recurrent layers.

    Raises:
        ModelFileError: the sizes contradict each other.
    """
    size, n_values = facts.integer("ssm.state_size"), facts.integer("ssm.time_step_rank")
    n_keys, width = facts.integer("ssm.group_count"), facts.integer("ssm.inner_size")
    if n_values * size != width:
        raise ModelFileError(f"{n_values} heads of {size} channels are not {width} channels")
    if n_values % n_keys:
        raise ModelFileError(f"{n_values} value heads can't share {n_keys} key heads evenly")
    eps = facts.number("attention.layer_norm_rms_epsilon")
    return DeltaNetSpec(
        n_key_heads=n_keys,
        n_value_heads=n_values,
        head_dim=size,
        conv_kernel=facts.integer("ssm.conv_kernel"),
        norm=NormSpec("ssm_norm", "rms", eps),
        heads_in_turn=heads_in_turn,
    )


def _hybrid(facts: Facts, ffn: MlpSpec | MoeSpec, *, heads_in_turn: bool) -> ModelSpec:
    attention = plain.attention(facts, interleaved=False)
    attention = replace(attention, gated=True, **plain.head_norms(facts))
    net = delta_net(facts, heads_in_turn=heads_in_turn)
    norms = facts.rms_norm("attn_norm"), facts.rms_norm("post_attention_norm")
    attending, recurrent = (LayerSpec(mixer, ffn, *norms) for mixer in (attention, net))
    flags = recurrent_layers(facts)
    if all(flags):
        raise ModelFileError("a model of recurrent layers only is not supported")
    layers = [recurrent if flag else attending for flag in flags]
    return plain.model(facts, layers, prediction=facts.prediction(attending))


def _gated_experts(facts: Facts) -> MoeSpec:
    """Routed experts, and a shared one that is gated by a sigmoid."""
    n_shared = facts.integer("expert_shared_feed_forward_length", expert_width(facts))
    return experts(facts, n_ff_shared=n_shared, shared_gated=True)


def qwen35(facts: Facts) -> ModelSpec:
    facts.turns_sections()
    return _hybrid(facts, plain.mlp(facts), heads_in_turn=True)


def qwen35moe(facts: Facts) -> ModelSpec:
    facts.turns_sections()
    return _hybrid(facts, _gated_experts(facts), heads_in_turn=True)


def qwen3next(facts: Facts) -> ModelSpec:
    return _hybrid(facts, _gated_experts(facts), heads_in_turn=False)
