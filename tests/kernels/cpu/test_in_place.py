"""Products with matrices that stay in the file, against those with panels of them."""

from __future__ import annotations

import ctypes
import mmap
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numba import njit

from localkv.kernels.cpu.linear.jobs import IN_PLACE_FORMATS, LAYOUTS
from localkv.kernels.cpu.linear.matrices import InPlaceTensor
from localkv.kernels.cpu.linear.panels import make_panel
from localkv.kernels.layer_weights import Linear
from localkv.simd.memory import address
from support.cpu_ops import TensorProducts
from support.cpu_products import check, plain_panels
from support.random_packed import random_packed

in_place = pytest.mark.skipif(not IN_PLACE_FORMATS, reason="this CPU multiplies panels")


@njit
def made_panel(rows: Any, row_bytes: int, n_rows: int, out: Any) -> None:
    make_panel(address(rows), row_bytes, n_rows, address(out))


@pytest.mark.parametrize("n_out", [5, 16])
@pytest.mark.parametrize("n_blocks", [1, 2, 5])
def test_panels_that_are_made_to_be_multiplied(n_out: int, n_blocks: int) -> None:
    weight, layout = random_packed("q8_0", n_out, 32 * n_blocks), LAYOUTS["q8_0"]
    want = plain_panels(weight, layout)
    got = np.full(want.size, 77, np.uint8)
    made_panel(weight.rows.ravel(), weight.rows.shape[1], n_out, got)
    assert np.array_equal(got.reshape(want.shape), want)


@in_place
@pytest.mark.parametrize("n_out", [1, 16, 53])
@pytest.mark.parametrize("n_blocks", [1, 15, 16, 17, 50, 64])
def test_rows_that_stay_in_the_file(n_out: int, n_blocks: int) -> None:
    """One token's product with rows is that with panels, bit for bit, and not a copy is made."""
    weight = random_packed("q8_0", n_out, 32 * n_blocks)
    products = TensorProducts()
    prepared = products.prepare(weight)
    assert isinstance(prepared, InPlaceTensor)
    assert prepared.reads_rows
    assert prepared.rows is weight.rows
    x, bias = torch.randn(10, 32 * n_blocks), torch.randn(n_out)
    want = check(products, x, weight)  # panels are made of rows
    for token in range(10):
        got = products.linear(x[token : token + 1], Linear(prepared, bias))
        assert torch.equal(got[0], want[token] + bias)


@in_place
@pytest.mark.parametrize("n_blocks", [3, 18, 32])
@pytest.mark.skipif(sys.platform != "linux", reason="mprotect")
def test_nothing_is_read_beyond_the_file(n_blocks: int) -> None:
    """A matrix ends, unaligned, where memory that can't be read begins."""
    weight = random_packed("q8_0", 37, 32 * n_blocks)
    n_bytes = weight.rows.nbytes
    size = -(-n_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, size + mmap.PAGESIZE)
    mapped = np.frombuffer(memory, np.uint8)
    libc = ctypes.CDLL(None)
    beyond = ctypes.c_void_p(mapped.ctypes.data + size)
    assert libc.mprotect(beyond, ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    rows = mapped[size - n_bytes : size].reshape(weight.rows.shape)
    rows[:] = weight.rows
    products, x = TensorProducts(), torch.randn(9, 32 * n_blocks)
    there = products.prepare(replace(weight, rows=rows))
    want = check(products, x, weight)
    assert torch.equal(products.matmul(x, there), want)
    assert torch.equal(products.matmul(x[:1], there), want[:1])


@in_place
def test_a_stack_that_stays_in_the_file() -> None:
    products = TensorProducts()
    stack = random_packed("q8_0", 3, 21, 96)
    prepared = products.prepare(stack)
    x = torch.randn(2, 96)
    for expert in range(3):
        assert isinstance(prepared[expert], InPlaceTensor)
        want = check(products, x, stack[expert])
        assert torch.equal(products.matmul(x[:1], prepared[expert]), want[:1])
    assert not isinstance(prepared[:2], InPlaceTensor)


def test_rows_that_do_not_follow_each_other() -> None:
    products, weight = TensorProducts(), random_packed("q8_0", 40, 96)
    apart = replace(weight, rows=weight.rows[::2], shape=(20, 96))
    check(products, torch.randn(3, 96), apart)
    check(products, torch.randn(1, 96), apart)
