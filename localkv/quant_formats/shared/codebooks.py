"""Codebooks: the numbers that codes of the `nuq` types stand for.

A codebook has 2^b numbers in ascending order, integers of at most 127 in magnitude; a block's
scale makes values of them (KVQuant's non-uniform types, arXiv:2401.18079, section 3.3, with
integers so that kernels can look them up as bytes). Sixteen are even: a GPU looks up their halves,
with 7 bits each, in two tables of eight, and the 8th bit says which table has none. Each layer has
its own codebook for K and for V, from `quality/kv_profile.py`; without one, the codebook of normal
numbers serves. Kernels have it as a table (`table_of`), references by way of `codec_of`. No array
library, except for a table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from localkv.quant_formats.base import Codec, QuantFormat
    from localkv.quant_formats.shared.bits import Bytes, Floats

Codebook = tuple[int, ...]

LARGEST = 127
STEPS = {4: 1, 8: 1, 16: 2}
"""What the numbers of a codebook are multiples of, by how many there are."""

NORMAL: dict[int, Codebook] = {
    4: (-74, -18, 32, 93),
    8: (-100, -63, -34, -8, 18, 45, 76, 116),
    16: (-112, -90, -72, -56, -42, -28, -14, -2, 10, 22, 36, 50, 64, 82, 102, 126),
}
"""The numbers of 2^b codes that have the least squared error for blocks of 32 normal numbers. The
extreme of a block is above 0, and the largest of each two blocks is an outlier
(`quality/kv_profile.py`). The sixteen are rounded to even numbers; some are the next even number,
with which the error is 2 % smaller."""


def check_codebook(codebook: Sequence[int]) -> None:
    """Refuse what is none.

    Raises:
        ValueError: it has no 4, 8 or 16 numbers, they do not ascend, one is too large, or one of 16
            is odd.
    """
    if len(codebook) not in NORMAL:
        raise ValueError(f"a codebook has 4, 8 or 16 numbers, not {len(codebook)}")
    if any(type(value) is not int or abs(value) > LARGEST for value in codebook):
        raise ValueError(f"numbers of a codebook are integers of at most {LARGEST}")
    if any(value % STEPS[len(codebook)] for value in codebook):
        raise ValueError(f"the numbers of a codebook of {len(codebook)} are even")
    if any(a >= b for a, b in pairwise(codebook)):
        raise ValueError("numbers of a codebook ascend")


def table_of(codebook: Sequence[int]) -> NDArray[np.float32]:
    """A codebook as kernels read it: float32 [20].

    First come 16 numbers, whose last ones may be the same. In the place of four more come their
    bytes, each 128 larger; if numbers are even, halves of these.
    """
    import numpy as np

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
