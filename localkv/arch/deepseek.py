"""DeepSeek 2 and 3 and what has their attention: Kimi K2, GLM-4.7-Flash, Mistral 4, MiniCPM 3.

After llama.cpp's `src/models/deepseek2.cpp`.
"""

from __future__ import annotations

import math
from dataclasses import replace

from localkv.arch import plain
from localkv.arch.checkpoint import (
    GATING,
    Checkpoint,
    Config,
    Keys,
    Named,
    Weight,
    moe_keys,
    with_split_experts,
)
from localkv.arch.experts import (
    dense,
    expert_width,
    experts,
    has_selection_bias,
    leading_dense,
    with_dense,
)
from localkv.arch.facts import Facts
from localkv.arch.spec import (
    AttentionParams,
    LatentAttentionSpec,
    ModelSpec,
    MoeSpec,
    RopeSpec,
    Temperature,
)
from localkv.errors import ModelFileError

GLM_FLASH_LAYERS, GLM_FLASH_VOCABULARY = (47, 48), 154_880
"""GLM-4.7-Flash: a file of it that does not say its gating means the sigmoid."""
MINICPM_EMBEDDING, MINICPM_DEPTH, MINICPM_WIDTH = 12.0, 1.4, 256
"""MiniCPM 3: factors on embeddings and, by the square root of the number of layers, on what blocks
add; logits are scaled by this width over the model's."""


def deepseek2(facts: Facts) -> ModelSpec:
    return _model(facts, mscale_follows=True)


def mistral4(facts: Facts) -> ModelSpec:
    """DeepSeek's graph; YaRN's magnitude is its own divided by the one of all channels."""
    return _model(facts, mscale_follows=False)


def _model(facts: Facts, *, mscale_follows: bool) -> ModelSpec:
    rope, mscale = _yarn(facts, mscale_follows=mscale_follows)
    mixer, is_dense = attention(facts, rope, mscale), leading_dense(facts)
    ffn = dense(facts) if all(is_dense) else _experts(facts)
    layer = plain.layer(facts, mixer, ffn)
    layers = with_dense(facts, [layer] * facts.n_layers, is_dense)
    return plain.model(facts, layers, prediction=facts.prediction(layer))


def attention(
    facts: Facts, rope: RopeSpec | None, mscale: float = 1.0, *, rank: int | None = None
) -> LatentAttentionSpec:
    """Attention of the file's sizes; older files give the sizes of whole keys and values.

    Args:
        rank: width of the latent of q, 0 without one; None if the first layer shows it.
    """
    absorbed = facts.has("attention.key_length_mla")
    suffix = "_mla" if absorbed else ""
    key_dim = facts.integer(f"attention.key_length{suffix}")
    value_dim = facts.integer(f"attention.value_length{suffix}")
    rope_dim = facts.integer("rope.dimension_count")
    if not 0 < rope_dim < key_dim:
        raise ModelFileError(f"RoPE can't rotate {rope_dim} channels of a head of {key_dim}")
    if rank is None:
        has_q = "blk.0.attn_q.weight" in facts.shapes
        rank = 0 if has_q else facts.integer("attention.q_lora_rank")
    scale = facts.number("attention.temperature_scale", 0.0)
    return LatentAttentionSpec(
        n_heads=facts.same_in_all_layers("attention.head_count"),
        latent_dim=facts.integer("attention.kv_lora_rank"),
        rope_dim=rope_dim,
        nope_dim=key_dim - rope_dim,
        value_dim=value_dim,
        q_lora_rank=rank,
        params=AttentionParams(mscale**2 / math.sqrt(key_dim)),
        rope=rope,
        latent_norm=facts.rms_norm("attn_kv_a_norm"),
        q_latent_norm=facts.rms_norm("attn_q_a_norm") if rank else None,
        temperature=Temperature(scale, facts.integer("attention.temperature_length"))
        if scale
        else None,
    )


def _yarn(facts: Facts, *, mscale_follows: bool) -> tuple[RopeSpec, float]:
    """RoPE, and the factor whose square the softmax scale has because of YaRN.

    Files hold a tenth of `mscale_all_dim`, L, as `yarn_log_multiplier`. The factor is that on
    cosines and sines times 1 + 0.1 L log(scaling factor).

    Args:
        mscale_follows: cosines and sines are multiplied with 1 where there is an L (DeepSeek), and
            not with (1 + 0.1 log factor) / (1 + 0.1 L log factor).
    """
    rope = facts.rope(facts.integer("rope.dimension_count"), interleaved=True)
    if rope.yarn_ext_factor == 0.0 or rope.factor <= 1.0:
        return rope, 1.0
    log_factor = 0.1 * math.log(rope.factor)
    all_dims = 10.0 * facts.number("rope.scaling.yarn_log_multiplier", 0.0)
    if 1.0 + all_dims * log_factor <= 0.0:
        key = facts.key("rope.scaling.yarn_log_multiplier")
        raise ModelFileError(f"key {key!r} is {all_dims / 10:g}")
    magnitude = facts.number("rope.scaling.attn_factor", 1.0)
    if not all_dims:
        magnitude *= 1.0 + log_factor
    elif not mscale_follows:
        magnitude *= (1.0 + log_factor) / (1.0 + all_dims * log_factor)
    return replace(rope, magnitude=magnitude), magnitude * (1.0 + all_dims * log_factor)


