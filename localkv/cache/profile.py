"""What was measured of a model's K and V: how large they are, and what packing each of them costs.

`localkv calibrate` measures it once; `cache/profile_file.py` keeps it in a file beside the model or
in the user's data folder. No torch, and NumPy only where there are arrays.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from localkv.cache.tail import FEW_BITS
from localkv.config import KVCodebook, KVScales
from localkv.errors import UsageError
from localkv.formats import KV_FORMATS
from localkv.formats.shared.codebooks import Codebook

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

LayerTypes = tuple[tuple[str, str] | None, ...]
"""As `CacheConfig.layer_types` has them."""

DEFAULT_BITS = 5.0
"""Bits per value where a profile is used and nobody says how many."""

OUTLIER = 6.0
"""A channel is an outlier if its magnitude is so many times the median of its head's channels."""

_SLACK = 1e-6
"""Of bits, which are sums of fractions."""


@dataclass(frozen=True)
class SideFacts:
    """K or V of one layer.

    Attributes:
        n_heads, n_channels: KV heads, and channels of each.
        packed_ranges: base64 of float16 [n_heads, n_channels, 2], little endian: the least and the
            largest value of each channel, away from 0 to the next float16.
        kld: mean divergence, in nats, from an f16 cache if this side of this layer alone is of a
            type, by type.
        exponents: [n_heads][n_channels] of the smoothing that weights are loaded with
            (`loader/smoothing.py`), which all else was measured with; empty for none.
        codebooks: one for each number of codes (`shared/codebooks.py`), for rows as they are
            packed.
    """

    n_heads: int
    n_channels: int
    packed_ranges: str
    kld: Mapping[str, float]
    exponents: tuple[tuple[int, ...], ...] = ()
    codebooks: tuple[Codebook, ...] = ()

    @property
    def ranges(self) -> NDArray[np.float32]:
        """[n_heads, n_channels, 2]: the least and the largest value."""
        import numpy as np

        raw = np.frombuffer(base64.b64decode(self.packed_ranges, validate=True), "<f2")
        return raw.reshape(self.n_heads, self.n_channels, 2).astype(np.float32)

    @property
    def channel_absmax(self) -> NDArray[np.float32]:
        """[n_heads, n_channels]"""
        absmax: NDArray[np.float32] = abs(self.ranges).max(-1)
        return absmax

    @property
    def absmax(self) -> tuple[float, ...]:
        """The largest magnitude of each head."""
        return tuple(self.channel_absmax.max(-1).tolist())

    @property
    def outliers(self) -> tuple[tuple[int, int], ...]:
        """(head, channel) of those that are much larger than the others of their head."""
        import numpy as np

        absmax = self.channel_absmax
        found = np.argwhere(absmax > OUTLIER * np.median(absmax, axis=-1, keepdims=True))
        return tuple((int(head), int(channel)) for head, channel in found)


def packed_ranges(lo: NDArray[np.float32], hi: NDArray[np.float32]) -> str:
    """As `SideFacts` has them, of [n_heads, n_channels] each."""
    import numpy as np

    values = np.stack([lo, hi], -1).astype(np.float32)
    halves = values.clip(-65504, 65504).astype("<f2")
    away = np.nextafter(halves, np.copysign(np.float16(np.inf), halves)).astype("<f2")
    smaller = np.abs(halves.astype(np.float32)) < np.abs(values)
    halves = np.where(smaller & np.isfinite(away), away, halves).astype("<f2")
    return base64.b64encode(halves.tobytes()).decode()


@dataclass(frozen=True)
class LayerFacts:
    """Of one layer that stores rows; latents and rotated parts of keys where it keeps these."""

    k: SideFacts
    v: SideFacts


@dataclass(frozen=True)
class TypeList:
    """The types of all layers, and what they cost together.

    Attributes:
        layers: types of K and of V, None for a layer without rows.
        bits: per value of packed rows, on average; `allocated_bits` has those of a cache.
        bytes_per_token: of packed rows of K and V.
        predicted: the sum of the divergences that the types cost alone.
        verified: the divergence with all of them at once.
        kv_tail, kv_sink: tokens in f16 that all packed layers have, and had while this was
            measured; None for those that types have by themselves.
    """

    layers: LayerTypes
    bits: float
    bytes_per_token: int
    predicted: float
    verified: float
    kv_tail: int | None = None
    kv_sink: int | None = None

    @property
    def has_exact_rows(self) -> bool:
        """Whether a cache with these types has a tail or a sink, which older files don't say: types
        have it by themselves then."""
        names = {name for pair in self.layers if pair is not None for name in pair}
        formats = [KV_FORMATS[name] for name in names]
        sink = self.kv_sink
        if sink is None:
            sink = any(8 * fmt.block_bytes < FEW_BITS * fmt.block_size for fmt in formats)
        return bool(self.kv_tail or sink or any(fmt.group_tokens > 1 for fmt in formats))

    def in_words(self, kv_tail: int | None) -> str:
        """The bits of packed rows, and the tail of a cache with these types, for people."""
        tail = f" and a tail of {kv_tail} tokens in f16" if kv_tail else ""
        return f"{self.bits:.4g} bits per value by layer{tail}"


