"""Codebooks: the numbers that codes of the `nuq` types stand for.

A codebook has 2^b numbers in ascending order, integers of at most 127 in magnitude, of which a
block's scale makes values (KVQuant's non-uniform types, arXiv:2401.18079, section 3.3, with
integers so that kernels can look them up as bytes). Each layer has its own for K and for V, from
`quality/codebooks.py`; without one, that of normal numbers serves. No array library.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

Codebook = tuple[int, ...]

LARGEST = 127

NORMAL: dict[int, Codebook] = {
    4: (-74, -18, 32, 93),
    8: (-100, -63, -34, -8, 18, 45, 76, 116),
    16: (-113, -91, -73, -56, -42, -28, -16, -3, 9, 22, 35, 49, 64, 81, 101, 125),
}
"""For 2^b codes the numbers of the least squared error of blocks of 32 normal numbers, with the
extreme of a block above 0, when the largest of each two blocks is kept apart
(`quality/codebooks.py`)."""


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
