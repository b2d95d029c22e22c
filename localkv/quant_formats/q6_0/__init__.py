"""q6_0: 6-bit codes and a scale, `x = d (q - 32)` (ik_llama.cpp's `block_q6_0`, its type 133).

Bits 0 to 3 of the codes are in `qs`, bits 4 and 5 in `qh` (`bits.two_bit_codes`). ggml itself,
and so GGUF as others read it, has no such type of weights.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from localkv.quant_formats.shared.bits import (
    Bytes,
    Floats,
    bit_fields,
    half,
    half_bytes,
    ieee,
    less,
    pack_bits,
    pack_two_bits,
    scaled,
    two_bit_codes,
)
from localkv.quant_formats.shared.cpu.page_order import SCALES, TWO_BITS, codes
from localkv.quant_formats.shared.rounding import (
    F16_LIMIT,
    blocks,
    fitted_scale,
    largest_magnitude,
    scale_and_inverse,
    truncated,
)

LIMIT = 32 * F16_LIMIT
"""The largest value that a scale reaches."""


def decode(planes: Sequence[Bytes]) -> Floats:
    """d (fp16), qh (8 bytes), qs (16 bytes) -> float32 [..., n_blocks * 32]."""
    d, qh, qs = planes
    codes = bit_fields(qs, n_bits=4, run=16) | (two_bit_codes(qh) << 4)
    return scaled(less(codes, 32), half(d))


@ieee
def encode(x: Floats) -> tuple[Bytes, ...]:
    """float32 [..., n] -> d, qh, qs (ik_llama.cpp's `quantize_row_q6_0_ref`).

    Codes are chosen with the scale that makes the largest magnitude -32; then the scale becomes the
    one of the least squared error, each weighted with its value's square.
    """
    x = np.clip(blocks(x, 32), -LIMIT, LIMIT)
    d, inverse = scale_and_inverse(largest_magnitude(x), -32)
    y = x * inverse
    codes = truncated(y + 32.5, 0, 63).view(np.uint8)
    q = codes.astype(np.float32) - 32
    weights = y * y
    d = fitted_scale(weights * x * q, weights * q * q, d)
    return half_bytes(d), pack_two_bits(codes >> 4), pack_bits(codes & 15, n_bits=4, run=16)


# how the CPU lays it out; see `shared/cpu`
BLOCK = 32
SCALED = True
AFFINE = False
PLANES = (SCALES, TWO_BITS, codes(8))
OFFSET = 32
