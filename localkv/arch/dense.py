"""Dense models that differ from a Llama in a norm, in RoPE, in an activation or in sizes.

After the files of llama.cpp's `src/models/` that bear the architectures' names.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from localkv.arch import plain
from localkv.arch.checkpoint import (
    Checkpoint,
    Config,
    Keys,
    common_keys,
    rope_dimensions,
    with_neighbours,
)
from localkv.arch.facts import LONG_FACTORS, SHORT_FACTORS, Facts
from localkv.arch.spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, XieluParams
from localkv.arch.windows import layers_with_windows, window_rope, windows, with_window
from localkv.errors import ModelFileError

OLMO_PERIOD = 4
PLAMO_PERIOD = 8
PLAMO_WINDOW_THETA = 10000.0


def glm4(facts: Facts) -> ModelSpec:
    """Norms before and after each block."""
    attention = plain.attention(facts, interleaved=not facts.turns_sections())
    layer = replace(plain.layer(facts, attention, plain.mlp(facts)), **plain.post_norms(facts))
    return plain.model(facts, layer)


def phi2(facts: Facts) -> ModelSpec:
    """Attention and feed-forward side by side, after one LayerNorm, with biases everywhere."""
    attention = plain.attention(facts, interleaved=False)
    layer = plain.side_by_side(facts, attention, plain.mlp(facts, "gelu", gated=False))
    return plain.model(facts, layer, output_norm=facts.layer_norm("output_norm"))


def phi3(facts: Facts) -> ModelSpec:
    """RoPE depends on the context's length. Files name a window that nobody honours: it is wider
    than the contexts that Phi 3 was trained for."""
    attention = plain.attention(facts, interleaved=False, long_divisors=True)
    return plain.model(facts, plain.layer(facts, attention, plain.mlp(facts)))


def _hunyuan_attention(facts: Facts) -> AttentionSpec:
    """Norms of q and k after RoPE."""
    spec = plain.attention(facts, interleaved=False, divisors=True)
    return replace(spec, **plain.head_norms(facts), norms_after_rope=True)


def _stretched(facts: Facts, spec: AttentionSpec) -> AttentionSpec:
    """RoPE's base times alpha^(d / (d - 2)), NTK-aware scaling."""
    alpha, d = facts.number("rope.scaling.alpha", 0.0), spec.key_dim
    if not alpha or spec.rope is None or d <= 2:
        return spec
    return replace(spec, rope=replace(spec.rope, theta=spec.rope.theta * alpha ** (d / (d - 2))))


def _hunyuan_mlp(facts: Facts) -> MlpSpec:
    """A dense block; files of dense models may speak of one expert."""
    if facts.integer("expert_count", 0) > 1:
        return plain.mlp(facts)  # which refuses it
    return MlpSpec(facts.same_in_all_layers("feed_forward_length"))


def hunyuan_dense(facts: Facts) -> ModelSpec:
    """RoPE's base grows with the context it was stretched for."""
    facts.turns_sections()
    layer = plain.layer(facts, _stretched(facts, _hunyuan_attention(facts)), _hunyuan_mlp(facts))
    return plain.model(facts, layer)


def _xielu(facts: Facts) -> list[XieluParams]:
    """Each layer's parameters, from keys without the architecture's name.

    Raises:
        ModelFileError: a key is missing, or has values for another number of layers.
    """
    columns = []
    for name in ("alpha_p", "alpha_n", "beta", "eps"):
        key = f"xielu.{name}"
        if isinstance(facts.keys.get(key), list):
            values = facts.keys.numbers(key)
        else:
            values = [facts.keys.number(key)] * facts.n_layers
        if len(values) != facts.n_layers:
            raise ModelFileError(f"key {key!r} has {len(values)} items for {facts.n_layers} layers")
        columns.append(values)
    return [XieluParams(*params) for params in zip(*columns, strict=True)]


def apertus(facts: Facts) -> ModelSpec:
    """xIELU, with parameters of its own in each layer."""
    attention = plain.attention(facts, interleaved=False, divisors=True, long_divisors=True)
    mlp = plain.mlp(facts, "xielu", gated=False)
    layer = plain.layer(facts, replace(attention, **plain.head_norms(facts)), mlp)
    return plain.model(
        facts, [replace(layer, ffn=replace(mlp, xielu=params)) for params in _xielu(facts)]
    )


def olmo(facts: Facts) -> ModelSpec:
    """Norms have no weights; q, k and v may be clamped."""
    norm = facts.layer_norm("")
    attention = plain.attention(facts, interleaved=True, clamps=True)
    layer = LayerSpec(attention, plain.mlp(facts), norm, norm)
    return plain.model(facts, layer, reads=(plain.CLAMP,), output_norm=norm)


