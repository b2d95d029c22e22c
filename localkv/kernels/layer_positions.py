"""What tokens' positions do in the layers of a model: rotations, and factors on q."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from localkv.arch.spec import (
    AttentionSpec,
    EncoderAttentionSpec,
    LatentAttentionSpec,
    LayerSpec,
    Mixer,
    RopeSpec,
    Temperature,
)
from localkv.cache.arrays import Array, Arrays
from localkv.kernels.backend import TokenInputs
from localkv.kernels.rope import (
    RopeTable,
    TokenRotations,
    position_scale,
    rope_frequencies,
    rope_table,
)


class LayerPositions:
    """Layers in which positions do the same are of a kind, for which things are made once.

    Args:
        layers: of the model.
        divisors: tensors that divide frequencies, by their names.
        arrays: the backend's.

    Attributes:
        kind_of: the kind of each layer, a place in what the methods return.
    """

    def __init__(
        self,
        layers: Sequence[LayerSpec],
        divisors: Mapping[str, NDArray[np.float32]],
        arrays: Arrays,
    ) -> None:
        of_layers = [_positions_of(layer.mixer) for layer in layers]
        self._kinds = list(dict.fromkeys(of_layers))
        self.kind_of = [self._kinds.index(kind) for kind in of_layers]
        self._divisors = divisors
        self._arrays = arrays
        self._freqs = dict[tuple[RopeSpec, str], Array]()
        self._one_by_one = dict[tuple[RopeSpec, str], TokenRotations]()
        self._rotations = dict[int, list[TokenRotations | None]]()

    def inputs(self, positions: Array, n_ctx: int) -> list[TokenInputs]:
        """What a batch's tokens are given in each kind of layer, in a context of `n_ctx`.

        Args:
            positions: int64 [tokens].
        """
        return [self._inputs(positions, *kind, n_ctx) for kind in self._kinds]

    def rotations(self, n_ctx: int) -> list[TokenRotations | None] | None:
        """Rotations of one token after the other; None if a kind does something else, too."""
        if n_ctx not in self._rotations:
            if any(temperature is not None for _, temperature in self._kinds):
                return None
            self._rotations[n_ctx] = [
                None if rope is None else self._token_rotations(rope, n_ctx)
                for rope, _ in self._kinds
            ]
        return self._rotations[n_ctx]

    def _inputs(
        self, positions: Array, rope: RopeSpec | None, temperature: Temperature | None, n_ctx: int
    ) -> TokenInputs:
        arrays = self._arrays
        return TokenInputs(
            None if rope is None else self._rope_table(rope, positions, n_ctx),
            None if temperature is None else position_scale(positions, temperature, arrays),
            None
            if rope is None
            else partial(_table_at, self._frequencies(rope, n_ctx), rope, arrays),
        )

    def _rope_table(self, rope: RopeSpec, positions: Array, n_ctx: int) -> RopeTable:
        if len(positions) > 1 or not isinstance(positions, np.ndarray):
            return rope_table(self._frequencies(rope, n_ctx), positions, rope, self._arrays)
        return self._token_rotations(rope, n_ctx).table(int(positions[0]))

    def _token_rotations(self, rope: RopeSpec, n_ctx: int) -> TokenRotations:
        key = rope, rope.divisors_in(n_ctx)
        if key not in self._one_by_one:
            freqs = self._frequencies(rope, n_ctx)
            self._one_by_one[key] = TokenRotations(freqs, rope, self._arrays)
        return self._one_by_one[key]

    def _frequencies(self, rope: RopeSpec, n_ctx: int) -> Array:
        """float64 [pairs], made when they are first needed."""
        divisors = rope.divisors_in(n_ctx)
        if (rope, divisors) not in self._freqs:
            values = self._divisors[divisors] if divisors else None
            self._freqs[rope, divisors] = self._arrays.from_numpy(rope_frequencies(rope, values))
        return self._freqs[rope, divisors]


def _table_at(freqs: Array, rope: RopeSpec, arrays: Arrays, positions: Array) -> RopeTable:
    return rope_table(freqs, positions, rope, arrays)


def _positions_of(mixer: Mixer | None) -> tuple[RopeSpec | None, Temperature | None]:
    """What positions do in a layer."""
    if isinstance(mixer, EncoderAttentionSpec):
        mixer = mixer.attention
    if isinstance(mixer, (AttentionSpec, LatentAttentionSpec)):
        return mixer.rope, mixer.temperature
    return None, None
