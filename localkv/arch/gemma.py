"""Gemma 1 to 4: GELU, scaled embeddings; from 2 on norms after each block, and windows.

Gemma 3n and 4 norm q, k and v of each head and don't scale their products. They let the last layers
read K and V of earlier ones, and give each layer an embedding. Norms of Gemma 1 to 3 are 1 + w;
converters add the 1, so files hold w as it is used.

After llama.cpp's `src/models/gemma.cpp`, `gemma2.cpp`, `gemma3.cpp`, `gemma3n.cpp` and
`gemma4.cpp`.
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
    Named,
    Weight,
    common_keys,
    with_one_added,
)
from localkv.arch.experts import experts
from localkv.arch.facts import ROPE_FREQS, Facts
from localkv.arch.spec import (
    AltUpSpec,
    AttentionParams,
    AttentionSpec,
    Ffn,
    LaurelSpec,
    LayerSpec,
    MlpAndMoeSpec,
    MlpSpec,
    ModelSpec,
    PerLayerInputSpec,
    RopeSpec,
)
from localkv.arch.windows import layers_with_windows, window_rope, windows
from localkv.errors import ModelFileError

GEMMA2_PERIOD, GEMMA3_PERIOD = 2, 6
GEMMA2_WINDOW = 4096
WINDOW_THETA = 10000.0
GEMMA2_SCALED_BY_EMBEDDING, GEMMA3_SCALED_BY_EMBEDDING = 46, 62
"""Layers of the 27B models, whose queries are scaled by the embedding's width for a head."""


