"""Points of grids to fp16: magnitudes with signs apart, and bytes with an offset of their own."""

from __future__ import annotations

import triton
import triton.language as tl

from localkv.triton_primitives.ptx import shifted_points_ptx, signed_points_ptx
from localkv.triton_primitives.unpack import plus_1024


@triton.jit
def unpack_signed_points(magnitudes, signs, FIRST: tl.constexpr, PTX: tl.constexpr):
    """uint8 [..., n] -> fp16 [..., n], for n of 4 or 8, which a thread holds in order.

    Args:
        signs: int32, broadcast to [..., n], the same for each n: value 2 i is negative if bit
            FIRST + i is set, value 2 i + 1 if bit FIRST + i + 16 is.
    """
    N: tl.constexpr = magnitudes.shape[len(magnitudes.shape) - 1]
    if PTX:
        return tl.inline_asm_elementwise(
            signed_points_ptx(FIRST, N),
            "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r" if N == 8 else "=r,=r,r,r,r,r,r",
            [magnitudes, signs],
            dtype=tl.float16,
            is_pure=True,
            pack=N,
        )
    else:
        j = tl.arange(0, N)
        bit = FIRST + j // 2 + 16 * (j % 2)
        for _ in tl.static_range(len(magnitudes.shape) - 1):
            bit = bit[None]
        values = plus_1024(magnitudes) - 1024.0
        return tl.where(((signs >> bit) & 1) != 0, -values, values)


@triton.jit
def unpack_shifted_points(points, offsets, PTX: tl.constexpr):
    """uint8 [...] -> fp16 [...], less n.

    Args:
        offsets: int32, broadcast to [...], the same for each four bytes: twice 1024 + n in fp16.
    """
    if PTX:
        return tl.inline_asm_elementwise(
            shifted_points_ptx(),
            "=r,=r,r,r,r,r,r",
            [points, offsets],
            dtype=tl.float16,
            is_pure=True,
            pack=4,
        )
    else:
        offset = (offsets & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True)
        return plus_1024(points) - offset
