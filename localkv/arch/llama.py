"""Llama, what has its graph or nearly, and Llama 4.

After llama.cpp's `src/models/llama.cpp` and the files there that bear the architectures' names.
"""

from __future__ import annotations

from dataclasses import replace

from localkv.arch import plain
from localkv.arch.checkpoint import (
    Checkpoint,
    Config,
    Keys,
    common_keys,
    llama3_divisors,
    with_neighbours,
)
from localkv.arch.experts import expert_width, experts, leading_dense, with_dense
from localkv.arch.facts import Facts
from localkv.arch.spec import AttentionSpec, LayerSpec, ModelSpec, NormSpec, RopeSpec, Temperature
from localkv.arch.windows import window_rope, windows
from localkv.errors import ModelFileError

SMOLLM3_UNROTATED = 4
"""SmolLM 3: every fourth layer has no RoPE."""
BAICHUAN_WITH_ALIBI = 40
"""Layers of Baichuan 13B."""
ALIBI = 8.0
"""See `AttentionParams.alibi`."""


def llama(facts: Facts) -> ModelSpec:
    attention = plain.attention(facts, interleaved=True, divisors=True, long_divisors=True)
    ffn = experts(facts) if facts.integer("expert_count", 0) else plain.mlp(facts)
    return plain.model(facts, plain.layer(facts, attention, ffn))


def mistral3(facts: Facts) -> ModelSpec:
    """A Llama whose q may grow with its position, as Llama 4's does."""
    spec = llama(facts)
    scale = facts.number("attention.temperature_scale", 0.0)
    rope = spec.layers[0].attention.rope
    if not scale or rope is None:
        return spec
    temperature = Temperature(scale, rope.original_context_length)
    plain_layer = spec.layers[0]
    layer = replace(plain_layer, mixer=replace(plain_layer.attention, temperature=temperature))
    return replace(spec, layers=(layer,) * spec.n_layers)


def smollm3(facts: Facts) -> ModelSpec:
    attention, ffn = plain.attention(facts, interleaved=True), plain.mlp(facts)
    rotated = plain.layer(facts, attention, ffn)
    unrotated = plain.layer(facts, replace(attention, rope=None), ffn)
    layers = [rotated if (i + 1) % SMOLLM3_UNROTATED else unrotated for i in range(facts.n_layers)]
    return plain.model(facts, layers)


def neighbours(facts: Facts) -> ModelSpec:
    """A Llama without divisors of RoPE's frequencies: pairs are neighbours."""
    attention = plain.attention(facts, interleaved=True)
    return plain.model(facts, plain.layer(facts, attention, plain.mlp(facts)))


def halves(facts: Facts) -> ModelSpec:
    """A Llama whose RoPE pairs the halves of a head."""
    facts.turns_sections()
    attention = plain.attention(facts, interleaved=False)
    return plain.model(facts, plain.layer(facts, attention, plain.mlp(facts)))


def baichuan(facts: Facts) -> ModelSpec:
    """The 13B model is biased by distance."""
    model = neighbours(facts)
    if facts.n_layers != BAICHUAN_WITH_ALIBI:
        return model
    layer = model.layers[0]
    mixer = plain.by_distance(layer.attention, ALIBI)
    return replace(model, layers=(replace(layer, mixer=mixer),) * facts.n_layers)


def bitnet(facts: Facts) -> ModelSpec:
    """Norms before the last matrices of both blocks; the embedding is the output matrix.

    Raises:
        ModelFileError: matrices have factors of their own.
    """
    if any(name.endswith(".scale") for name in facts.shapes):
        raise ModelFileError("factors of matrices ('.scale') in 'bitnet' are not supported")
    layer = plain.layer(facts, plain.attention(facts, interleaved=False), plain.mlp(facts))
    norms = {name: facts.rms_norm(name) for name in ("attn_sub_norm", "ffn_sub_norm")}
    layer = replace(layer, mixed_norm=norms["attn_sub_norm"], hidden_norm=norms["ffn_sub_norm"])
    return plain.model(facts, layer)


def refact(facts: Facts) -> ModelSpec:
    """Attention is biased by distance."""
    attention = plain.by_distance(plain.attention(facts, interleaved=True), ALIBI)
    return plain.model(facts, plain.layer(facts, attention, plain.mlp(facts)))


def nanbeige(facts: Facts) -> ModelSpec:
    if facts.integer("num_loops", 1) != 1:
        raise ModelFileError(
            "layers that are run in loops ('nanbeige.num_loops') are not supported"
        )
    return llama(facts)


def pangu(facts: Facts) -> ModelSpec:
    attention = plain.attention(facts, interleaved=False, long_divisors=True)
    return plain.model(facts, plain.layer(facts, attention, plain.mlp(facts)))


def maincoder(facts: Facts) -> ModelSpec:
    """Norms of q and k after RoPE."""
    attention = replace(
        plain.attention(facts, interleaved=True), **plain.head_norms(facts), norms_after_rope=True
    )
    return plain.model(facts, plain.layer(facts, attention, plain.mlp(facts)))


def cogvlm(facts: Facts) -> ModelSpec:
    """The weights that read text; each layer has others for images."""
    attention = plain.attention(facts, interleaved=False)
    attention = replace(attention, rope=RopeSpec(attention.key_dim, interleaved=False))
    of_images = tuple(f"blk.{i}.vis_" for i in range(facts.n_layers))
    return plain.model(
        facts, plain.layer(facts, attention, plain.mlp(facts)), ignored_tensors=of_images
    )


