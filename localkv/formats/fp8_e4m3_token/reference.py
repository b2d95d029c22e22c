"""fp8_e4m3_token: fp8_e4m3 with a scale per row, `x = d * value`."""

from __future__ import annotations

from collections.abc import Sequence

from localkv.formats.bits import Bytes, Floats
from localkv.formats.fp8_e4m3 import reference as fp8_e4m3
from localkv.formats.row_scale import scale_row, times_row_scale


def decode(planes: Sequence[Bytes]) -> Floats:
    """values (uint8 [..., n, 1]), d (fp16, [..., 1, 2]) -> float32 [..., n]."""
    values, d = planes
    return times_row_scale(fp8_e4m3.decode([values]), d)


def encode(x: Floats) -> tuple[Bytes, ...]:
    """float32 [..., n] -> values, d: scaled rows, rounded to nearest even (see `row_scale`)."""
    d, scaled = scale_row(x, fp8_e4m3.LARGEST)
    return (*fp8_e4m3.encode(scaled), d)
