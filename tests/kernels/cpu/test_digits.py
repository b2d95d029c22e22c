"""Queries and weights as 16-bit integers: what the CPU's attention multiplies codes with."""

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
from localkv.kernels.cpu.attention.kernels import cache_decoder, score_kernel, weigh_kernel
from localkv.kernels.cpu.attention.queries import (
    ERROR_BOUND,
    LARGEST_INTEGER,
    SCALE,
    SMALLEST,
    START,
    split_queries,
)
from localkv.kernels.cpu.attention.readers import ERROR_BOUND as WEIGHT_ERROR_BOUND
from localkv.kernels.reference.torch_arrays import decode, encode
from localkv.quant_formats import TOKEN_FORMATS
from localkv.quant_formats.shared.codebooks import NORMAL, table_of
from localkv.simd.memory import address
from localkv.simd.quads import BLOCK_DIGITS, DIGITS
from support.cpu_ops import store_kv_cpu
from support.quick import in_turn, quick
from support.torch_edge import torch_cache

Floats = NDArray[np.float32]
Planes = list[torch.Tensor]
BOOKS = {n: table_of(numbers) for n, numbers in NORMAL.items()}
EVERY_ROWS = ("q8_0", "q4_1", "nuq3")  # of the types that are like them, not six and more
INTEGER_TYPES = [n for n, fmt in TOKEN_FORMATS.items() if hasattr(fmt.cpu_layout, "OFFSET")]


