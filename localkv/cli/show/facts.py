"""What `localkv show` says of a model's layers: as JSON, and in rows of words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from localkv.cache.recurrent_state import state_bytes
from localkv.errors import byte_size, counted

if TYPE_CHECKING:
    from localkv.arch.rope_spec import RopeSpec
    from localkv.arch.spec import LayerSpec, ModelSpec


def model_facts(config: ModelSpec) -> dict[str, Any]:
    """Sizes of a model; each kind of layer once, with the indices of its layers."""
    facts = asdict(config)
    del facts["layers"]
    kinds = (
        {"layers": [i for i, layer in enumerate(config.layers) if layer == kind], **asdict(kind)}
        for kind in config.kinds
    )
    groups = [asdict(group) for group in config.groups]
    return {**facts, "n_layers": config.n_layers, "kinds": list(kinds), "groups": groups}


def model_rows(config: ModelSpec) -> list[tuple[str, object]]:
    """Labels and texts; where layers differ, a row for each kind, with the number of its layers."""
    rows: list[tuple[str, object]] = [("layers", config.n_layers), ("embedding", config.n_embd)]
    rows += _by_kind(config, "heads", _heads)
    rows += _by_kind(config, "feed-forward", _feed_forward)
    rows.append(("context", f"{config.n_ctx_train} tokens"))
    rows.append(("vocabulary", f"{config.n_vocab} tokens"))
    rows += _by_kind(config, "rope", _rope)
    if any(group.window or group.chunk for group in config.groups):
        rows += _by_kind(config, "window", _window)
    if config.states:
        text = f"{byte_size(state_bytes(config.states))} for each sequence, float32"
        rows.append(("states", text))
    if config.has_experts:
        rows += _by_kind(config, "experts", _experts)
    return rows + _stream_rows(config)


def _stream_rows(config: ModelSpec) -> list[tuple[str, object]]:
    """What layers do with the residual stream besides attention and feed-forward."""
    rows: list[tuple[str, object]] = []
    if (per_layer := config.per_layer_input) is not None:
        rows.append(("embeddings", f"of each layer, {per_layer.width} values, read by row"))
    if (altup := config.altup) is not None:
        rows.append(("streams", f"{altup.n_streams} (AltUp)"))
    if (laurel := config.layers[0].laurel) is not None:
        rows.append(("beside heads", f"a residual of rank {laurel.rank} (Laurel)"))
    return rows


def _by_kind(
    config: ModelSpec, label: str, words: Callable[[LayerSpec], str]
) -> list[tuple[str, object]]:
    """What the layers have, and how many have it unless all do."""
    counts = dict[str, int]()
    for layer in config.layers:
        counts[words(layer)] = counts.get(words(layer), 0) + 1
    if len(counts) == 1:
        return [(label, text) for text in counts]
    texts = [f"{text} ({counted(n, 'layer')})" for text, n in counts.items()]
    return [(label if i == 0 else "", text) for i, text in enumerate(texts)]


def _heads(layer: LayerSpec) -> str:
    """Those of the layer's mixer, whatever it is, and of one beside it."""
    if layer.beside is not None:
        first, second = replace(layer, beside=None), replace(layer, mixer=layer.beside, beside=None)
        return f"{_heads(first)}; {_heads(second)}"
    from localkv.arch.mixer_spec import (
        AttentionSpec,
        DeltaNetSpec,
        LatentAttentionSpec,
        Mamba2Spec,
        ShortConvSpec,
    )

    match layer.mixer:
        case AttentionSpec() as spec:
            dims = f"{spec.key_dim}"
            if spec.value_dim != spec.key_dim:
                dims += f" (V: {spec.value_dim})"
            if spec.kv_from is not None:
                return f"{spec.n_heads} of {dims}, with K and V of layer {spec.kv_from}"
            values = "K, from which V is" if spec.value_from_key else "K and V"
            return f"{spec.n_heads}, {spec.n_kv_heads} for {values}, of {dims}"
        case LatentAttentionSpec() as spec:
            parts = f"{spec.latent_dim} and {spec.rope_dim} rotated channels"
            return f"{spec.n_heads}, one latent for K and V, of {parts}"
        case DeltaNetSpec() as spec:
            heads = f"{spec.n_value_heads}, {spec.n_key_heads} for q and k"
            return f"{heads}, of {spec.head_dim}, in a gated delta net"
        case ShortConvSpec() as spec:
            return f"none, a convolution over {spec.kernel} tokens"
        case Mamba2Spec() as spec:
            return f"{spec.n_heads} of {spec.head_dim} in a Mamba-2 mixer, state {spec.state_dim}"
    return "none"


def _feed_forward(layer: LayerSpec) -> str:
    if layer.mlp is None:
        return "experts only" if layer.moe else "none"
    return str(layer.mlp.n_ff) + (", sparse" if layer.mlp.sparsity else "")


def _experts(layer: LayerSpec) -> str:
    moe = layer.moe
    if moe is None:
        return "none"
    shared = f", a shared one of {moe.n_ff_shared}" if moe.n_ff_shared else ""
    return f"{moe.n_experts_used} of {moe.n_experts}, each of {moe.n_ff}{shared}"


def _window(layer: LayerSpec) -> str:
    params = getattr(layer.mixer, "params", None)
    if params is None or not (params.window or params.chunk):
        return "none"
    return f"{params.window} tokens" if params.window else f"chunks of {params.chunk} tokens"


def _rope(layer: LayerSpec) -> str:
    rope: RopeSpec | None = getattr(layer.mixer, "rope", None)
    if rope is None:
        return "none"
    text = f"{rope.n_dims} channels, base {rope.theta:g}"
    if rope.scaling != "none":
        text += f", {rope.scaling} x{rope.factor:g} of {rope.original_context_length}"
    if rope.long_divisors:
        text += f", LongRoPE: other factors with -c above {rope.original_context_length}"
    elif rope.divisors:
        text += ", factors of the file"
    return text
