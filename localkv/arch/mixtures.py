"""Plain layers with routed experts, which differ in how experts are chosen and weighed.

After llama.cpp's `src/models/olmoe.cpp`, `hunyuan-moe.cpp`, `minimax-m2.cpp`, `bailingmoe2.cpp`,
`dots1.cpp`, `deepseek.cpp`, `deepseek2ocr.cpp`, `bailingmoe.cpp`, `hy-v3.cpp`, `mellum.cpp`,
`ernie4-5-moe.cpp` and `glm4-moe.cpp`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from localkv.arch import plain
from localkv.arch.experts import dense, expert_width, experts, has_selection_bias
from localkv.arch.facts import Facts
from localkv.arch.spec import LayerSpec, ModelSpec, RopeSpec
from localkv.arch.windows import layers_with_windows, windows

MELLUM_PERIOD = 4


def leading_dense(facts: Facts, *, step: int = 1) -> list[bool]:
    """Whether each layer is dense: all before `leading_dense_block_count`, and from there on all
    but the last of each `step`."""
    n_lead = facts.integer("leading_dense_block_count", 0)
    return [i < n_lead or (i + 1) % step != 0 for i in range(facts.n_layers)]


def with_dense(
    facts: Facts, layers: Sequence[LayerSpec], is_dense: Sequence[bool]
) -> list[LayerSpec]:
    """Layers of experts, but with a dense block where `is_dense` says so."""
    if not any(is_dense):
        return list(layers)
    block = dense(facts)
    return [
        replace(layer, ffn=block) if without_experts else layer
        for layer, without_experts in zip(layers, is_dense, strict=True)
    ]


def olmoe(facts: Facts) -> ModelSpec:
    attention = replace(plain.attention(facts, interleaved=False), **plain.row_norms(facts))
    moe = experts(facts, renormalise=False, n_ff=facts.same_in_all_layers("feed_forward_length"))
    return plain.model(facts, [plain.layer(facts, attention, moe)] * facts.n_layers)


def hunyuan_moe(facts: Facts) -> ModelSpec:
    """Norms of q and k come after RoPE; a shared expert for every token."""
    attention = replace(
        plain.attention(facts, interleaved=False),
        **plain.head_norms(facts),
        norms_after_rope=True,
    )
    n_ff = facts.same_in_all_layers("feed_forward_length")
    n_shared = facts.integer("expert_shared_feed_forward_length", 0) or n_ff
    moe = experts(facts, n_ff=n_ff, n_ff_shared=n_shared)
    return plain.model(facts, [plain.layer(facts, attention, moe)] * facts.n_layers)


def minimax_m2(facts: Facts) -> ModelSpec:
    attention = replace(plain.attention(facts, interleaved=False), **plain.row_norms(facts))
    n_ff = facts.same_in_all_layers("feed_forward_length")
    moe = experts(facts, gating=None, n_ff=n_ff, selection_bias=True)
    return plain.model(facts, [plain.layer(facts, attention, moe)] * facts.n_layers)


def bailingmoe2(facts: Facts) -> ModelSpec:
    """Ling 2 and Ring 2."""
    width = facts.integer("expert_shared_feed_forward_length", 0) or expert_width(facts)
    return _deepseek_like(facts, n_ff_shared=width * facts.integer("expert_shared_count"))


def dots1(facts: Facts) -> ModelSpec:
    return _deepseek_like(
        facts, n_ff_shared=expert_width(facts) * facts.integer("expert_shared_count")
    )


def _deepseek_like(facts: Facts, *, n_ff_shared: int) -> ModelSpec:
    """Norms of each head, leading dense layers, and DeepSeek's way to choose experts."""
    attention = replace(plain.attention(facts, interleaved=False), **plain.head_norms(facts))
    moe = experts(
        facts,
        gating=None,
        renormalise=None,
        scaled=True,
        n_ff_shared=n_ff_shared,
        selection_bias=has_selection_bias(facts),
    )
    layer = plain.layer(facts, attention, moe)
    return plain.model(facts, with_dense(facts, [layer] * facts.n_layers, leading_dense(facts)))


def deepseek(facts: Facts) -> ModelSpec:
    """DeepSeek-MoE, before there was latent attention."""
    return _llama_like(facts, leading_dense(facts), renormalise=False)


