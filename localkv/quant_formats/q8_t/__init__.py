"""q8_t: signed bytes with a scale for each token and KV head, `x = d q`.

The scale is the largest magnitude / 127, rounded up to fp16 (`shared/rounding.py`), as in vLLM's
int8_per_token_head.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from localkv.quant_formats.shared.bits import Bytes, Floats, ieee
from localkv.quant_formats.shared.cpu.page_order import SCALES, codes
from localkv.quant_formats.shared.rounding import blocks, rounded, scale_row, times_row_scale

LARGEST = 127.0


def decode(planes: Sequence[Bytes]) -> Floats:
    """qs (32 int8), d (fp16, [..., 1, 2]) -> float32 [..., n_blocks * 32]."""
    qs, d = planes
    values = qs.view(np.int8).astype(np.float32)
    return times_row_scale(values.reshape(*qs.shape[:-2], 32 * qs.shape[-2]), d)


@ieee
def encode(x: Floats) -> tuple[Bytes, ...]:
    """float32 [..., n] -> qs, d; halves are rounded away from zero."""
    d, scaled = scale_row(x, LARGEST)
    return rounded(blocks(scaled, 32), 127).view(np.uint8), d


# how the CPU lays it out; see `shared/cpu`
BLOCK = 32
SCALED = False
AFFINE = False
PLANES = (codes(8, rows=2, unit_items=2), SCALES)
OFFSET = 128
