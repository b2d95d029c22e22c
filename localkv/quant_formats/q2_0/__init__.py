"""q2_0: 2-bit codes and a scale, `x = d (2 q - 3)`, of `bits.two_bit_codes`.

Values are -3, -1, 1 and 3 times d, so 0 has no code: one side longer than the other, as in `q4_0`,
costs more at two bits. Codes are chosen with a scale of the largest magnitude / 4.5, which is about
the scale with the least squared error for Gaussian blocks. Then the scale becomes the one with the
least squared error for the codes. The error (NMSE) is 0.112 of Gaussian values and 0.078 of values
with outliers that have been rotated, where the rule of `q4_0` makes 0.131 and 0.110, and the
middles of four equal steps (exllamav3) 0.126 and 0.082. Outliers that aren't rotated are its
weakness: 0.50, not 0.10.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from localkv.quant_formats.shared.bits import (
    Bytes,
    Floats,
    half,
    half_bytes,
    ieee,
    less,
    pack_two_bits,
    scaled,
    two_bit_codes,
)
from localkv.quant_formats.shared.cpu.page_order import SCALES, TWO_BITS
from localkv.quant_formats.shared.rounding import (
    F16_LIMIT,
    blocks,
    fitted_scale,
    scale_and_inverse,
    truncated,
)

LIMIT = 3 * F16_LIMIT
"""The largest value that a scale reaches."""
REACH = 4.5
"""The largest magnitude as a multiple of the scale that codes are chosen with."""


def decode(planes: Sequence[Bytes]) -> Floats:
    """d (fp16), qs (8 bytes) -> float32 [..., n_blocks * 32]."""
    d, qs = planes
    return scaled(less(two_bit_codes(qs) << 1, 3), half(d))


@ieee
def encode(x: Floats) -> tuple[Bytes, ...]:
    """float32 [..., n] -> d, qs."""
    x = np.clip(blocks(x, 32), -LIMIT, LIMIT)
    d, inverse = scale_and_inverse(np.abs(x).max(-1, keepdims=True), REACH)
    codes = truncated(x * inverse * np.float32(0.5) + 2, 0, 3).view(np.uint8)
    q = 2 * codes.astype(np.float32) - 3
    return half_bytes(fitted_scale(x * q, q * q, d)), pack_two_bits(codes)


# how the CPU lays it out; see `shared/cpu`
BLOCK = 32
SCALED = True
AFFINE = False
PLANES = (SCALES, TWO_BITS)
OFFSET = 3
