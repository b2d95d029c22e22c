"""Models with routed experts, which differ in how experts are chosen and weighed.

After llama.cpp's `src/models/olmoe.cpp`, `dbrx.cpp`, `grok.cpp`, `phimoe.cpp`, `hunyuan-moe.cpp`,
`minimax-m2.cpp`, `bailingmoe2.cpp`, `dots1.cpp`, `deepseek.cpp`, `deepseek2ocr.cpp`,
`bailingmoe.cpp`, `hy-v3.cpp`, `mellum.cpp`, `ernie4-5-moe.cpp`, `glm4-moe.cpp`, `openai-moe.cpp`,
`smallthinker.cpp`, `afmoe.cpp`, `step35.cpp`, `laguna.cpp`, `mimo2.cpp` and `maple.cpp`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from localkv.arch import plain
from localkv.arch.checkpoint import (
    GATING,
    Checkpoint,
    Config,
    Keys,
    Named,
    Weight,
    common_keys,
    moe_keys,
    rope_dimensions,
    with_split_experts,
)
from localkv.arch.experts import (
    expert_width,
    experts,
    has_selection_bias,
    leading_dense,
    with_dense,
)
from localkv.arch.facts import ROPE_FREQS, Facts
from localkv.arch.spec import (
    AttentionParams,
    AttentionSpec,
    LayerSpec,
    ModelSpec,
    NormSpec,
    RopeSpec,
)
from localkv.arch.windows import layers_with_windows, window_rope, windows, with_window
from localkv.errors import ModelFileError

MELLUM_PERIOD = 4


def olmoe(facts: Facts) -> ModelSpec:
    attention = replace(plain.attention(facts, interleaved=False), **plain.row_norms(facts))
    moe = experts(facts, renormalise=False, n_ff=facts.same_in_all_layers("feed_forward_length"))
    return plain.model(facts, plain.layer(facts, attention, moe))


def phi_moe(facts: Facts) -> ModelSpec:
    """RMSNorms have biases."""
    attention = plain.attention(facts, interleaved=False, long_divisors=True)
    moe = experts(facts, n_ff=facts.same_in_all_layers("feed_forward_length"))
    layer = LayerSpec(attention, moe, _biased(facts, "attn_norm"), _biased(facts, "ffn_norm"))
    return plain.model(facts, layer, output_norm=_biased(facts, "output_norm"))


def _biased(facts: Facts, tensor: str) -> NormSpec:
    return replace(facts.rms_norm(tensor), biased=True)


def dbrx(facts: Facts) -> ModelSpec:
    """LayerNorms without biases; q, k and v are clamped."""
    attention = plain.attention(facts, interleaved=False, clamps=True)
    moe = experts(facts, n_ff=facts.same_in_all_layers("feed_forward_length"))
    norms = facts.layer_norm("attn_norm"), facts.layer_norm("attn_output_norm")
    layer, last = LayerSpec(attention, moe, *norms), facts.layer_norm("output_norm")
    return plain.model(facts, layer, reads=(plain.CLAMP,), output_norm=last)


def grok(facts: Facts) -> ModelSpec:
    """Norms around both blocks, and factors with defaults. In Grok 2 a dense block stands beside
    the experts, and the norm reads (a + b) / sqrt(2): the norm of a + b with twice the eps."""
    attention = plain.attention(facts, interleaved=False)
    assert attention.rope is not None
    beta = facts.number("rope.scaling.yarn_beta_fast", 8.0)
    scale = facts.number("attention.output_scale", 0.08838834764831845)
    cap = facts.number("attn_logit_softcapping", 30.0)
    attention = replace(
        attention,
        rope=replace(attention.rope, yarn_beta_fast=beta),
        params=replace(attention.params, softmax_scale=scale, softcap=cap),
    )
    is_beside = "blk.0.ffn_up.weight" in facts.shapes
    n_ff = facts.same_in_all_layers("feed_forward_length") if is_beside else 0
    moe = experts(facts, activation="gelu", n_ff_shared=n_ff, shared_suffix="")
    old = "layer_output_norm"
    post = facts.rms_norm(old if f"blk.0.{old}.weight" in facts.shapes else "post_ffw_norm")
    layer = replace(
        plain.layer(facts, attention, moe),
        post_attn_norm=facts.rms_norm("attn_output_norm"),
        post_ffn_norm=replace(post, eps=2 * post.eps) if is_beside else post,
    )
    return plain.model(
        facts,
        layer,
        embedding_scale=facts.number("embedding_scale", 78.38367176906169),
        logit_scale=facts.number("logit_scale", 0.5773502691896257),
        logit_softcap=facts.number("final_logit_softcapping", 0.0),
    )


def hunyuan_moe(facts: Facts) -> ModelSpec:
    """Norms of q and k come after RoPE; a shared expert for every token."""
    attention = replace(
        plain.attention(facts, interleaved=False), **plain.head_norms(facts), norms_after_rope=True
    )
    n_ff = facts.same_in_all_layers("feed_forward_length")
    n_shared = facts.integer("expert_shared_feed_forward_length", 0) or n_ff
    moe = experts(facts, n_ff=n_ff, n_ff_shared=n_shared)
    return plain.model(facts, plain.layer(facts, attention, moe))


def minimax_m2(facts: Facts) -> ModelSpec:
    attention = replace(plain.attention(facts, interleaved=False), **plain.row_norms(facts))
    n_ff = facts.same_in_all_layers("feed_forward_length")
    moe = experts(facts, gating=None, n_ff=n_ff, selection_bias=True)
    return plain.model(facts, plain.layer(facts, attention, moe))


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
    return _with_prediction(facts, lambda facts: [layer] * facts.n_layers)


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
    layers = with_dense(facts, [layer] * facts.n_layers, leading_dense(facts))
    return plain.model(facts, layers, prediction=facts.prediction(layer))


GPT_OSS_PERIOD = 2


def gpt_oss(facts: Facts) -> ModelSpec:
    """Sinks, windows in every second layer, biases throughout, and a clamped SwiGLU."""
    attention = replace(plain.attention(facts, interleaved=False), sinks="attn_sinks")
    assert attention.rope is not None
    moe = experts(
        facts, gating="softmax_of_chosen", renormalise=False, activation="swiglu_oai", biased=True
    )
    layer = LayerSpec(
        attention, moe, facts.rms_norm("attn_norm"), facts.rms_norm("post_attention_norm")
    )
    rope = window_rope(facts, attention.rope)
    return plain.model(facts, layers_with_windows(layer, windows(facts, GPT_OSS_PERIOD), rope))


SMALLTHINKER_PERIOD = 4
SMALLTHINKER_WINDOW = 4096
"""Whatever number a file with windows has."""
SMALLTHINKER_UNROTATED = 4
"""The first layer of each four isn't rotated, if there are windows."""