@njit
def split(q: Any, offset: int) -> None:
    split_queries(address(q), q.size // 32, offset)


def joined(digits: NDArray[np.int8]) -> NDArray[np.int64]:
    """The integers of int8 [n, 2, items], the higher digits first."""
    return 256 * digits[:, 0].astype(np.int64) + digits[:, 1]


def integers_of(q: Floats, offset: int = 0) -> tuple[NDArray[np.int64], NDArray[np.int32], Floats]:
    """The integers of float32 [n, 32], what their sums start with, and their scales."""
    blocks = q.copy()
    split(blocks, offset)
    digits = blocks.view(np.int8)[:, : 4 * DIGITS * BLOCK_DIGITS].reshape(-1, DIGITS, 32)
    return joined(digits), blocks.view(np.int32)[:, START], blocks[:, SCALE].copy()


def magnitudes() -> Floats:
    """Blocks from the smallest that keep all bits to the largest; some have an outlier."""
    generator = np.random.default_rng(0)
    q = generator.standard_normal((400, 32)) * np.geomspace(1e-29, 1e37, 400)[:, None]
    q[::3, 7] *= 30
    q[1] = np.copysign(1e-25, q[1])
    q[2] = -1
    return np.clip(q, -3e38, 3e38).astype(np.float32)


def test_as_exact_as_16_bits() -> None:
    q = magnitudes()
    integers, _, scales = integers_of(q)
    largest = np.abs(q).max(1).astype(np.float64)
    np.testing.assert_allclose(scales, largest / LARGEST_INTEGER, rtol=1e-6)
    errors = (integers * scales[:, None].astype(np.float64) - q) / largest[:, None]
    assert np.abs(errors).max() < min(ERROR_BOUND, 2**-15.9)
    assert np.sqrt((errors**2).mean()) < 2**-16.7


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
    assert 0.95 * ERROR_BOUND < errors.max() < ERROR_BOUND


@pytest.mark.parametrize("offset", [0, 8, 16, 128])
def test_sums_start_with_what_is_too_much(offset: int) -> None:
    integers, starts, _ = integers_of(magnitudes(), offset)
    np.testing.assert_array_equal(starts, -offset * integers.sum(1))


def test_blocks_without_a_scale() -> None:
    q = np.random.default_rng(0).standard_normal((6, 32)).astype(np.float32)
    q[0] = 0
    q[1] *= 1e-40
    q[2, 3], q[3, 31], q[4, 16] = np.nan, np.inf, -np.inf
    integers, _, scales = integers_of(q)
    assert not integers[0].any()
    np.testing.assert_allclose(integers[1] * scales[1], q[1], atol=float(SMALLEST) * 2**-15)
    assert np.isnan(scales[2:5]).all()
    assert np.isfinite(scales[[0, 1, 5]]).all()


def addresses_of(name: str, planes: Planes) -> list[int]:
    """Planes of a page, four of them, and the codebook of types with one."""
    n = TOKEN_FORMATS[name].n_centroids
    book = BOOKS[n].ctypes.data if n else 0
    return [*(plane.data_ptr() for plane in planes), *[0] * (4 - len(planes)), book]


def logits_of(q: Floats, type_k: str, planes: list[torch.Tensor], n_tokens: int) -> Floats:
    """float32 [rows, 256], of one page and KV head, from K's kernel for that many rows."""
    rows, head_dim = q.shape
    queries = q.copy()
    sums = q.reshape(rows, -1, 32).sum(2)
    decoder = cache_decoder(type_k)
    if decoder.outliers:
        sums = q.copy()
    if decoder.digits:
        split(queries.reshape(-1, 32), decoder.offset)
    logits = np.zeros((rows, 256), np.float32)
    addresses = addresses_of(type_k, planes)
    kernel = CFUNCTYPE(None, *[c_int64] * 15)(score_kernel(type_k, rows))
    arrays = (logits.ctypes.data, queries.ctypes.data, sums.ctypes.data)
    kernel(*arrays, *addresses, head_dim // 32, n_tokens, 1, *[0] * 4)
    return logits


def page_of(rows: torch.Tensor, type_k: str, type_v: str) -> tuple[Planes, Planes]:
    """K and V of one page and KV head with float rows [tokens, head_dim]; the rest is NaN."""
    specs = [SegmentSpec(type_k, type_v)]
    cache = torch_cache(n_layers=1, n_kv_heads=1, head_dim=rows.shape[1], segments=specs, n_ctx=256)
    layer, sequence = cache.layers[0], cache.new_sequence()
    segment = layer.segments[0]
    for plane in (*segment.k, *segment.v):
        plane.fill_(0xFF)
    batch = cache.batch([(sequence, [0] * len(rows))])
    store_kv_cpu(rows[:, None], rows[:, None], layer, batch.segments)
    page = sequence.pages[0][0]
    return [plane[page, 0] for plane in segment.k], [plane[page, 0] for plane in segment.v]


def rounded(name: str, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """float64: the rows as a type keeps them, what is left of them without what kernels add for all
    codes of a block, and its scale.

    Kernels add minima. With digits, which meet codes that are OFFSET less, they add OFFSET scales.
    """
    fmt = TOKEN_FORMATS[name]
    packed = encode(fmt, rows)
    n_blocks = rows.shape[-1] // fmt.block_size
    halves = packed[-len(fmt.row_planes) :] if fmt.row_planes else packed[:2]
    halves = [plane.view(torch.float16).double().expand(-1, n_blocks, -1) for plane in halves]
    scales, minima = halves[0], halves[-1]
    values = decode(fmt, packed).double()
    left = values
    decoder = cache_decoder(name)
    if decoder.affine:
        shifts = minima + (decoder.offset * scales if decoder.digits else 0)
        left = values - shifts.flatten(-2).repeat_interleave(32, -1)
    return values, left, scales.flatten(-2)


ROWS = (1, 2, 4, 5, 6, 7, 8)
CASES = quick(
    [(rows, name) for rows, name in product(ROWS, INTEGER_TYPES) if rows < 6 or name in EVERY_ROWS],
    {*product((5,), EVERY_ROWS), *product(ROWS, ("q8_0",))},
    {*product(ROWS, EVERY_ROWS), *in_turn((5, 1, 4, 2), INTEGER_TYPES)},
)


@pytest.mark.parametrize(("rows", "type_k"), CASES)
def test_logits(type_k: str, rows: int) -> None:
    """Off by no more than queries may be, times keys; a row that isn't finite has no finite logits,
    nor has zero any but zeros, and other rows don't notice."""
    n_tokens, head_dim = 39, 96
    generator = torch.Generator().manual_seed(rows)
    keys = torch.randn(n_tokens, head_dim, generator=generator)
    regions, _ = page_of(keys, type_k, "f32")
    keys, left, _ = rounded(type_k, keys)
    q = torch.randn(rows, head_dim, generator=generator)
    for value in (1.0, 0.0, math.nan, math.inf, -math.inf):
        if value == 1.0:
            wanted = range(rows)
        elif value == 0.0:
            q[rows // 2] = 0
        else:
            q[rows // 2, 70] = value
            wanted = [row for row in range(rows) if row != rows // 2]
        got = logits_of(q.numpy(), type_k, regions, n_tokens)[:, :n_tokens]
        bound = 2**-21 * (q.abs().double() @ keys.abs().T)
        if cache_decoder(type_k).digits:
            largest = q.abs().unflatten(1, (-1, 32)).amax(2).double().repeat_interleave(32, 1)
            bound += ERROR_BOUND * largest @ left.abs().T
        with np.errstate(invalid="ignore"):
            error = np.abs(got - (q.double() @ keys.T).numpy())
        assert (error[wanted] <= bound.numpy()[wanted]).all()
        if not math.isfinite(value):
            assert not np.isfinite(got[rows // 2]).any()


@pytest.mark.parametrize(("rows", "type_v"), CASES)
def test_weighed(type_v: str, rows: int) -> None:
    """Off by no more than weights may be, times codes, whatever lies behind the last token; what a
    value that is NaN makes of its block stays there."""
    n_tokens, head_dim = 39, 96
    generator = torch.Generator().manual_seed(rows)
    values = torch.randn(n_tokens, head_dim, generator=generator)
    weights = torch.full((rows, 256), torch.nan)
    weights[:, :64] = 0
    weights[:, :n_tokens] = torch.randn(rows, n_tokens, generator=generator).mul(5).exp2()
    weights[rows // 2, :n_tokens] = 0
    p = weights[:, :n_tokens].double()
    for damaged in (False, True):
        if damaged:
            values[7, 40] = torch.nan
        _, regions = page_of(values, "f32", type_v)
        want, left, scales = rounded(type_v, values)
        out, scratch = torch.ones(rows, head_dim), torch.empty(max(rows + 1, 5), 256)
        addresses = [x.data_ptr() for x in (out, weights, scratch)]
        addresses += addresses_of(type_v, regions)
        kernel = CFUNCTYPE(None, *[c_int64] * 15)(weigh_kernel(type_v, rows))
        kernel(*addresses, head_dim // 32, n_tokens, 1, *[0] * 4)
        # minima and codes are summed apart, and may be much larger than the values that they make
        bound = 2**-21 * (1 + p @ (left.abs() + (want - left).abs()))
        if cache_decoder(type_v).digits:
            scales = scales.abs().repeat_interleave(32, 1)
            largest = (p[:, :, None] * scales.nan_to_num()).amax((1, 2))[:, None]
            bound += WEIGHT_ERROR_BOUND * largest * (left.abs() / scales).sum(0)
        sound = want.isfinite().all(0)
        lost = head_dim if TOKEN_FORMATS[type_v].row_planes else 32
        assert (sound.sum() == head_dim - lost) if damaged else sound.all()
        error = (out - 1 - p @ want).abs()
        assert (error[:, sound] <= bound[:, sound]).all()
        assert not out[:, ~sound].isfinite().any()
