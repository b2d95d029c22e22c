"""Rotary position embedding (Su et al. 2021), with linear, YaRN and Llama-3 scaling."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from localkv.arch.spec import RopeSpec, Temperature
from localkv.cache.arrays import Array, Arrays
from localkv.kernels.namespace import namespace


@dataclass(frozen=True)
class RopeTable:
    """Rotations of a batch's tokens.

    Attributes:
        cos, sin: [tokens, n_dims / 2], already multiplied by `RopeSpec.magnitude`.
        interleaved: pairs are (2i, 2i+1), ggml's NORM; otherwise (i, i + n_dims/2), ggml's NEOX.
    """

    cos: Array
    sin: Array
    interleaved: bool


def rope_frequencies(
    rope: RopeSpec, freq_factors: NDArray[np.float32] | None = None
) -> NDArray[np.float64]:
    """Angle per position of each rotated pair: [n_dims / 2].

    Args:
        rope: base, scaling and YaRN's constants.
        freq_factors: [n_dims / 2] divisors, the tensor `rope_freqs.weight`, or None.

    YaRN as in ggml's `ggml_rope_yarn` (Peng et al. 2023): frequencies that turn often within the
    original context are kept, those that turn rarely are interpolated, with a ramp in between.
    """
    half = np.arange(rope.n_dims // 2, dtype=np.float64)
    freqs = rope.theta ** (-2.0 * half / rope.n_dims)
    if freq_factors is not None:
        freqs = freqs / freq_factors.astype(np.float64)
    interpolated: NDArray[np.float64] = freqs / rope.factor
    if rope.yarn_ext_factor == 0.0:
        return interpolated

    def correction_dim(n_rotations: float) -> float:
        turns = rope.original_context_length / (n_rotations * 2 * math.pi)
        return rope.n_dims * math.log(turns) / (2 * math.log(rope.theta))

    low = max(0.0, math.floor(correction_dim(rope.yarn_beta_fast)))
    high = min(rope.n_dims - 1.0, math.ceil(correction_dim(rope.yarn_beta_slow)))
    ramp = ((half - low) / max(0.001, high - low)).clip(0.0, 1.0)
    keep = (1.0 - ramp) * rope.yarn_ext_factor
    return interpolated * (1.0 - keep) + freqs * keep


def rope_table(freqs: Array, positions: Array, rope: RopeSpec, arrays: Arrays) -> RopeTable:
    """Cosines and sines of `positions` (int64 [tokens]), in the backend's type.

    Angles are taken in float64, which `freqs` [n_dims / 2] are.
    """
    xp = namespace(positions)
    angles = xp.asarray(positions, dtype=xp.float64)[:, None] * freqs
    cos, sin = xp.cos(angles) * rope.magnitude, xp.sin(angles) * rope.magnitude
    return RopeTable(arrays.floating(cos), arrays.floating(sin), rope.interleaved)


NEARBY = 64
"""Positions whose rotations are made together."""


class TokenRotations:
    """`rope_table` for one token at a time, in NumPy: mostly the next one's was made before."""

    def __init__(self, freqs: Array, rope: RopeSpec, arrays: Arrays) -> None:
        self.freqs, self.rope, self.arrays = freqs, rope, arrays
        self._first = -NEARBY
        self._table = RopeTable(freqs, freqs, rope.interleaved)
        self._views = memoryview(b""), memoryview(b"")

    def table(self, position: int) -> RopeTable:
        """Cosines and sines of a position, with the bits that it has among others."""
        if not 0 <= position - self._first < NEARBY:
            self._make(position - position % NEARBY)
        at = position - self._first
        return self._rows(at, at + 1)

    def following(self, position: int, n: int) -> RopeTable:
        """Rotations of n positions from one on, at most `NEARBY`, in memory one after the other."""
        if not 0 <= position - self._first <= NEARBY - n:
            self._make(position)
        at = position - self._first
        return self._rows(at, at + n)

    def put(self, position: int, cos: memoryview, sin: memoryview) -> None:
        """Write a position's rotations, which is sooner done than to make a table of it."""
        at = position - self._first
        if not 0 <= at < NEARBY:
            self.table(position)
            at = position - self._first
        n = len(cos)
        cos[:], sin[:] = (view[at * n : at * n + n] for view in self._views)

    def _make(self, first: int) -> None:
        """Rotations of a position and of as many after it as are made together."""
        positions = np.arange(first, first + NEARBY)
        self._table = rope_table(self.freqs, positions, self.rope, self.arrays)
        self._first = first
        self._views = self._table.cos.reshape(-1).data, self._table.sin.reshape(-1).data

    def _rows(self, start: int, end: int) -> RopeTable:
        cos, sin = self._table.cos[start:end], self._table.sin[start:end]
        return RopeTable(cos, sin, self.rope.interleaved)


def position_scale(positions: Array, temperature: Temperature, arrays: Arrays) -> Array:
    """Factors on q that grow with its position: [tokens], in the backend's type."""
    xp = namespace(positions)
    steps = xp.asarray(positions // temperature.length, dtype=xp.float64)
    return arrays.floating(xp.log(steps + 1.0) * temperature.scale + 1.0)
