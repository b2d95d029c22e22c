"""Queries as 24-bit integers, which the CPU's attention multiplies integer codes with."""

from __future__ import annotations

import math
from ctypes import CFUNCTYPE, c_int64
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from numba import njit
from numpy.typing import NDArray

from localkv.cache.layout import SegmentSpec
from localkv.formats import KV_FORMATS
from localkv.kernels.cpu.attention.kernels import cache_decoder, score_kernel
from localkv.kernels.cpu.attention.queries import (
    ERROR_BOUND,
    LARGEST_INTEGER,
    SMALLEST,
    split_queries,
)
from localkv.kernels.reference.torch_codec import decode, encode
from localkv.simd.memory import address
from localkv.simd.quads import SCALE, STARTS
from support.cpu_ops import store_kv_cpu
from support.quick import quick
from support.torch_edge import torch_cache

Floats = NDArray[np.float32]
INTEGER_TYPES = [n for n, fmt in KV_FORMATS.items() if hasattr(fmt.part("cpu"), "OFFSET")]


@njit
def split(q: Any, offset: int) -> None:
    split_queries(address(q), q.size // 32, offset)


def integers_of(q: Floats, offset: int = 0) -> tuple[NDArray[np.int64], NDArray[np.int32], Floats]:
    """The integers of float32 [n, 32], what their sums start with, and their scales."""
    blocks = q.copy()
    split(blocks, offset)
    high, middle, low = np.moveaxis(blocks.view(np.int8)[:, : STARTS * 4].reshape(-1, 3, 32), 1, 0)
    integers = high.astype(np.int64) << 16
    integers += middle.astype(np.int64) << 8
    return integers + low, blocks.view(np.int32)[:, STARTS:SCALE], blocks[:, SCALE].copy()


def magnitudes() -> Floats:
    """Blocks from the smallest that keep all bits to the largest; some have an outlier."""
    generator = np.random.default_rng(0)
    q = generator.standard_normal((400, 32)) * np.geomspace(1e-29, 1e37, 400)[:, None]
    q[::3, 7] *= 30
    q[1] = np.copysign(1e-25, q[1])
    q[2] = -1
    return np.clip(q, -3e38, 3e38).astype(np.float32)


def test_as_exact_as_floats() -> None:
    q = magnitudes()
    integers, _, scales = integers_of(q)
    largest = np.abs(q).max(1).astype(np.float64)
    np.testing.assert_allclose(scales, largest / LARGEST_INTEGER, rtol=1e-6)
    errors = (integers * scales[:, None].astype(np.float64) - q) / largest[:, None]
    assert np.abs(errors).max() < min(ERROR_BOUND, 2**-22.5)
    assert np.sqrt((errors**2).mean()) < 2**-24.5


def test_no_integer_is_off_by_more_than_derived() -> None:
    """Values that are near halves of integers, where rounding is worst."""
    generator = np.random.default_rng(1)
    q = generator.uniform(0.5, 1, (2000, 32)) * np.float64(2.0) ** generator.integers(-9, 9)
    q[:, 0] = np.abs(q).max(1)
    halves = np.floor(q / q[:, :1] * float(LARGEST_INTEGER)) + 0.5
    q[:, 1:] = (halves * q[:, :1] / float(LARGEST_INTEGER))[:, 1:]
    q = q.astype(np.float32)
    integers, _, scales = integers_of(q)
    assert np.abs(integers).max() <= LARGEST_INTEGER
    errors = np.abs(integers * scales[:, None].astype(np.float64) - q)
    errors /= np.abs(q).max(1, keepdims=True).astype(np.float64)
    assert 0.6 * ERROR_BOUND < errors.max() < ERROR_BOUND


@pytest.mark.parametrize("offset", [0, 8, 16, 128])
def test_sums_start_with_what_is_too_much(offset: int) -> None:
    """Exactly, in two parts: that of the two higher digits, and that of the lowest."""
    integers, starts, _ = integers_of(magnitudes(), offset)
    low = (integers + 128 & 255) - 128
    high = integers - low >> 8
    np.testing.assert_array_equal(starts, -offset * np.stack([high.sum(1), low.sum(1)], 1))


def test_blocks_without_a_scale() -> None:
    q = np.random.default_rng(0).standard_normal((6, 32)).astype(np.float32)
    q[0] = 0
    q[1] *= 1e-40
    q[2, 3], q[3, 31], q[4, 16] = np.nan, np.inf, -np.inf
    integers, _, scales = integers_of(q)
    assert not integers[0].any()
    np.testing.assert_allclose(integers[1] * scales[1], q[1], atol=float(SMALLEST) * 2**-23)
    assert np.isnan(scales[2:5]).all()
    assert np.isfinite(scales[[0, 1, 5]]).all()


def logits_of(q: Floats, type_k: str, planes: list[torch.Tensor], n_tokens: int) -> Floats:
    """float32 [rows, 256], of one page and KV head, from K's kernel for so many rows."""
    rows, head_dim = q.shape
    queries = q.copy()
    sums = q.reshape(rows, -1, 32).sum(2)
    decoder = cache_decoder(type_k)
    if decoder.digits:
        split(queries.reshape(-1, 32), decoder.offset)
    logits = np.zeros((rows, 256), np.float32)
    addresses = [plane.data_ptr() for plane in planes] + [0] * (4 - len(planes))
    kernel = CFUNCTYPE(None, *[c_int64] * 12)(score_kernel(type_k, rows))
    arrays = (logits.ctypes.data, queries.ctypes.data, sums.ctypes.data)
    kernel(*arrays, *addresses, head_dim // 32, n_tokens, 1, logits.ctypes.data, 0)
    return logits


ROWS = (1, 2, 4, 5, 6, 8)


@pytest.mark.parametrize(
    ("rows", "type_k"),
    quick(product(ROWS, INTEGER_TYPES), {*product((5,), INTEGER_TYPES), *product(ROWS, ("q8_0",))}),
)
def test_logits(type_k: str, rows: int) -> None:
    """As exact as sums of floats; a row that isn't finite has no finite logits, nor has zero any
    but zeros, and other rows don't notice."""
    n_tokens, head_dim = 39, 96
    cache = torch_cache(
        n_layers=1,
        n_kv_heads=1,
        head_dim=head_dim,
        segments=[SegmentSpec(type_k, "f32")],
        n_ctx=256,
    )
    layer, sequence = cache.layers[0], cache.new_sequence()
    planes = layer.segments[0].k
    for plane in planes:
        plane.fill_(0xFF)
    generator = torch.Generator().manual_seed(rows)
    keys = torch.randn(n_tokens, 1, head_dim, generator=generator)
    store_kv_cpu(keys, keys, layer, cache.batch([(sequence, [0] * n_tokens)]).segments)
    fmt = KV_FORMATS[type_k]
    keys = decode(fmt, encode(fmt, keys)).double()[:, 0]
    q = torch.randn(rows, head_dim, generator=generator)
    page = sequence.pages[0][0]
    regions = [plane[page, 0] for plane in planes]
    for value in (1.0, 0.0, math.nan, math.inf, -math.inf):
        if value == 1.0:
            wanted = range(rows)
        elif value == 0.0:
            q[rows // 2] = 0
        else:
            q[rows // 2, 70] = value
            wanted = [row for row in range(rows) if row != rows // 2]
        got = logits_of(q.numpy(), type_k, regions, n_tokens)[:, :n_tokens]
        bound = 2**-21 * (q.abs().double() @ keys.abs().T).numpy()
        error = np.abs(got - (q.double() @ keys.T).numpy())
        assert (error[wanted] <= bound[wanted]).all()
        if not math.isfinite(value):
            assert not np.isfinite(got[rows // 2]).any()