MUSE_PERIOD = 4
MUSE_POST_EPS = 1e-8
"""The epsilon of norms of what blocks give, whatever the file says of others."""


def muse_glimmer(facts: Facts) -> ModelSpec:
    """Gated attention, windows, and norms around both blocks; the embedding is normed. Layers that
    see everything don't rotate."""
    attention = plain.attention(facts, interleaved=True)
    attention = replace(attention, gated=True, **plain.head_norms(facts))
    rope = attention.rope
    assert rope is not None
    layer = plain.layer(facts, replace(attention, rope=None), plain.mlp(facts))
    norms = plain.post_norms(facts).items()
    layer = replace(layer, **{name: replace(norm, eps=MUSE_POST_EPS) for name, norm in norms})
    facts.integer("attention.sliding_window")  # no default
    return plain.model(
        facts,
        layers_with_windows(layer, windows(facts, MUSE_PERIOD), window_rope(facts, rope)),
        embedding_norm=facts.rms_norm(""),
        logit_scale=facts.number("logit_scale"),
        logit_softcap=facts.number("final_logit_softcapping", 0.0),
    )


def olmo2(facts: Facts) -> ModelSpec:
    """Norms of what blocks give. OLMo 3 is this with windows; layers that have one rotate without
    YaRN."""
    attention = plain.attention(facts, interleaved=False)
    assert attention.rope is not None
    layer = LayerSpec(
        replace(attention, **plain.row_norms(facts)),
        plain.mlp(facts),
        None,
        None,
        **plain.post_norms(facts),
    )
    rope = window_rope(facts, attention.rope, scaled=False)
    return plain.model(facts, layers_with_windows(layer, windows(facts, OLMO_PERIOD), rope))


def plamo(facts: Facts) -> ModelSpec:
    """Blocks side by side."""
    norm = facts.rms_norm("attn_norm")
    attention = plain.attention(facts, interleaved=False)
    layer = LayerSpec(attention, plain.mlp(facts), norm, norm, parallel=True)
    return plain.model(facts, layer)


def _plamo3_layer(facts: Facts, index: int, window: int) -> LayerSpec:
    attention = plain.attention(facts, interleaved=False, layer=index)
    assert attention.rope is not None
    rope = attention.rope
    if window:
        rope = window_rope(facts, rope, theta=PLAMO_WINDOW_THETA, scaled=False)
    attention = replace(attention, **plain.head_norms(facts))
    layer = plain.layer(facts, attention, plain.mlp(facts, layer=index))
    return with_window(replace(layer, **plain.post_norms(facts)), window, rope)


def plamo3(facts: Facts) -> ModelSpec:
    """Windows, and norms after each block."""
    return plain.model(
        facts,
        [_plamo3_layer(facts, i, window) for i, window in enumerate(windows(facts, PLAMO_PERIOD))],
    )


def _deci_attention(facts: Facts, index: int) -> AttentionSpec | None:
    """None in a layer without heads.

    Raises:
        ModelFileError: the layer has a matrix in place of attention.
    """
    if not facts.per_layer("attention.head_count")[index]:
        return None
    if not facts.per_layer("attention.head_count_kv")[index]:
        raise ModelFileError(f"layer {index} has heads but no KV heads, which is not supported")
    return plain.attention(facts, interleaved=True, divisors=True, long_divisors=True, layer=index)


def _deci_layer(facts: Facts, index: int) -> LayerSpec:
    """Attention, a feed-forward block, both or neither.

    Raises:
        ModelFileError: there is only attention, and no model shows what follows it then.
    """
    attention = _deci_attention(facts, index)
    attn_norm = None if attention is None else facts.rms_norm("attn_norm")
    if facts.per_layer("feed_forward_length")[index]:
        mlp = plain.mlp(facts, layer=index)
        return LayerSpec(attention, mlp, attn_norm, facts.rms_norm("ffn_norm"))
    if attention is not None:
        raise ModelFileError(f"layer {index} has only attention, which is not supported")
    return LayerSpec(None, None, None, None)


def deci(facts: Facts) -> ModelSpec:
    """Nemotron Super, whose layers, found by search, are of different sizes."""
    return plain.model(facts, [_deci_layer(facts, i) for i in range(facts.n_layers)])


def openelm(facts: Facts) -> ModelSpec:
    """Layers of different sizes."""
    layers = []
    for i in range(facts.n_layers):
        attention = plain.attention(facts, interleaved=False, layer=i)
        attention = replace(attention, **plain.head_norms(facts))
        layers.append(plain.layer(facts, attention, plain.mlp(facts, layer=i)))
    return plain.model(facts, layers)


