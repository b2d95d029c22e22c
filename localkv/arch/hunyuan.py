"""Hunyuan: norms of q and k after RoPE, whose base grows with the context it was stretched for.

After llama.cpp's `src/models/hunyuan-dense.cpp` and `hunyuan-vl.cpp`.
"""

from __future__ import annotations

from dataclasses import replace

from localkv.arch import plain
from localkv.arch.facts import Facts
from localkv.arch.spec import AttentionSpec, MlpSpec, ModelSpec


def attention(facts: Facts) -> AttentionSpec:
    spec = plain.attention(facts, interleaved=False, divisors=True)
    return replace(spec, **plain.head_norms(facts), norms_after_rope=True)


def _stretched(facts: Facts, spec: AttentionSpec) -> AttentionSpec:
    """RoPE's base times alpha^(d / (d - 2)), NTK-aware scaling."""
    alpha, d = facts.number("rope.scaling.alpha", 0.0), spec.key_dim
    if not alpha or spec.rope is None or d <= 2:
        return spec
    return replace(spec, rope=replace(spec.rope, theta=spec.rope.theta * alpha ** (d / (d - 2))))


def _mlp(facts: Facts) -> MlpSpec:
    """A dense block; files of dense models may speak of one expert."""
    if facts.integer("expert_count", 0) > 1:
        return plain.mlp(facts)  # which refuses it
    return MlpSpec(facts.same_in_all_layers("feed_forward_length"))


def hunyuan_dense(facts: Facts) -> ModelSpec:
    facts.turns_sections()
    layer = plain.layer(facts, _stretched(facts, attention(facts)), _mlp(facts))
    return plain.model(facts, [layer] * facts.n_layers)
