"""Qwen 1 to 3, dense and with experts. After llama.cpp's `src/models/qwen2.cpp` and its kin."""

from __future__ import annotations

from dataclasses import replace

from localkv.arch import plain
from localkv.arch.experts import experts
from localkv.arch.facts import Facts
from localkv.arch.spec import AttentionSpec, MlpSpec, ModelSpec, MoeSpec


def _model(facts: Facts, attention: AttentionSpec, ffn: MlpSpec | MoeSpec) -> ModelSpec:
    return plain.model(facts, [plain.layer(facts, attention, ffn)] * facts.n_layers)


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
    return _model(facts, _normed(facts), plain.mlp(facts))


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


ARCHITECTURES = {
    "qwen": qwen,
    "qwen2vl": qwen2vl,
    "qwen3vl": qwen3vl,
    "qwen3vlmoe": qwen3vlmoe,
    "qwen2": qwen2,
    "qwen2moe": qwen2moe,
    "qwen3": qwen3,
    "qwen3moe": qwen3moe,
}
