"""Plain layers with routed experts, which differ in how experts are chosen and weighed.

After llama.cpp's `src/models/olmoe.cpp`, `hunyuan-moe.cpp`, `minimax-m2.cpp`, `bailingmoe2.cpp`,
`dots1.cpp`, `ernie4-5-moe.cpp` and `glm4-moe.cpp`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from localkv.arch import plain
from localkv.arch.experts import dense, expert_width, experts, has_selection_bias
from localkv.arch.facts import Facts
from localkv.arch.ffn_spec import MoeSpec
from localkv.arch.spec import LayerSpec, ModelSpec


def leading_dense(facts: Facts, *, step: int = 1) -> list[bool]:
    """Of each layer, whether it is dense: all before `leading_dense_block_count`, and behind them
    all but the last of each `step`."""
    n_lead = facts.integer("leading_dense_block_count", 0)
    return [i < n_lead or (i + 1) % step != 0 for i in range(facts.n_layers)]


def mixed(
    facts: Facts, layer: LayerSpec, moe: MoeSpec, is_dense: Sequence[bool]
) -> list[LayerSpec]:
    """The layer with experts, or with a dense block."""
    routed, other = replace(layer, ffn=moe), layer
    if any(is_dense):
        other = replace(layer, ffn=dense(facts))
    return [other if plain_block else routed for plain_block in is_dense]


def olmoe(facts: Facts) -> ModelSpec:
    attention = replace(plain.attention(facts, interleaved=False), **plain.row_norms(facts))
    moe = experts(facts, renormalise=False, n_ff=facts.same_in_all_layers("feed_forward_length"))
    return plain.model(facts, [plain.layer(facts, attention, moe)] * facts.n_layers)


def hunyuan_moe(facts: Facts) -> ModelSpec:
    """Norms of q and k come after RoPE; a shared expert for every token."""
    attention = replace(
        plain.attention(facts, interleaved=False, divisors=True),
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
    return plain.model(facts, mixed(facts, layer, moe, leading_dense(facts)))


def ernie_moe(facts: Facts) -> ModelSpec:
    moe = experts(
        facts,
        n_ff_shared=facts.integer("expert_shared_feed_forward_length", 0),
        selection_bias=has_selection_bias(facts),
    )
    layer = plain.layer(facts, plain.attention(facts, interleaved=True), moe)
    is_dense = leading_dense(facts, step=facts.integer("interleave_moe_layer_step"))
    return plain.model(facts, mixed(facts, layer, moe, is_dense))


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
    return plain.model(facts, mixed(facts, layer, moe, leading_dense(facts)))


ARCHITECTURES = {
    "olmoe": olmoe,
    "hunyuan-moe": hunyuan_moe,
    "minimax-m2": minimax_m2,
    "bailingmoe2": bailingmoe2,
    "dots1": dots1,
    "ernie4_5-moe": ernie_moe,
    "glm4moe": glm_moe,
}
