"""Grids and patterns of signs are gguf-py's, and ggml's."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from gguf import quants

from localkv.quant_formats import FORMATS
from localkv.quant_formats import i_quants as grids
from localkv.quant_formats.i_quants import Grid, even_signs, signed_points

GRIDS = {
    quants.IQ2_XXS: grids.IQ2_XXS,
    quants.IQ2_XS: grids.IQ2_XS,
    quants.IQ2_S: grids.IQ2_S,
    quants.IQ3_XXS: grids.IQ3_XXS,
    quants.IQ3_S: grids.IQ3_S,
    quants.IQ1_S: grids.IQ1,
    quants.IQ1_M: grids.IQ1,
}


@pytest.mark.parametrize(("quant", "grid"), GRIDS.items(), ids=lambda x: getattr(x, "__name__", ""))
def test_grids_are_ggufs(quant: type, grid: Grid) -> None:
    quant.init_grid()
    assert grid.points.dtype == np.int8
    assert np.array_equal(grid.points, quant.grid[0, 0])
    assert np.array_equal(np.array(grid.levels)[grid.codes], grid.points)


def test_signs_are_ggufs() -> None:
    codes = np.arange(128, dtype=np.uint8)
    assert even_signs(codes).tobytes() == quants.IQ2_XXS.ksigns
    assert np.array_equal(codes, np.arange(128)), "input is left alone"


def test_signs_are_those_of_bits_from_the_lowest() -> None:
    points = signed_points(grids.IQ2_XXS, np.array([[0]]), np.array([[0b10000001]], np.uint8))
    assert points.tolist() == [[-8, 8, 8, 8, 8, 8, 8, -8]]


def test_all_that_gguf_decodes_is_there() -> None:
    known = {fmt.ggml_type for fmt in FORMATS.values()}
    assert known >= {int(kind) for kind in quants._type_traits}
    assert known >= {int(gguf.GGMLQuantizationType.F32), int(gguf.GGMLQuantizationType.F16)}
