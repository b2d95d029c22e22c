"""q4_t: 4-bit codes with a scale and a minimum for each token and KV head, `x = d q + m`.

Rounding is as in `q4_1`, with a row for a block. LMDeploy's int4 cache and vLLM's
int4_per_token_head do so, but their zero point m / d is rounded to a code.
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
    pack_bits,
)
from localkv.quant_formats.shared.cpu.page_order import SCALES, codes
from localkv.quant_formats.shared.rounding import affine_codes


@ieee
def decode(planes: Sequence[Bytes]) -> Floats:
    """qs (16 bytes), d, m (fp16, [..., 1, 2]) -> float32 [..., n_blocks * 32]."""
    qs, d, m = planes
    codes = bit_fields(qs, n_bits=4, run=16).reshape(*qs.shape[:-2], 32 * qs.shape[-2])
    return codes.astype(np.float32) * half(d)[..., 0] + half(m)[..., 0]


def encode(x: Floats) -> tuple[Bytes, ...]:
    """float32 [..., n] -> qs, d, m."""
    d, m, codes = affine_codes(x[..., None, :], n_bits=4)
    in_blocks = codes.reshape(*x.shape[:-1], x.shape[-1] // 32, 32)
    return pack_bits(in_blocks, n_bits=4, run=16), half_bytes(d), half_bytes(m)


# how the CPU lays it out; see `shared/cpu`
BLOCK = 32
SCALED = False
AFFINE = True
PLANES = (codes(8), SCALES, SCALES)
OFFSET = 8