def deepseek_ocr(facts: Facts) -> ModelSpec:
    """The part of DeepSeek-OCR that reads text: no latents, and RoPE that is never scaled."""
    attention = plain.attention(facts, interleaved=False)
    attention = replace(attention, rope=RopeSpec(attention.key_dim, interleaved=False))
    moe = experts(
        facts,
        gating_varies=True,
        renormalise=None,
        scaled=True,
        n_ff_shared=expert_width(facts) * facts.integer("expert_shared_count"),
        selection_bias=has_selection_bias(facts),
    )
    layer = plain.layer(facts, attention, moe)
    return plain.model(facts, with_dense(facts, [layer] * facts.n_layers, leading_dense(facts)))


def bailingmoe(facts: Facts) -> ModelSpec:
    """Ling 1."""
    return _llama_like(facts, [False] * facts.n_layers, renormalise=None)


def _llama_like(facts: Facts, is_dense: Sequence[bool], *, renormalise: bool | None) -> ModelSpec:
    """Llama's attention, a softmax of all experts, and shared ones."""
    moe = experts(
        facts,
        renormalise=renormalise,
        scaled=True,
        n_ff_shared=expert_width(facts) * facts.integer("expert_shared_count"),
    )
    layer = plain.layer(facts, plain.attention(facts, interleaved=True), moe)
    return plain.model(facts, with_dense(facts, [layer] * facts.n_layers, is_dense))


def hunyuan3(facts: Facts) -> ModelSpec:
    """Layers without a router are dense."""
    attention = plain.attention(facts, interleaved=False)
    width = facts.integer("expert_shared_feed_forward_length", 0) or expert_width(facts)
    moe = experts(
        facts,
        gating="sigmoid",
        gating_varies=True,
        renormalise=None,
        scaled=True,
        n_ff_shared=width,
        selection_bias=has_selection_bias(facts),
    )
    layer = plain.layer(facts, replace(attention, **plain.head_norms(facts)), moe)
    routers = (f"blk.{i}.ffn_gate_inp.weight" for i in range(facts.n_layers))
    is_dense = [router not in facts.shapes for router in routers]
    return plain.model(facts, with_dense(facts, [layer] * facts.n_layers, is_dense))


def mellum(facts: Facts) -> ModelSpec:
    """JetBrains' Mellum 2: layers with a window are rotated by the same base, unscaled."""
    attention = replace(plain.attention(facts, interleaved=False), **plain.head_norms(facts))
    assert attention.rope is not None
    layer = plain.layer(facts, attention, experts(facts))
    rope = RopeSpec(attention.rope.n_dims, attention.rope.theta, interleaved=False)
    return plain.model(facts, layers_with_windows(layer, windows(facts, MELLUM_PERIOD), rope))


def ernie_moe(facts: Facts) -> ModelSpec:
    moe = experts(
        facts,
        n_ff_shared=facts.integer("expert_shared_feed_forward_length", 0),
        selection_bias=has_selection_bias(facts),
    )
    layer = plain.layer(facts, plain.attention(facts, interleaved=True), moe)
    is_dense = leading_dense(facts, step=facts.integer("interleave_moe_layer_step"))
    return plain.model(facts, with_dense(facts, [layer] * facts.n_layers, is_dense))


def glm_moe(facts: Facts) -> ModelSpec:
    """GLM 4.5 to 4.7; only the large ones have norms of q and k."""
    attention = plain.attention(facts, interleaved=False)
    if "blk.0.attn_q_norm.weight" in facts.shapes:
        attention = replace(attention, **plain.head_norms(facts))
    moe = experts(
        facts,
        gating="sigmoid",
        gating_varies=True,
        renormalise=None,
        scaled=True,
        n_ff_shared=expert_width(facts) * facts.integer("expert_shared_count"),
        selection_bias=True,
    )
    layer = LayerSpec(
        attention, moe, facts.rms_norm("attn_norm"), facts.rms_norm("post_attention_norm")
    )
    return plain.model(facts, with_dense(facts, [layer] * facts.n_layers, leading_dense(facts)))


ARCHITECTURES = {
    "olmoe": olmoe,
    "hunyuan-moe": hunyuan_moe,
    "minimax-m2": minimax_m2,
    "bailingmoe2": bailingmoe2,
    "dots1": dots1,
    "deepseek": deepseek,
    "deepseek2-ocr": deepseek_ocr,
    "bailingmoe": bailingmoe,
    "hy_v3": hunyuan3,
    "mellum": mellum,
    "ernie4_5-moe": ernie_moe,
    "glm4moe": glm_moe,
}
