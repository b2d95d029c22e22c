"""Codebooks: the numbers that codes of the `nuq` types stand for.

A codebook has 2^b numbers in ascending order, integers of at most 127 in magnitude, of which a
block's scale makes values (KVQuant's non-uniform types, arXiv:2401.18079, section 3.3, with
integers so that kernels can look them up as bytes). Each layer has its own for K and for V, from
`quality/codebooks.py`; without one, that of normal numbers serves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from localkv.formats.base import Codec, QuantFormat
from localkv.formats.bits import Bytes, Floats

Codebook = tuple[int, ...]

LARGEST = 127

NORMAL: dict[int, Codebook] = {
    4: (-85, -26, 26, 85),
    8: (-110, -71, -41, -13, 13, 41, 71, 110),
    16: (-121, -97, -78, -61, -46, -32, -19, -6, 6, 19, 32, 46, 61, 78, 97, 121),
}
"""For 2^b codes the numbers of the least squared error of blocks of 32 normal numbers, scaled by
the largest of them, when the largest of each two blocks is kept apart (k-means)."""


def table_of(codebook: Sequence[int]) -> NDArray[np.float32]:
    """A codebook as kernels read it: float32 [16], the last number again behind the last."""
    padded = [*codebook, *[codebook[-1]] * (16 - len(codebook))]
    return np.array(padded, np.float32)


@dataclass(frozen=True)
class CodebookCodec:
    """A format's reference with one codebook; see `Codec`."""

    fmt: QuantFormat
    codebook: Codebook

    def decode(self, planes: Sequence[Bytes]) -> Floats:
        values: Floats = self.fmt.part("reference").decode(planes, self.codebook)
        return values

    def encode(self, x: Floats) -> tuple[Bytes, ...]:
        packed: tuple[Bytes, ...] = self.fmt.part("reference").encode(x, self.codebook)
        return packed


def codec_of(fmt: QuantFormat, table: Sequence[float] | None) -> Codec | CodebookCodec:
    """The codec of a format, with a codebook as kernels have it (`table_of`) if it has one."""
    if not fmt.n_centroids or table is None:
        return fmt.codec
    return CodebookCodec(fmt, tuple(int(value) for value in table[: fmt.n_centroids]))


def check_codebook(codebook: Sequence[int]) -> None:
    """Refuse what is none.

    Raises:
        ValueError: it has no 4, 8 or 16 numbers, they do not ascend, or one is too large.
    """
    if len(codebook) not in NORMAL:
        raise ValueError(f"a codebook has 4, 8 or 16 numbers, not {len(codebook)}")
    if any(type(value) is not int or abs(value) > LARGEST for value in codebook):
        raise ValueError(f"numbers of a codebook are integers of at most {LARGEST}")
    if any(a >= b for a, b in pairwise(codebook)):
        raise ValueError("numbers of a codebook ascend")
