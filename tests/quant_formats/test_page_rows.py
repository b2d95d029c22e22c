"""Rows out of the CPU's pages, and back into them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from localkv.cache.arrays import row_fields
from localkv.quant_formats import KV_FORMATS
from localkv.quant_formats.shared.cpu.page_order import pages_of_rows, rows_of_pages
from support.cpu_pages import pool_planes


@pytest.mark.parametrize("side", ["k", "v"])
@pytest.mark.parametrize("name", KV_FORMATS)
def test_rows_are_in_the_pools_order(name: str, side: str) -> None:
    """Another description of the order has them so, for any bytes; and the way back."""
    fmt, rng = KV_FORMATS[name], np.random.default_rng(1)
    planes = [
        rng.integers(0, 256, (2, 2, 256, *field), dtype=np.uint8) for field in row_fields(fmt, 128)
    ]
    expected = pool_planes(fmt, side, [torch.from_numpy(plane) for plane in planes])
    for order, pages, rows in zip(fmt.cpu_layout.PLANES, planes, expected, strict=True):
        found = rows_of_pages(getattr(order, side), pages)
        assert (found == rows.numpy()).all()
        assert (pages_of_rows(getattr(order, side), found) == pages).all()