def spark(facts: Facts) -> ModelSpec:
    """Windows, heads in numbers that differ between layers, with a gate each."""
    ffn, layers = plain.mlp(facts, "gelu"), []
    for i, size in enumerate(windows(facts, None)):
        attention = plain.attention(facts, interleaved=False, layer=i)
        assert attention.rope is not None
        layer = plain.layer(facts, replace(attention, head_gated=True), ffn)
        rope = window_rope(facts, attention.rope)
        layers.append(with_window(layer, size, rope) if size else layer)
    return plain.model(facts, layers)


def _phi3_keys(config: Config) -> Keys:
    """A window of 0 tells Phi 4 from Phi 3."""
    rope = config.full_rope
    trained = config.integer("max_position_embeddings", "n_positions")
    original = rope.integer("original_max_position_embeddings", default=trained)
    keys = common_keys(config)
    for name in ("rope.scaling.type", "attention.key_length", "attention.value_length"):
        keys.pop(name, None)
    keys |= {
        "rope.scaling.original_context_length": original,
        "rope.dimension_count": rope_dimensions(config),
        "attention.sliding_window": config.integer("sliding_window", default=0),
    }
    if rope.has("long_factor"):
        scale = trained / original
        is_yarn = rope.string("rope_type") == "yarn"
        grown = 0.1 * math.log(max(scale, 1.0)) + 1.0
        if not is_yarn:
            grown = math.sqrt(1 + math.log(max(scale, 1.0)) / math.log(original))
        keys["rope.scaling.attn_factor"] = grown
    return keys


def _long_factors(config: Config) -> dict[str, Sequence[float]]:
    """LongRoPE's divisors, for a long context and for a short one."""
    rope = config.full_rope
    if not rope.has("long_factor"):
        return {}
    factors = dict[str, Sequence[float]]()
    for name, tensor in (("long_factor", LONG_FACTORS), ("short_factor", SHORT_FACTORS)):
        values = rope.get(name)
        if not isinstance(values, list) or len(values) != rope_dimensions(config) // 2:
            raise ModelFileError(f"config.json: {name} has no factor for each pair of channels")
        factors[tensor] = [Config({name: value}).number(name) for value in values]
    return factors


def _olmo2_keys(config: Config) -> Keys:
    keys = common_keys(config)
    if config.has("sliding_window"):
        keys["attention.sliding_window"] = config.integer("sliding_window")
        keys["attention.sliding_window_pattern"] = config.has_window
    return keys


def _olmo_keys(config: Config) -> Keys:
    keys = common_keys(config) | {"attention.layer_norm_epsilon": 1e-5}
    if config.has("clip_qkv"):
        keys[plain.CLAMP] = config.number("clip_qkv")
    return keys


_GLM_SPECIAL = {
    "eos": "<|endoftext|>",
    "eot": "<|user|>",
    "unk": "<|endoftext|>",
    "bos": "<|endoftext|>",
}


def _glm4_keys(config: Config) -> Keys:
    return common_keys(config) | {"rope.dimension_count": rope_dimensions(config, 0.5)}


def _phi2_keys(config: Config) -> Keys:
    n_embd, n_heads = config.integer("hidden_size", "n_embd"), config.n_heads
    share = config.full_rope.number("partial_rotary_factor")
    return {
        "context_length": config.integer("n_positions", "max_position_embeddings"),
        "embedding_length": n_embd,
        "feed_forward_length": 4 * n_embd,
        "block_count": config.n_layers,
        "attention.head_count": n_heads,
        "attention.head_count_kv": n_heads,
        "attention.layer_norm_epsilon": config.number("layer_norm_epsilon", "layer_norm_eps"),
        "rope.dimension_count": int(share * n_embd) // n_heads,
    }


CHECKPOINTS = {
    "Phi3ForCausalLM": Checkpoint("phi3", keys=_phi3_keys, added=_long_factors),
    "Olmo2ForCausalLM": Checkpoint("olmo2", keys=_olmo2_keys),
    "Olmo3ForCausalLM": Checkpoint("olmo2", keys=_olmo2_keys),
    "OlmoForCausalLM": Checkpoint("olmo", keys=_olmo_keys, weights=with_neighbours),
    "Glm4ForCausalLM": Checkpoint("glm4", keys=_glm4_keys, special=_GLM_SPECIAL),
    "PhiForCausalLM": Checkpoint(
        "phi2", keys=_phi2_keys, vocabulary=lambda config: {"add_bos_token": False}
    ),
}
