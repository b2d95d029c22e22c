"""Common parts of q5_0, q5_1 and q5_K: low bits as q4_0's, and a plane of the fifth.

Bit p of byte i of a run of fifth bits belongs to value 16 p + i of a unit of 128.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from localkv.formats.gpu.bits import bit_fields, pack_bits
from localkv.formats.gpu.weight_layout import load_runs
from localkv.triton_primitives.bit_fields import unpack_bit_field


def fifth_bits(qh: Tensor, run: int) -> Tensor:
    """uint8 [rows, blocks, bytes], packed in runs of `run` bytes -> the plane."""
    return pack_bits(bit_fields(qh, n_bits=1, run=run).flatten(1), n_bits=1, run=16)


@triton.jit
def two_parts(qs, above, row, n, at, ok, PART: tl.constexpr, OFFSET: tl.constexpr,
              EVEN: tl.constexpr, PTX: tl.constexpr):  # fmt: skip
    """Codes of parts PART (even) and PART + 1 of units `at` [units], fp16 [rows, units, 16] each;
    `above` are their fifth bits."""
    q = load_runs(qs, row, 4 * n, 4 * at + PART // 2, ok, EVEN)
    low = unpack_bit_field(q, above, 0, 4, PART, 1, OFFSET, PTX)
    return low, unpack_bit_field(q, above, 4, 4, PART + 1, 1, OFFSET, PTX)
