"""Codes whose bits lie in two places, as those of 2, 3, 5 and 6 bits do."""

from __future__ import annotations

import triton
import triton.language as tl

from localkv.triton_primitives.ptx import BYTES_0_1, BYTES_2_3, pair
from localkv.triton_primitives.unpack import plus_1024


@triton.constexpr_function
def bit_field_ptx(shift, n_bits, above_shift, above_bits, offset):
    """$2, $3: four bytes each -> $0, $1: as `unpack_bit_field`."""
    low = ((1 << n_bits) - 1) * 0x01010101
    high = (((1 << above_bits) - 1) << n_bits) * 0x01010101
    to_left = n_bits - above_shift
    move = f"shl.b32 h, $3, {to_left};" if to_left >= 0 else f"shr.u32 h, $3, {-to_left};"
    join = f"{move} and.b32 h, h, 0x{high:08X}; or.b32 a, a, h;" if above_bits else ""
    return f"""{{
        .reg .b32 a, h, m, o;
        shr.u32 a, $2, {shift};
        and.b32 a, a, 0x{low:08X};
        {join}
        mov.b32 m, 0x64646464;
        mov.b32 o, {pair(1024 + offset)};
        prmt.b32 h, a, m, {BYTES_0_1};
        sub.f16x2 $0, h, o;
        prmt.b32 h, a, m, {BYTES_2_3};
        sub.f16x2 $1, h, o;
    }}"""


@triton.jit
def unpack_bit_field(
    q,
    above,
    SHIFT: tl.constexpr,
    N_BITS: tl.constexpr,
    ABOVE_SHIFT: tl.constexpr,
    ABOVE_BITS: tl.constexpr,
    OFFSET: tl.constexpr,
    PTX: tl.constexpr,
):
    """uint8 [...] twice -> fp16 [...]: N_BITS of `q` from bit SHIFT on, and above them ABOVE_BITS
    of `above` from bit ABOVE_SHIFT on, less OFFSET. Eight bits together at most."""
    if PTX:
        return tl.inline_asm_elementwise(
            bit_field_ptx(SHIFT, N_BITS, ABOVE_SHIFT, ABOVE_BITS, OFFSET),
            "=r,=r,r,r",
            [q, above],
            dtype=tl.float16,
            is_pure=True,
            pack=4,
        )
    else:
        code = (q >> SHIFT) & ((1 << N_BITS) - 1)
        code |= ((above >> ABOVE_SHIFT) & ((1 << ABOVE_BITS) - 1)) << N_BITS
        return plus_1024(code) - (1024.0 + OFFSET)
