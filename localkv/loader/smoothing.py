"""Smoothing: large channels of K and V made smaller before they are packed, inside the weights.

A type with a scale for several channels loses the small ones beside a large one. Dividing K's
channels and multiplying q's, V's and the columns of `attn_output`, leaves the model as it is
(SmoothAttention: QServe, arXiv:2405.04532, section 5.2). The factors are folded into weights while
these are loaded (`channel_factors`), so they cost nothing afterwards. All are powers of two: the
exponents of weights and of scales of blocks change and nothing else, so logits stay the same bits
(but for fp16 numbers below 2 ** -14, which are rounded).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from localkv.arch.spec import ModelSpec
from localkv.cache.profile import KVProfile
from localkv.config import CacheConfig
from localkv.errors import ModelFileError
from localkv.formats.packed_tensor import PackedTensor
from localkv.formats.scaled import can_scale_rows, is_float, scaled
from localkv.loader.channel_factors import (
    Factors,
    attention_layers,
    channel_factors,
    k_can_change,
    pairs_of_channels,
    share_heads,
    v_can_change,
)
from localkv.loader.gguf_header import TensorInfo
from localkv.loader.tensor_reader import TensorSource

Exponents = tuple[tuple[int, ...], ...]
"""Of a layer's K or V: [n_kv_heads][channels]; a channel is divided by two to the power of its."""

ALPHA = 0.5
"""Strength: large channels are divided by their magnitude to this power (SmoothQuant's alpha,
arXiv:2211.10438; QServe takes 0.5 for keys)."""

MOST = 8
"""The largest exponent, up or down."""


@dataclass(frozen=True)
class Smoothing:
    """How K and V of a model are smoothed.

    Attributes:
        alpha: the strength that the exponents were made with.
        k, v: of layers; those that are missing stay as they are.
    """

    alpha: float
    k: Mapping[int, Exponents]
    v: Mapping[int, Exponents]

    @classmethod
    def of_profile(cls, profile: KVProfile) -> Smoothing:
        """What a profile was measured with."""
        layers = [(i, layer) for i, layer in enumerate(profile.layers) if layer is not None]
        return cls(
            profile.smoothing,
            {i: layer.k.exponents for i, layer in layers if layer.k.exponents},
            {i: layer.v.exponents for i, layer in layers if layer.v.exponents},
        )

    @classmethod
    def in_use(cls, cache: CacheConfig, profile: KVProfile | None) -> Smoothing | None:
        """The smoothing that a cache is for; None for none (`cache/profiled.py`)."""
        return cls.of_profile(profile) if profile is not None and cache.smoothing else None

    def tensor_factors(self, config: ModelSpec, names: Collection[str]) -> dict[str, Factors]:
        """What each tensor that changes is multiplied with (`channel_factors`)."""
        return channel_factors(config, names, _factors(self.k), _factors(self.v))


def changed_tensors(
    smoothing: Smoothing | None, config: ModelSpec, names: Collection[str]
) -> frozenset[str]:
    """The names of tensors that smoothing copies into memory."""
    return frozenset(smoothing.tensor_factors(config, names) if smoothing else ())


NO_SMOOTHING = Smoothing(0.0, {}, {})


def _factors(exponents: Mapping[int, Exponents]) -> dict[int, Factors]:
    return {i: np.exp2(-np.array(layer, np.float32)) for i, layer in exponents.items()}


def smoothing_of(
    config: ModelSpec,
    tensors: Mapping[str, TensorInfo],
    absmax_k: Mapping[int, NDArray[np.float32]],
    absmax_v: Mapping[int, NDArray[np.float32]],
    alpha: float = ALPHA,
) -> Smoothing:
    """Smoothing of all layers whose weights can hold it.

    The others are left out: K where a norm has no weights or a type no scales of blocks
    (`can_scale_rows`), V where a norm follows, or `attn_output` is packed (its blocks run along a
    row, across the columns that would be multiplied).

    Args:
        tensors: those of the model's file.
        absmax_k, absmax_v: of layers, the largest magnitudes in the cache by channel:
            [n_kv_heads, channels], K after RoPE.
        alpha: 0 leaves all as it is, 1 makes all channels alike.

    Raises:
        ValueError: alpha is not between 0 and 1.
    """
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha is between 0 and 1, not {alpha}")
    k, v = dict[int, Exponents](), dict[int, Exponents]()
    for layer, spec in attention_layers(config).items():
        if spec.kv_from is not None:
            continue
        if layer in absmax_k and k_can_change(config, layer):
            absmax = np.asarray(absmax_k[layer], np.float64)
            absmax = np.maximum(absmax, absmax[:, pairs_of_channels(spec)])
            if share_heads(config, layer):
                absmax = np.broadcast_to(absmax.max(0), absmax.shape)
            k[layer] = _exponents(absmax, alpha)
        if layer in absmax_v and v_can_change(config, layer):
            v[layer] = _exponents(np.asarray(absmax_v[layer], np.float64), alpha)
    for sides, side in ((k, "k"), (v, "v")):
        for layer in list(sides):
            alone = Smoothing(alpha, **{"k": {}, "v": {}, side: {layer: sides[layer]}})
            if not can_fold(alone.tensor_factors(config, tensors), tensors):
                del sides[layer]
    return Smoothing(alpha, k, v)


def _exponents(absmax: NDArray[np.float64], alpha: float) -> Exponents:
    """Those of channels, about their mean: so scales of a layer as a whole stay as they are."""
    logs = np.log2(np.maximum(absmax, 2.0**-30))
    counted = absmax > 0
    mean = logs.mean(where=counted) if counted.any() else 0.0
    exponents = np.where(counted, np.rint(alpha * (logs - mean)), 0).clip(-MOST, MOST)
    return tuple(tuple(row) for row in exponents.astype(int).tolist())


def can_fold(factors: Mapping[str, Factors], tensors: Mapping[str, TensorInfo]) -> bool:
    """Whether tensors of these types can be multiplied with factors like these."""
    return all(
        is_float(tensors[name].format)
        or (can_scale_rows(tensors[name].format) and by.shape[-1] == 1)
        for name, by in factors.items()
    )


@dataclass(frozen=True)
class SmoothedTensors:
    """The tensors of a model, some of them multiplied: those are copies in memory.

    Attributes:
        source: where they come from.
        factors: of tensors by name (`Smoothing.tensor_factors`).
    """

    source: TensorSource
    factors: Mapping[str, Factors]

    def has(self, name: str) -> bool:
        return self.source.has(name)

    def packed(self, name: str, shape: tuple[int, ...]) -> PackedTensor:
        """A tensor of this shape.

        Raises:
            ModelFileError: it is missing, of another shape, or its factors don't fit its type.
        """
        tensor = self.source.packed(name, shape)
        factors = self.factors.get(name)
        if factors is None:
            return tensor
        try:
            return scaled(tensor, factors)
        except ValueError as error:
            raise ModelFileError(f"tensor {name!r} can't be smoothed: {error}") from error

    def release(self, name: str) -> None:
        self.source.release(name)
