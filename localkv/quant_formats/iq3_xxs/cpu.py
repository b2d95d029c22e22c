"""iq3_xxs: points of four with signs; a scale is in the word of the signs."""

from __future__ import annotations

from typing import Any

from localkv.quant_formats.iq3_xxs import LAYOUT
from localkv.quant_formats.shared.cpu.grid_codes import (
    GridCodes,
    even_signs,
    grid_codes,
    grid_panels,
    odd_scale,
)
from localkv.quant_formats.shared.cpu.panel_codes import Record
from localkv.quant_formats.shared.grids import IQ3_XXS
from localkv.simd.vector import constant, i32

KIND = GridCodes(IQ3_XXS, zero=62)


def codes(record: Record, block: int) -> list[Any]:
    b = record.builder
    signs = even_signs(b, record.words("signs", block), (0, 7, 14, 21))
    return grid_codes(b, KIND, [record.words("qs", 2 * block + i) for i in range(2)], [], signs)


def scale(record: Record, block: int, half: int) -> Any:
    b = record.builder
    bits = b.lshr(record.words("signs", block), constant(i32, 28))
    return odd_scale(b, record.halves("d"), bits, 1 / 4)


PANELS = grid_panels(LAYOUT, codes, scale, KIND)