def smallthinker(facts: Facts) -> ModelSpec:
    """The router reads what comes into a layer, before attention; experts are ReLU-gated."""
    attention = plain.attention(facts, interleaved=False)
    assert attention.rope is not None
    moe = experts(facts, gating=None, activation="relu", router_reads_input=True)
    layer = plain.layer(facts, attention, moe)
    sizes = [
        SMALLTHINKER_WINDOW if size else 0
        for size in windows(facts, SMALLTHINKER_PERIOD, dense_first=True)
    ]
    layers = layers_with_windows(layer, sizes, window_rope(facts, attention.rope))
    if any(sizes):
        layers = [
            _unrotated(x) if i % SMALLTHINKER_UNROTATED == 0 else x for i, x in enumerate(layers)
        ]
    return plain.model(facts, layers)


def _unrotated(layer: LayerSpec) -> LayerSpec:
    return replace(layer, mixer=replace(layer.attention, rope=None))


AFMOE_PERIOD = 4
AFMOE_UNROTATED = 4
"""Every fourth layer isn't rotated, whether it has a window or not."""


def afmoe(facts: Facts) -> ModelSpec:
    """Arcee's Trinity models: gated attention, windows, and norms around both blocks."""
    attention = plain.attention(facts, interleaved=False)
    attention = replace(attention, gated=True, **plain.head_norms(facts))
    assert attention.rope is not None
    moe = experts(
        facts,
        gating="sigmoid",
        gating_varies=True,
        renormalise=None,
        scaled=True,
        n_ff_shared=expert_width(facts) * facts.integer("expert_shared_count"),
        selection_bias=True,
    )
    layer = replace(plain.layer(facts, attention, moe), **plain.post_norms(facts))
    rope = window_rope(facts, attention.rope)
    layers = layers_with_windows(layer, windows(facts, AFMOE_PERIOD), rope)
    layers = [
        layer if (i + 1) % AFMOE_UNROTATED else _unrotated(layer) for i, layer in enumerate(layers)
    ]
    return plain.model(
        facts,
        with_dense(facts, layers, leading_dense(facts)),
        embedding_scale=math.sqrt(facts.n_embd),
    )


WINDOW_THETA = 10000.0
"""RoPE's base in layers with a window, if the file has no other (Step 3.5, MiMo V2)."""


def _unscaled(facts: Facts, attention: AttentionSpec) -> RopeSpec:
    """RoPE of an attention, which the file may not stretch.

    Raises:
        ModelFileError: it does.
    """
    rope = attention.rope
    assert rope is not None
    if rope.scaling != "none":
        key = facts.key("rope.scaling.type")
        raise ModelFileError(f"key {key!r} is {rope.scaling!r}, which is not supported")
    return rope


