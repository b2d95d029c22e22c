"""Checks of the CPU's products, and what they are compared with."""

from __future__ import annotations

import itertools

import numpy as np
import torch

from localkv.kernels.cpu.linear.jobs import LAYOUTS, ROUNDED_ROWS
from localkv.kernels.reference.torch_arrays import decoded
from localkv.quant_formats.packed_tensor import PackedTensor
from localkv.quant_formats.shared.cpu.panel_layout import (
    FLIP_SIGNS,
    LANES,
    SPREAD_BITS,
    PanelLayout,
)
from localkv.simd.cpu_features import HAS_BYTE_DOTS
from support.cpu_ops import TensorProducts

EXACT = 1e-6
TORCH = 2e-6
"""Rows of floats, whose sums are of float32 throughout."""
BFLOAT = 2.0**-8
"""Rounding to BF16 changes an activation by half of this at most, 1.7e-3 in the mean."""


def eight_bits(x: torch.Tensor) -> torch.Tensor:
    """Activations as the kernels round them: 8 bits, a float32 scale for 32 columns."""
    blocks = x.float().unflatten(-1, (-1, 32))
    top = blocks.abs().amax(-1, keepdim=True)
    inverse = torch.full_like(top, 127.0) / top  # torch's 127 / top is a product, rounded twice
    codes = (blocks * torch.where(top == 0, 0, inverse)).round()
    return (codes.double() * (top / 127).double()).flatten(-2)


def as_read(x: torch.Tensor, name: str) -> torch.Tensor:
    """Activations as kernels for a format round them."""
    if name in ROUNDED_ROWS:
        return x.bfloat16().double()
    return eight_bits(x) if HAS_BYTE_DOTS and name in LAYOUTS else x.double()


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


def product_error(got: torch.Tensor, x: torch.Tensor, matrix: torch.Tensor) -> float:
    """Error of got = x @ matrix.T, relative to what its elements are without cancellation."""
    size = torch.outer(x.norm(dim=-1), matrix.norm(dim=-1)) / x.shape[-1] ** 0.5
    return float((got.double() - x @ matrix.T).norm() / size.norm())


def check(products: TensorProducts, x: torch.Tensor, weight: PackedTensor) -> torch.Tensor:
    """The product is right; returned."""
    in_8_bits = HAS_BYTE_DOTS and weight.format.name in LAYOUTS
    got = products.matmul(x, products.prepare(weight))
    assert got.dtype == torch.float32
    assert got.shape == (x.shape[0], weight.shape[0])
    matrix = decoded(weight, torch.float64)
    rounded = x.half().double() if weight.halves_activations else as_read(x, weight.format.name)
    limit = EXACT if weight.format.name in LAYOUTS else TORCH
    assert product_error(got, rounded, matrix) < limit
    if in_8_bits:
        assert product_error(got, x.double(), matrix) < 2e-2
    elif weight.format.name in ROUNDED_ROWS:
        assert product_error(got, x.double(), matrix) < BFLOAT
    return got


def plain_panels(weight: PackedTensor, layout: PanelLayout) -> np.ndarray:
    """What `shared/cpu/panel_layout.py` says of a matrix's panels, one unit at a time."""
    n_out, n_in = weight.shape
    blocks = weight.rows.reshape(n_out, -1, layout.format.block_bytes)
    out = np.zeros((-(-n_out // LANES), layout.n_records(n_in), layout.record_bytes), np.uint8)
    for (row, block), (start, n_units, unit, goal, change) in itertools.product(
        np.ndindex(blocks.shape[:2]), layout.table
    ):
        record, in_record = divmod(block, layout.record_blocks)
        units = blocks[row, block, start : start + n_units * unit].copy().reshape(n_units, unit)
        if change == FLIP_SIGNS:
            units ^= 128
        elif change == SPREAD_BITS:
            bits = np.unpackbits(units, axis=1, bitorder="little").reshape(n_units, 8, 4)
            units = np.packbits(bits.swapaxes(1, 2), axis=2, bitorder="little")[..., 0]
        plane = out[row // LANES, record, goal + in_record * n_units * unit * LANES :]
        plane[: n_units * unit * LANES].reshape(n_units, LANES, unit)[:, row % LANES] = units
    return out