def _attention(facts: Facts, scaled_by_embedding: int) -> AttentionSpec:
    attention = plain.attention(facts, interleaved=False)
    if facts.n_layers != scaled_by_embedding:
        return attention
    return replace(
        attention, params=AttentionParams(1.0 / math.sqrt(facts.n_embd // attention.n_heads))
    )


def gemma(facts: Facts) -> ModelSpec:
    attention, mlp = plain.attention(facts, interleaved=False), plain.mlp(facts, "gelu")
    return plain.model(
        facts, plain.layer(facts, attention, mlp), embedding_scale=math.sqrt(facts.n_embd)
    )


def gemma2(facts: Facts) -> ModelSpec:
    attention = _attention(facts, GEMMA2_SCALED_BY_EMBEDDING)
    full = attention.rope
    assert full is not None
    softcap = facts.number("attn_logit_softcapping", 50.0)
    attention = replace(attention, params=replace(attention.params, softcap=softcap))
    layer = replace(
        plain.layer(facts, attention, plain.mlp(facts, "gelu")), **plain.post_norms(facts)
    )
    seen = windows(facts, GEMMA2_PERIOD, default=GEMMA2_WINDOW)
    return plain.model(
        facts,
        layers_with_windows(layer, seen, window_rope(facts, full)),
        embedding_scale=math.sqrt(facts.n_embd),
        logit_softcap=facts.number("final_logit_softcapping", 30.0),
    )


def gemma3(facts: Facts) -> ModelSpec:
    attention = _attention(facts, GEMMA3_SCALED_BY_EMBEDDING)
    full = attention.rope
    assert full is not None
    attention = replace(attention, **plain.head_norms(facts))
    layer = replace(
        plain.layer(facts, attention, plain.mlp(facts, "gelu")), **plain.post_norms(facts)
    )
    rope = window_rope(facts, full, theta=WINDOW_THETA, scaled=False)
    return plain.model(
        facts,
        layers_with_windows(layer, windows(facts, GEMMA3_PERIOD), rope),
        embedding_scale=math.sqrt(facts.n_embd),
        logit_softcap=facts.number("final_logit_softcapping", 0.0),
    )


# Gemma 3n, where a file has no key for it
GEMMA3N_PERIOD = 5
GEMMA3N_LAYERS_WITH_KV = 20
SPARSE_LAYERS = 10
SPARSITY = 1.6448536
"""5 % of a normal distribution's values lie more than this many deviations above the mean."""
PER_LAYER_WIDTH = 256
LAUREL_RANK = 64
STREAMS = 4
SOFTCAP = 30.0


def _unscaled_attention(facts: Facts, layer: int, window: int, suffix: str = "") -> AttentionSpec:
    """Attention of a layer that sees `window` tokens, or all.

    Args:
        suffix: the end of the keys that give its heads' size.

    Raises:
        ModelFileError: a size makes no sense.
    """
    n_heads, n_kv_heads, head_dim = facts.heads(layer)
    if suffix:
        head_dim = facts.integer(f"attention.key_length{suffix}")
        value_dim = facts.integer(f"attention.value_length{suffix}", head_dim)
        if head_dim != value_dim:
            raise ModelFileError(f"heads of different size for K ({head_dim}) and V ({value_dim})")
    if window:
        rope = _window_rope(facts, head_dim, suffix)
    else:
        rope = facts.rope(head_dim, interleaved=False)
    return AttentionSpec(
        n_heads,
        n_kv_heads,
        head_dim,
        head_dim,
        AttentionParams(1.0, window),
        rope,
        v_norm=facts.rms_norm(""),
        **plain.head_norms(facts),
    )


def _window_rope(facts: Facts, head_dim: int, suffix: str) -> RopeSpec:
    """RoPE of a layer with a window: no scaling, and a base of its own."""
    n_dims = facts.integer(f"rope.dimension_count{suffix}", head_dim)
    if n_dims > head_dim or n_dims % 2:
        raise ModelFileError(f"RoPE can't rotate {n_dims} channels of a head of {head_dim}")
    return RopeSpec(n_dims, facts.number("rope.freq_base_swa", WINDOW_THETA), interleaved=False)


def _per_layer_input(facts: Facts, width: int) -> PerLayerInputSpec | None:
    if not width:
        return None
    return PerLayerInputSpec(
        width, facts.rms_norm("per_layer_proj_norm"), facts.rms_norm("post_norm")
    )


def _layer(facts: Facts, attention: AttentionSpec, ffn: Ffn, width: int) -> LayerSpec:
    return replace(
        plain.layer(facts, attention, ffn),
        **plain.post_norms(facts),
        per_layer_input=_per_layer_input(facts, width),
    )


def _with_layer_inputs(
    facts: Facts,
    layers: Sequence[LayerSpec],
    *,
    softcap: float = 0.0,
    altup: AltUpSpec | None = None,
) -> ModelSpec:
    return plain.model(
        facts,
        layers,
        embedding_scale=math.sqrt(facts.n_embd),
        logit_softcap=facts.number("final_logit_softcapping", softcap),
        ignored_tensors=_ignored_tensors(layers),
        altup=altup,
    )


def _sharing_kv(own: Sequence[AttentionSpec], n_shared: int) -> list[AttentionSpec]:
    """The layers' attention; the last `n_shared` read the last K and V whose layer sees as far.

    Args:
        own: of each layer, as if it had K and V.

    Raises:
        ModelFileError: there is no such layer, or its heads are of another number or size.
    """
    n_own = len(own) - n_shared
    if n_own < 1:
        raise ModelFileError(f"{n_shared} of {len(own)} layers can't share K and V of those before")
    last = {spec.params.window: i for i, spec in enumerate(own[:n_own])}
    layers = list(own[:n_own])
    for i, spec in enumerate(own[n_own:], n_own):
        if (source := last.get(spec.params.window)) is None:
            raise ModelFileError(
                f"layer {i} is to share K and V, but no layer that has them sees as far"
            )
        heads = [(layer.n_kv_heads, layer.key_dim) for layer in (own[source], spec)]
        if heads[0] != heads[1]:
            raise ModelFileError(
                f"layer {i} is to share K and V of layer {source}, but has {spec.n_kv_heads} KV "
                f"heads of {spec.key_dim}, not {own[source].n_kv_heads} of {own[source].key_dim}"
            )
        layers.append(replace(spec, kv_from=source, value_from_key=False))
    return layers


def _ignored_tensors(layers: Sequence[LayerSpec]) -> tuple[str, ...]:
    """Beginnings of names of tensors that a file may have for layers that share K and V."""
    return tuple(
        f"blk.{i}.{name}."
        for i, layer in enumerate(layers)
        if layer.attention.kv_from is not None
        for name in ("attn_k", "attn_v", "attn_k_norm")
    )


def gemma4(facts: Facts) -> ModelSpec:
    """Heads of one size in full layers and of another in those with a window."""
    facts.integer("attention.sliding_window")  # no default
    own = [
        _unscaled_attention(facts, i, window, "_swa") if window else _full_attention(facts, i)
        for i, window in enumerate(windows(facts, None))
    ]
    n_shared = facts.integer("attention.shared_kv_layers", 0)
    width = facts.integer("embedding_length_per_layer_input")
    layers = []
    for i, attention in enumerate(_sharing_kv(own, n_shared)):
        layer = _layer(facts, attention, _ffn(facts, i), width)
        scale = "layer_output_scale"
        has_scale = f"blk.{i}.{scale}.weight" in facts.shapes
        layers.append(replace(layer, output_scale=scale if has_scale else None))
    return _with_layer_inputs(facts, layers)


def _full_attention(facts: Facts, layer: int) -> AttentionSpec:
    """Some channels are not rotated: their divisors are 1e30. V may be K's projection."""
    attention = _unscaled_attention(facts, layer, 0)
    assert attention.rope is not None
    return replace(
        attention,
        rope=replace(attention.rope, divisors=ROPE_FREQS),
        value_from_key=f"blk.{layer}.attn_v.weight" not in facts.shapes,
    )


def _ffn(facts: Facts, layer: int) -> Ffn:
    """A dense block, and experts beside it if there are some.

    Raises:
        ModelFileError: a size makes no sense.
    """
    n_ff = facts.per_layer("feed_forward_length")[layer]
    if not n_ff:
        raise ModelFileError(f"layer {layer} has no feed-forward block")
    mlp = MlpSpec(n_ff, "gelu")
    if not facts.integer("expert_count", 0):
        return mlp
    moe = experts(facts, activation="gelu", router_norm=facts.rms_norm("ffn_gate_inp"))
    return MlpAndMoeSpec(
        mlp,
        moe,
        post_mlp_norm=facts.rms_norm("post_ffw_norm_1"),
        post_moe_norm=facts.rms_norm("post_ffw_norm_2"),
        moe_norm=facts.rms_norm("pre_ffw_norm_2"),
    )


def gemma3n(facts: Facts) -> ModelSpec:
    """Four residual streams, a residual of low rank, sparse blocks in the first layers."""
    if facts.integer("altup.active_idx", 0):
        key = facts.key("altup.active_idx")
        raise ModelFileError(f"key {key!r}: only the first stream can be the active one")
    facts.integer("attention.sliding_window")  # no default
    own = [
        _unscaled_attention(facts, i, window)
        for i, window in enumerate(windows(facts, GEMMA3N_PERIOD))
    ]
    n_shared = max(0, facts.n_layers - GEMMA3N_LAYERS_WITH_KV)
    n_shared = facts.integer("attention.shared_kv_layers", n_shared)
    width = facts.integer("embedding_length_per_layer_input", PER_LAYER_WIDTH)
    rank = facts.shapes.get("blk.0.laurel_l.weight", (LAUREL_RANK,))[0]
    laurel = LaurelSpec(rank, facts.rms_norm("laurel_post_norm"))
    mlp = plain.mlp(facts, "gelu")
    layers = [
        replace(_layer(facts, attention, replace(mlp, sparsity=sparsity), width), laurel=laurel)
        for attention, sparsity in zip(_sharing_kv(own, n_shared), _sparsities(facts), strict=True)
    ]
    n_streams = facts.integer("altup.num_inputs", STREAMS)
    altup = AltUpSpec(n_streams, facts.rms_norm("altup_router_norm"))
    return _with_layer_inputs(facts, layers, softcap=SOFTCAP, altup=altup)


def _sparsities(facts: Facts) -> list[float]:
    """Each layer's `MlpSpec.sparsity`. Files give minus infinity for dense blocks."""
    key, n_layers = facts.key("activation_sparsity_scale"), facts.n_layers
    if facts.keys.get(key) is None:
        return [SPARSITY if i < SPARSE_LAYERS else 0.0 for i in range(n_layers)]
    values = facts.keys.numbers(key)
    if len(values) != n_layers:
        raise ModelFileError(f"key {key!r} has {len(values)} items for {n_layers} layers")
    return [0.0 if value == -math.inf else value for value in values]


def _gemma_keys(config: Config) -> Keys:
    """Gemma 1 and 2."""
    keys = common_keys(config)
    for name in ("rope.freq_base", "attention.causal"):
        keys.pop(name, None)
    keys.setdefault("attention.head_count_kv", config.n_kv_heads)
    return keys


def _gemma2_keys(config: Config) -> Keys:
    return _gemma_keys(config) | {
        "attn_logit_softcapping": config.number("attn_logit_softcapping"),
        "final_logit_softcapping": config.number("final_logit_softcapping"),
        "attention.sliding_window": config.integer("sliding_window"),
    }


def _gemma3_keys(config: Config) -> Keys:
    """The configurations of large models leave out what is as usual."""
    head_dim = config.integer("head_dim", default=256)
    keys: Keys = {
        "context_length": 131072,
        "attention.head_count": 8,
        "attention.head_count_kv": 4,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 1_000_000.0,
        **common_keys(config),
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
    }
    if config.get("attn_logit_softcapping"):
        raise ModelFileError("a Gemma 3 whose attention has a softcap is not supported")
    if config.get("final_logit_softcapping"):
        keys["final_logit_softcapping"] = config.number("final_logit_softcapping")
    if config.get("sliding_window_pattern") != 1:
        keys["attention.sliding_window"] = config.integer("sliding_window")
    return keys


def no_space(config: Config) -> dict[str, bool]:
    return {"add_space_prefix": False}


def _of_full_layers(config: Config, name: str, global_name: str) -> int:
    """A size of the layers that see everything; 0 if none is said. Newer configurations have it in
    a table of layers that differ."""
    if config.has(global_name):
        return config.integer(global_name)
    layers = config.table("per_layer_config")
    for i, has_window in enumerate(config.has_window):
        part = layers.get(str(i))
        if not has_window and isinstance(part, dict) and name in part:
            return Config(part).integer(name)
    return 0


def _gemma4_keys(config: Config) -> Keys:
    """Layers that see everything have wider heads, and may have other KV heads."""
    n_shared, seen = config.integer("num_kv_shared_layers", default=0), config.has_window
    n_layers, head_dim = config.n_layers, config.integer("head_dim")
    full_dim = _of_full_layers(config, "head_dim", "global_head_dim") or head_dim
    keys = _gemma3_keys(config) | {
        "attention.shared_kv_layers": n_shared,
        "embedding_length_per_layer_input": config.integer(
            "hidden_size_per_layer_input", default=0
        ),
        "attention.sliding_window_pattern": seen,
        "attention.key_length": full_dim,
        "attention.value_length": full_dim,
        "attention.key_length_swa": head_dim,
        "attention.value_length_swa": head_dim,
        "rope.dimension_count": full_dim,
        "rope.dimension_count_swa": int(
            head_dim
            * Config(config.rope.get("sliding_attention") or {}).number(
                "partial_rotary_factor", default=1.0
            )
        ),
    }
    if config.get("expert_intermediate_size", "moe_intermediate_size") is not None:
        keys["expert_feed_forward_length"] = config.integer(
            "expert_intermediate_size", "moe_intermediate_size"
        )
    if config.flag("use_double_wide_mlp"):
        width = config.integer("intermediate_size")
        keys["feed_forward_length"] = [
            width if i < n_layers - n_shared else 2 * width for i in range(n_layers)
        ]
    if n_full := _of_full_layers(config, "num_key_value_heads", "num_global_key_value_heads"):
        keys["attention.head_count_kv"] = [config.n_kv_heads if swa else n_full for swa in seen]
    return keys


def _gemma4_divisors(config: Config) -> dict[str, Sequence[float]]:
    """Channels that don't rotate in layers that see everything have an endless period."""
    head_dim = _of_full_layers(config, "head_dim", "global_head_dim")
    half = (head_dim or config.integer("head_dim")) // 2
    turning = int(2 * half * config.full_rope.number("partial_rotary_factor", default=1.0) / 2)
    return {ROPE_FREQS: [1.0] * turning + [1e30] * (half - turning)}


def _gemma4_weights(config: Config, name: str, weight: Weight) -> Named:
    block = name.removeprefix("model.").removeprefix("layers.").partition(".")[0]
    if name.endswith(".router.scale"):
        yield f"blk.{block}.ffn_gate_inp.scale", weight
    elif name.endswith(".router.per_expert_scale"):
        yield f"blk.{block}.ffn_down_exps.scale", weight
    elif name.endswith((".per_dim_scale", ".layer_scalar", "_proj")):
        yield f"{name}.weight", weight
    else:
        yield name, weight


CHECKPOINTS = {
    "GemmaForCausalLM": Checkpoint(
        "gemma",
        keys=_gemma_keys,
        weights=with_one_added,
        vocabulary=no_space,
        left_out=("lm_head.",),
    ),
    "Gemma2ForCausalLM": Checkpoint(
        "gemma2",
        keys=_gemma2_keys,
        weights=with_one_added,
        vocabulary=no_space,
        left_out=("lm_head.",),
    ),
    "Gemma3ForCausalLM": Checkpoint(
        "gemma3", keys=_gemma3_keys, weights=with_one_added, vocabulary=no_space
    ),
    "Gemma3ForConditionalGeneration": Checkpoint(
        "gemma3", keys=_gemma3_keys, weights=with_one_added, vocabulary=no_space
    ),
    **{
        name: Checkpoint(
            "gemma4",
            keys=_gemma4_keys,
            weights=_gemma4_weights,
            added=_gemma4_divisors,
            vocabulary=lambda config: {"add_space_prefix": False, "add_bos_token": True},
        )
        for name in ("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration")
    },
}
