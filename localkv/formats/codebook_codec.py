"""Codebooks as kernels have them, and a format's codec with one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localkv.formats.base import Codec, QuantFormat
from localkv.formats.bits import Bytes, Floats
from localkv.formats.codebooks import STEPS, Codebook


def table_of(codebook: Sequence[int]) -> NDArray[np.float32]:
    """A codebook as kernels read it: float32 [20], 16 numbers, of which the last ones may be the
    same, and in the place of four more the bytes of these, each 128 larger; of numbers that are
    even the halves of that."""
    padded = np.array([*codebook, *[codebook[-1]] * (16 - len(codebook))])
    as_bytes = ((padded + 128) // STEPS[len(codebook)]).astype(np.uint8).view(np.float32)
    return np.concatenate((padded.astype(np.float32), as_bytes))


@dataclass(frozen=True)
class CodebookCodec:
    """A format's reference with one codebook; see `Codec`."""

    fmt: QuantFormat
    codebook: Codebook

    def decode(self, planes: Sequence[Bytes]) -> Floats:
        codec: Any = self.fmt.codec
        values: Floats = codec.decode(planes, self.codebook)
        return values

    def encode(self, x: Floats) -> tuple[Bytes, ...]:
        codec: Any = self.fmt.codec
        packed: tuple[Bytes, ...] = codec.encode(x, self.codebook)
        return packed


def codec_of(fmt: QuantFormat, table: Sequence[float] | None) -> Codec | CodebookCodec:
    """The codec of a format, with a codebook as kernels have it (`table_of`) if it has one."""
    if not fmt.n_centroids or table is None:
        return fmt.codec
    return CodebookCodec(fmt, tuple(int(value) for value in table[: fmt.n_centroids]))