def step35(facts: Facts) -> ModelSpec:
    """Layers with and without a window differ in heads, and in the channels that RoPE turns; heads
    have gates, and experts a SwiGLU with limits."""
    return _with_prediction(facts, _step35_layers, reads_normed=False)


def _step35_layers(facts: Facts) -> list[LayerSpec]:
    limits = facts.numbers_per_layer("swiglu_clamp_exp", 0.0)
    shared_limits = facts.numbers_per_layer("swiglu_clamp_shexp", 0.0)
    sizes = windows(facts, None)
    layers = []
    for i, (size, limit, shared_limit) in enumerate(zip(sizes, limits, shared_limits, strict=True)):
        attention = plain.attention(facts, interleaved=False, layer=i)
        attention = replace(
            attention,
            head_gated=f"blk.{i}.attn_gate.weight" in facts.shapes,
            params=replace(attention.params, window=size),
            rope=_step35_rope(facts, attention, has_window=size > 0),
        )
        if f"blk.{i}.attn_q_norm.weight" in facts.shapes:
            attention = replace(attention, **plain.head_norms(facts))
        moe = experts(
            facts,
            gating="sigmoid",
            gating_varies=True,
            renormalise=None,
            scaled=True,
            n_ff_shared=facts.integer("expert_shared_feed_forward_length"),
            selection_bias=f"blk.{i}.exp_probs_b.bias" in facts.shapes,
            limit=limit,
            shared_limit=shared_limit,
        )
        layers.append(plain.layer(facts, attention, moe))
    return layers


