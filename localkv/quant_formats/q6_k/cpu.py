"""q6_K: six bits less 32, and scales of 16 values each."""

from __future__ import annotations

from typing import Any

from localkv.quant_formats.q6_k import LAYOUT
from localkv.quant_formats.shared.cpu.panel_codes import PanelFormat, Record, masked
from localkv.simd.vector import f32, i32, lanes_of


def codes(record: Record, block: int) -> list[Any]:
    b = record.builder
    half, quarter = divmod(block, 4)
    out = []
    for i in range(8):
        low = record.words("ql", 8 * (quarter % 2) + i, half)
        high = record.words("qh", i, half)
        low = masked(b, low, quarter // 2 * 4, 0x0F)
        out.append(b.or_(low, masked(b, high, 2 * quarter - 4, 0x30)))
    return out


def scale(record: Record, block: int, half: int) -> Any:
    b = record.builder
    bits = b.sext(record.small("scales", 2 * block + half), lanes_of(i32))
    return b.fmul(record.halves("d"), b.sitofp(bits, lanes_of(f32)))


PANELS = PanelFormat(LAYOUT, codes, scale, zero=32, halves=True)
