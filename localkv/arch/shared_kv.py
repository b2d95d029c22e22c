"""Layers that read the K and V of earlier ones, and have none (Gemma 3n and 4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from localkv.arch.mixer_spec import AttentionSpec
from localkv.arch.spec import LayerSpec
from localkv.errors import ModelFileError


def sharing_kv(own: Sequence[AttentionSpec], n_shared: int) -> list[AttentionSpec]:
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


def ignored_tensors(layers: Sequence[LayerSpec]) -> tuple[str, ...]:
    """Beginnings of names of tensors that a file may have for layers that share K and V."""
    return tuple(
        f"blk.{i}.{name}."
        for i, layer in enumerate(layers)
        if layer.attention.kv_from is not None
        for name in ("attn_k", "attn_v", "attn_k_norm")
    )