@dataclass(frozen=True)
class KVProfile:
    """The measurements of one model.

    Attributes:
        model: its hash (`loader/model_fingerprint.py`).
        architecture, name: the model's, for people.
        text: what was run through it, for people.
        n_tokens, n_scored: of that, and those whose predictions were compared.
        kv_rotation: the cache's, while divergences were measured (`CacheConfig.kv_rotation`).
        token_seconds: for a generated token without history, on the machine that measured.
        bandwidth: of that machine's memory, in bytes per second.
        smoothing: strength of the smoothing, 0 for none.
        layers: in the model's order; None for one without rows.
        lists: types by layer for growing budgets, with a tail and without.
        uniform: of types that all layers have: whether predictions hold, and to compare with.
        pairs: the divergence of other pairs that all layers have, such as those of presets, by
            "K/V", each with the tail and the sink that it has by itself.
    """

    model: str
    architecture: str
    name: str
    text: str
    n_tokens: int
    n_scored: int
    kv_rotation: str
    token_seconds: float
    bandwidth: float
    smoothing: float
    layers: tuple[LayerFacts | None, ...]
    lists: tuple[TypeList, ...]
    uniform: tuple[TypeList, ...]
    pairs: dict[str, float] = field(default_factory=dict)

    @property
    def without_tail(self) -> tuple[TypeList, ...]:
        """The types by layer that take their packed rows and nothing else, in any context."""
        return tuple(one for one in self.lists if not one.has_exact_rows)

    def measured_with(self, kv_tail: int | None, kv_sink: int | None) -> KVProfile:
        """The profile with only those types by layer that were measured with such a tail, and of
        these with such a sink; None is any. Where none were, all stay.

        Without a tail, types that were found with one are far worse than measured.
        """
        lists = self.lists
        for name, tokens in (("kv_tail", kv_tail), ("kv_sink", kv_sink)):
            alike = tuple(one for one in lists if tokens in (None, getattr(one, name)))
            lists = alike or lists
        return replace(self, lists=lists)

    def within(self, bits: float, takes: Callable[[TypeList], float]) -> TypeList:
        """The types by layer that diverge least within a budget.

        Args:
            bits: per value.
            takes: the bits of a cache with the types, such as `allocated_bits`.

        Raises:
            UsageError: all take more.
        """
        sizes = [takes(one) for one in self.lists]
        pairs = zip(sizes, self.lists, strict=True)
        fitting = [(one.verified, size, one) for size, one in pairs if size <= bits + _SLACK]
        if not fitting:
            raise UsageError(
                f"the KV profile has no types that take at most {bits:g} bits per value here",
                hint=f"its smallest take {math.ceil(1000 * min(sizes)) / 1000:g} (--kv-bits)",
            )
        return min(fitting, key=lambda one: one[:2])[2]

    @property
    def codebooks(self) -> tuple[KVCodebook, ...]:
        """Those of all layers."""
        return tuple(
            KVCodebook(i, side, numbers)
            for i, layer in enumerate(self.layers)
            if layer is not None
            for side, facts in (("k", layer.k), ("v", layer.v))
            for numbers in facts.codebooks
        )

    @property
    def smoothing_name(self) -> str:
        """Which smoothing rows were measured with: equal for equal exponents, "" for none."""
        exponents = [layer and (layer.k.exponents, layer.v.exponents) for layer in self.layers]
        sides = (side for layer in exponents if layer for side in layer)
        if not self.smoothing or not any(n for side in sides for head in side for n in head):
            return ""
        return hashlib.sha256(repr(exponents).encode()).hexdigest()[:16]

    def scales(self) -> KVScales | None:
        """For types that are scaled by head; None if layers differ in their heads."""
        layers = [layer for layer in self.layers if layer is not None]
        sizes = {(s.n_heads, s.n_channels) for layer in layers for s in (layer.k, layer.v)}
        if len(sizes) > 1 or len(layers) < len(self.layers):
            return None
        ((n_heads, n_channels),) = sizes
        return KVScales(
            architecture=self.architecture,
            name=self.name,
            n_layers=len(layers),
            n_kv_heads=n_heads,
            head_dim=n_channels,
            rotation_k=0,
            rotation_v=0,
            n_tokens=self.n_tokens,
            absmax_k=tuple(layer.k.absmax for layer in layers),
            absmax_v=tuple(layer.v.absmax for layer in layers),
            smoothing=self.smoothing_name,
        )
