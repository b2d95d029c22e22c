"""tq2_0: ternary in 2 bits each, 256 with one scale, `x = d (q - 1)` (ggml's `block_tq2_0`)."""

from __future__ import annotations

from collections.abc import Sequence

from localkv.quant_formats.shared.bits import Bytes, Floats, bit_fields, half, less, scaled
from localkv.quant_formats.shared.cpu.panel_layout import QS, D, planes


def decode(planes: Sequence[Bytes]) -> Floats:
    """qs (64 bytes), d (fp16) -> float32 [..., n_blocks * 256]."""
    qs, d = planes
    return scaled(less(bit_fields(qs, n_bits=2, run=32), 1), half(d))


# how the CPU lays it out; see `shared/cpu`
LAYOUT = planes("tq2_0", QS, D)