def _step35_rope(facts: Facts, attention: AttentionSpec, *, has_window: bool) -> RopeSpec:
    """Layers that see everything turn half of the channels. Llama 3's divisors, if the file has
    them, are for these layers, though there is one for each pair of the others."""
    rope = _unscaled(facts, attention)
    if has_window:
        return window_rope(facts, rope, theta=WINDOW_THETA)
    if rope.n_dims % 4:
        raise ModelFileError(f"RoPE can't rotate half of {rope.n_dims} channels")
    rope = replace(rope, n_dims=rope.n_dims // 2)
    if ROPE_FREQS not in facts.shapes:
        return rope
    n_divisors = math.prod(facts.shapes[ROPE_FREQS])
    if n_divisors < rope.n_dims // 2:
        raise ModelFileError(f"{n_divisors} divisors are too few for {rope.n_dims // 2} pairs")
    return replace(rope, divisors=ROPE_FREQS, n_divisors=n_divisors)


def _with_prediction(
    facts: Facts, layers_of: Callable[[Facts], list[LayerSpec]], *, reads_normed: bool = True
) -> ModelSpec:
    """A model whose block that predicts is what `layers_of` makes of it as a further layer; without
    a router a layer is dense."""
    prediction = None
    if facts.predicts:
        every = facts.every_block
        layer = _with_routers(every, layers_of(every))[facts.n_layers]
        prediction = facts.prediction(layer, reads_normed=reads_normed)
    return plain.model(facts, _with_routers(facts, layers_of(facts)), prediction=prediction)


def _with_routers(facts: Facts, layers: list[LayerSpec]) -> list[LayerSpec]:
    """Layers of experts, but with a dense block where there is no router."""
    routers = (f"blk.{i}.ffn_gate_inp.weight" for i in range(facts.n_layers))
    return with_dense(facts, layers, [router not in facts.shapes for router in routers])


LAGUNA_PERIOD = 4


def laguna(facts: Facts) -> ModelSpec:
    """Gates with a softplus, of each head (XS) or of each channel (M); windows that are not
    stretched, if there are some, and heads in other numbers there."""
    n_shared = facts.integer("expert_shared_feed_forward_length", 0) or expert_width(
        facts
    ) * facts.integer("expert_shared_count", 1)
    moe = experts(
        facts,
        gating="sigmoid",
        gating_varies=True,
        renormalise=None,
        scaled=True,
        n_ff_shared=n_shared,
        selection_bias=True,
    )
    layers = []
    for i, size in enumerate(windows(facts, LAGUNA_PERIOD, dense_first=True)):
        attention = plain.attention(facts, interleaved=False, layer=i)
        gate = facts.shapes.get(f"blk.{i}.attn_gate.weight", (attention.n_heads,))
        by_head = gate[0] == attention.n_heads
        attention = replace(
            attention,
            **plain.head_norms(facts),
            gated=not by_head,
            head_gated=by_head,
            gate_activation="softplus",
        )
        layer = plain.layer(facts, attention, moe)
        if size:
            assert attention.rope is not None
            most = attention.key_dim
            rope = window_rope(facts, attention.rope, scaled=False, most_dims=most)
            layer = with_window(layer, size, rope)
        layers.append(layer)
    return plain.model(facts, with_dense(facts, layers, leading_dense(facts)))


def mimo2(facts: Facts) -> ModelSpec:
    """Xiaomi's MiMo V2: V's heads are narrower than K's, and layers with a window have sinks."""
    return _with_prediction(facts, _mimo2_layers, reads_normed=False)


def _mimo2_layers(facts: Facts) -> list[LayerSpec]:
    sizes = windows(facts, None)
    layers = []
    for i, size in enumerate(sizes):
        n_heads, n_kv_heads, key_dim = facts.heads(i, alike=False)
        rope = facts.rope(key_dim, interleaved=False)
        attention = AttentionSpec(
            n_heads,
            n_kv_heads,
            key_dim,
            facts.integer("attention.value_length", key_dim),
            AttentionParams(1.0 / math.sqrt(key_dim), window=size),
            rope,
            sinks="attn_sinks" if f"blk.{i}.attn_sinks.weight" in facts.shapes else None,
            output_scale=facts.number("attention.value_scale", 0.0) or 1.0,
        )
        rope = _unscaled(facts, attention)
        if size:
            rope = window_rope(facts, rope, theta=WINDOW_THETA)
        moe = experts(
            facts,
            gating="sigmoid",
            scaled=True,
            selection_bias=f"blk.{i}.exp_probs_b.bias" in facts.shapes,
        )
        layers.append(plain.layer(facts, replace(attention, rope=rope), moe))
    return layers


def maple(facts: Facts) -> ModelSpec:
    """Only layers with a window have RoPE; experts have a SwiGLU whose gate has a limit."""
    attention = replace(plain.attention(facts, interleaved=False), **plain.head_norms(facts))
    rope = window_rope(facts, _unscaled(facts, attention))
    layers = []
    for size, limit in zip(
        windows(facts, None), facts.numbers_per_layer("swiglu_clamp_exp"), strict=True
    ):
        layer = plain.layer(facts, attention, experts(facts, limit=limit, limits_gate=True))
        layers.append(with_window(layer, size, rope) if size else _unrotated(layer))
    return plain.model(facts, layers)


_GLM_SPECIAL = {
    "bos": "[gMASK]",
    "eot": "<|user|>",
    "unk": "<|endoftext|>",
    "eom": "<|observation|>",
}


def _glm_keys(config: Config) -> Keys:
    return moe_keys(config) | {
        "rope.dimension_count": rope_dimensions(config, 0.5),
        "expert_gating_func": GATING["sigmoid"],
        "expert_weights_norm": config.flag("norm_topk_prob"),
    }


def _gpt_oss_keys(config: Config) -> Keys:
    width = config.integer("intermediate_size")
    return common_keys(config) | {
        "attention.sliding_window": config.integer("sliding_window"),
        "expert_feed_forward_length": width,
    }


def _gpt_oss_weights(config: Config, name: str, weight: Weight) -> Named:
    """Gates stand in every second column or row; matrices that aren't packed are transposed."""
    if name.endswith(".sinks"):
        name += ".weight"
    base, _, part = name.rpartition(".")
    if part == "gate_up_proj_bias":
        for i, kind in enumerate(("gate", "up")):
            yield f"{base}.{kind}_proj.bias", weight.columns(range(i, weight.shape[-1], 2))
    elif part in ("gate_up_proj", "gate_up_proj_blocks"):
        weight = weight if part.endswith("_blocks") else weight.transposed()
        for i, kind in enumerate(("gate", "up")):
            yield f"{base}.{kind}_proj.weight", weight.rows(range(i, weight.shape[-2], 2))
    elif part in ("down_proj", "down_proj_blocks") and base.endswith(".experts"):
        weight = weight if part.endswith("_blocks") else weight.transposed()
        yield f"{base}.down_proj.weight", weight
    else:
        yield name.replace("down_proj_bias", "down_proj.bias"), weight


def _olmoe_keys(config: Config) -> Keys:
    return common_keys(config) | {"attention.layer_norm_rms_epsilon": 1e-5}


CHECKPOINTS = {
    "Glm4MoeForCausalLM": Checkpoint(
        "glm4moe",
        keys=_glm_keys,
        weights=with_split_experts,
        special=_GLM_SPECIAL,
        pre_tokenizer="glm4",
        predicts=True,
    ),
    "GptOssForCausalLM": Checkpoint("gpt-oss", keys=_gpt_oss_keys, weights=_gpt_oss_weights),
    "OlmoeForCausalLM": Checkpoint("olmoe", keys=_olmoe_keys, weights=with_split_experts),
}