def _experts(facts: Facts) -> MoeSpec:
    is_flash = facts.n_layers in GLM_FLASH_LAYERS and facts.n_vocab == GLM_FLASH_VOCABULARY
    return experts(
        facts,
        gating="sigmoid" if is_flash else "softmax",
        gating_varies=True,
        renormalise=None,
        scaled=True,
        n_ff_shared=expert_width(facts) * facts.integer("expert_shared_count", 0),
        selection_bias=has_selection_bias(facts),
    )


def minicpm3(facts: Facts) -> ModelSpec:
    """Dense blocks, and scales that the file does not say (`src/models/minicpm3.cpp`)."""
    rope = facts.rope(facts.integer("rope.dimension_count"), interleaved=False, long_divisors=True)
    layer = plain.layer(facts, attention(facts, rope), plain.mlp(facts))
    residual_scale = MINICPM_DEPTH / math.sqrt(facts.n_layers)
    layers = [replace(layer, residual_scale=residual_scale)] * facts.n_layers
    return plain.model(
        facts, layers, embedding_scale=MINICPM_EMBEDDING, logit_scale=MINICPM_WIDTH / facts.n_embd
    )


def plm(facts: Facts) -> ModelSpec:
    """Dense blocks of squared ReLU without a gate (`src/models/plm.cpp`)."""
    rope = facts.rope(facts.integer("rope.dimension_count"), interleaved=True)
    mlp = plain.mlp(facts, "relu2", gated=False)
    return plain.model(facts, plain.layer(facts, attention(facts, rope), mlp))


def _checkpoint_keys(config: Config) -> Keys:
    """Attention over latents is one of many queries to one key."""
    latent, n_rope = config.integer("kv_lora_rank", default=512), config.integer("qk_rope_head_dim")
    has_experts = config.has("n_routed_experts")
    keys: Keys = {
        "attention.layer_norm_rms_epsilon": 1e-6,
        "leading_dense_block_count": 0 if has_experts else config.n_layers,
        "expert_shared_count": 0,
        "expert_feed_forward_length": config.integer("moe_intermediate_size", "intermediate_size"),
        **moe_keys(config),
        "attention.head_count_kv": 1,
        "vocab_size": config.integer("vocab_size"),
        "attention.kv_lora_rank": latent,
        "attention.key_length": latent + n_rope,
        "attention.value_length": latent,
        "attention.key_length_mla": config.integer("qk_nope_head_dim") + n_rope,
        "attention.value_length_mla": config.integer("v_head_dim"),
        "rope.dimension_count": n_rope,
    }
    if config.has("q_lora_rank"):
        keys["attention.q_lora_rank"] = config.integer("q_lora_rank")
    if config.full_rope.has("mscale_all_dim"):
        keys["rope.scaling.yarn_log_multiplier"] = 0.1 * config.full_rope.number("mscale_all_dim")
    return keys


def _v3_keys(config: Config) -> Keys:
    """Its experts are always chosen by sigmoids."""
    return {"expert_gating_func": GATING["sigmoid"], **_checkpoint_keys(config)}


def _weights(config: Config, name: str, weight: Weight) -> Named:
    """The projection from latents in two: of keys, the other way round, and of values."""
    if name == "lm_head.weight" and config.flag("tie_word_embeddings"):
        return
    if not name.endswith("kv_b_proj.weight"):
        yield from with_split_experts(config, name, weight)
        return
    n_nope, n_value = config.integer("qk_nope_head_dim"), config.integer("v_head_dim")
    base = name.removesuffix("kv_b_proj.weight")
    heads = weight.reshaped((config.n_kv_heads, n_nope + n_value, weight.shape[-1]))
    yield f"{base}k_b_proj.weight", heads.rows(range(n_nope)).transposed()
    yield f"{base}v_b_proj.weight", heads.rows(range(n_nope, n_nope + n_value))


CHECKPOINTS = {
    "DeepseekV2ForCausalLM": Checkpoint("deepseek2", keys=_checkpoint_keys, weights=_weights),
    "DeepseekV3ForCausalLM": Checkpoint("deepseek2", keys=_v3_keys, weights=_weights),
}