def seed_oss(facts: Facts) -> ModelSpec:
    """The norm before its feed-forward block is named as others name one after attention."""
    attention = plain.attention(facts, interleaved=False)
    layer = plain.layer(facts, attention, plain.mlp(facts))
    layer = replace(layer, ffn_norm=facts.rms_norm("post_attention_norm"))
    return plain.model(facts, layer)


def arcee(facts: Facts) -> ModelSpec:
    """A feed-forward block without a gate."""
    attention = plain.attention(facts, interleaved=True, divisors=True)
    mlp = plain.mlp(facts, "relu2", gated=False)
    return plain.model(facts, plain.layer(facts, attention, mlp))


LLAMA4_PERIOD = 4
LLAMA4_CHUNK = 8192
"""Whatever number a file has, unless it is 0."""
LLAMA4_UNROTATED = 4
LLAMA4_TEMPERATURE = Temperature(0.1, LLAMA4_CHUNK, offset=1)
MAVERICK_EXPERTS = 128
"""Models with as many have no norms of q and k."""


def llama4(facts: Facts) -> ModelSpec:
    """Chunks in three layers of four, and experts that read their input times their weight."""
    rotated = _llama4_norms(facts, plain.attention(facts, interleaved=True, divisors=True))
    width = expert_width(facts)
    moe = experts(facts, gating="sigmoid", renormalise=False, n_ff_shared=width, weighs_input=True)
    layer = plain.layer(facts, rotated, moe)
    is_dense = leading_dense(facts, step=facts.integer("interleave_moe_layer_step"))
    layers = with_dense(facts, [layer] * facts.n_layers, is_dense)
    chunks = windows(facts, LLAMA4_PERIOD, default=LLAMA4_CHUNK)
    if any(chunks):
        layers = [
            _with_chunk(facts, x, bool(chunk), (i + 1) % LLAMA4_UNROTATED != 0)
            for i, (x, chunk) in enumerate(zip(layers, chunks, strict=True))
        ]
    return plain.model(facts, layers)


def _llama4_norms(facts: Facts, attention: AttentionSpec) -> AttentionSpec:
    """Norms without weights, after RoPE."""
    if facts.integer("expert_count") == MAVERICK_EXPERTS:
        return attention
    norm = NormSpec("", "rms", facts.number("attention.layer_norm_rms_epsilon"))
    return replace(attention, q_norm=norm, k_norm=norm, norms_after_rope=True)


def _with_chunk(facts: Facts, layer: LayerSpec, in_chunks: bool, is_rotated: bool) -> LayerSpec:
    """The layer with a chunk, or with all positions; rotated, or with a temperature."""
    attention = layer.attention
    params = replace(attention.params, chunk=LLAMA4_CHUNK if in_chunks else 0)
    if not is_rotated:
        attention = replace(
            attention, rope=None, q_norm=None, k_norm=None, temperature=LLAMA4_TEMPERATURE
        )
    elif in_chunks and attention.rope is not None:
        attention = replace(attention, rope=window_rope(facts, attention.rope))
    return replace(layer, mixer=replace(attention, params=params))


def llama_keys(config: Config) -> Keys:
    n_vocab = config.integer("vocab_size")
    return common_keys(config) | {"vocab_size": n_vocab, "rope.dimension_count": config.head_dim}


STARCODER_VOCABULARY = 49152
"""The size of StarCoder's vocabulary, whose models (Granite, SmolLM) know no BOS."""


def _llama_vocabulary(config: Config) -> dict[str, bool]:
    if config.integer("vocab_size") == STARCODER_VOCABULARY:
        return {"add_bos_token": False}
    return {}


_MIXTRAL = {r"^model\.(layers\.\d+\.)block_sparse_moe\.": r"\1feed_forward."}
LLAMA = Checkpoint(
    "llama",
    keys=llama_keys,
    weights=with_neighbours,
    added=llama3_divisors,
    vocabulary=_llama_vocabulary,
)


def _mistral3_keys(config: Config) -> Keys:
    """Ministral 3 is stretched by YaRN, and its q grows with the position."""
    keys, rope = llama_keys(config), config.full_rope
    if rope.has("mscale_all_dim"):
        keys["rope.scaling.yarn_log_multiplier"] = rope.number("mscale_all_dim")
    if rope.has("llama_4_scaling_beta"):
        keys["attention.temperature_scale"] = rope.number("llama_4_scaling_beta")
    return keys


CHECKPOINTS = {
    "LlamaForCausalLM": LLAMA,
    "MistralForCausalLM": LLAMA,
    "MixtralForCausalLM": replace(LLAMA, renamed=_MIXTRAL),
    "SmolLM3ForCausalLM": replace(LLAMA, architecture="smollm3"),
    "ArceeForCausalLM": replace(LLAMA, architecture="arcee"),
    "SeedOssForCausalLM": Checkpoint("seed_oss"),
    "Ministral3ForCausalLM": replace(LLAMA, architecture="mistral3", keys=_mistral3_keys),
    "Mistral3ForConditionalGeneration": replace(
        LLAMA, architecture="mistral3", keys=_mistral3_keys
    ),
}
