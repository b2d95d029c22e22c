"""Which tensors change where K's and V's channels are multiplied, so that the model does not.

Keys that are multiplied channel by channel, and queries that are divided, have the same products.
RoPE mixes the two channels of a pair, which therefore share a factor; a norm of heads that has one
weight for all of them makes all heads share theirs. Values that are multiplied need columns of
`attn_output` that are divided. It is how SmoothAttention (QServe, arXiv:2405.04532, section 5.2)
makes large channels smaller, and how an outlier twin (`models/outliers.py`) makes them larger.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
from numpy.typing import NDArray

from localkv.arch.spec import AttentionSpec, ModelSpec, NormSpec, RopeSpec

Factors = NDArray[np.float32]
"""Of a layer's K or V: [n_kv_heads, channels]."""


def attention_layers(config: ModelSpec) -> dict[int, AttentionSpec]:
    """The attention of grouped queries of each layer that has some."""
    found = dict[int, AttentionSpec]()
    for i, layer in enumerate(config.layers):
        for mixer in (layer.mixer, layer.beside):
            if isinstance(mixer, AttentionSpec):
                found[i] = mixer
    return found


def readers(config: ModelSpec, layer: int) -> dict[int, AttentionSpec]:
    """The layers whose queries meet the K of `layer`: itself, and those that have none."""
    layers = attention_layers(config)
    return {i: spec for i, spec in layers.items() if layer in (i, spec.kv_from)}


def pairs_of_channels(spec: AttentionSpec) -> NDArray[np.int64]:
    """The channel that shares a factor with each: [key_dim], itself where RoPE leaves it."""
    partners = np.arange(spec.key_dim)
    rope = spec.rope or RopeSpec(0)
    n_pairs = rope.n_dims // 2
    i = np.arange(n_pairs)
    first, second = (2 * i, 2 * i + 1) if rope.interleaved else (i, i + n_pairs)
    partners[first], partners[second] = second, first
    return partners


def share_heads(config: ModelSpec, layer: int) -> bool:
    """Whether all heads of a layer's K have the same factors, since a norm's weight is theirs."""
    return any(
        norm is not None and norm.span == "head"
        for spec in readers(config, layer).values()
        for norm in (spec.q_norm, spec.k_norm)
    )


def k_can_change(config: ModelSpec, layer: int) -> bool:
    """Whether there are weights for the factors: a norm without weights has no place for them."""
    return all(
        norm is None or norm.tensor
        for spec in readers(config, layer).values()
        for norm in (spec.q_norm, spec.k_norm)
    )


def v_can_change(config: ModelSpec, layer: int) -> bool:
    """Whether V is a product of rows of its own, as no norm comes behind them."""
    spec = attention_layers(config)[layer]
    return spec.v_norm is None and not spec.value_from_key


def channel_factors(
    config: ModelSpec,
    names: Collection[str],
    k: Mapping[int, Factors],
    v: Mapping[int, Factors],
) -> dict[str, Factors]:
    """What each tensor that changes is multiplied with, in a shape that broadcasts.

    Args:
        names: the tensors of the model.
        k, v: what K and V of layers are to be multiplied with; heads that share a norm's weight and
            channels of a RoPE pair have equal factors.
    """
    found = dict[str, Factors]()
    for i, spec in attention_layers(config).items():
        stored = i if spec.kv_from is None else spec.kv_from
        at, group = f"blk.{i}.", spec.n_heads // spec.n_kv_heads
        k_rows: Factors = k.get(stored, np.ones((spec.n_kv_heads, spec.key_dim), np.float32))
        v_rows = v.get(stored, np.ones((spec.n_kv_heads, spec.value_dim), np.float32))
        q_rows: Factors = np.repeat(1 / k_rows, group, axis=0).astype(np.float32)
        columns = np.repeat(1 / v_rows, group, axis=0).reshape(1, -1)
        found[f"{at}attn_output.weight"] = columns.astype(np.float32)
        if spec.q_norm is not None:
            found |= _of_norm(spec.q_norm, q_rows, names, at)
            q_rows = np.ones_like(q_rows)
        if spec.k_norm is not None and spec.kv_from is None:
            found |= _of_norm(spec.k_norm, k_rows, names, at)
            k_rows = np.ones_like(k_rows)
        gated = spec.gated and f"{at}attn_gate.weight" not in names
        if gated:  # of each head q, then its gate
            q_rows = np.stack((q_rows, np.ones_like(q_rows)), axis=1)
        parts: dict[str, Factors] = {"attn_q": q_rows, "attn_k": k_rows, "attn_v": v_rows}
        if f"{at}attn_qkv.weight" in names:
            parts["attn_qkv"] = np.concatenate([part.reshape(-1) for part in parts.values()])
        for name, factors in parts.items():
            found[f"{at}{name}.weight"] = factors.reshape(-1, 1)
            found[f"{at}{name}.bias"] = factors.reshape(-1)
    return {
        name: factors for name, factors in found.items() if name in names and (factors != 1).any()
    }


def _of_norm(norm: NormSpec, rows: Factors, names: Collection[str], at: str) -> dict[str, Factors]:
    """Those of a norm's weight and bias; `rows` are [heads, channels]."""
    factors = {"head": rows[0], "heads": rows, "row": rows.reshape(-1)}[norm.span]
    weight = f"{at}{norm.tensor}"
    if weight not in names:  # PLaMo's files leave ".weight" out
        weight += ".weight"
    return {weight: factors, f"{at}{norm.tensor}.bias": factors}
