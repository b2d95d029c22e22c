"""Queries as 24-bit integers, which the CPU's attention multiplies integer codes with."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from numba import njit
from numpy.typing import NDArray

from localkv.cache_layout import SegmentSpec
from localkv.config import AttentionParams
from localkv.kernels.cpu.attention import PackedAttention
from localkv.kernels.cpu.attention_queries import LARGEST_INTEGER, SMALLEST, split_queries
from localkv.kernels.cpu.store_kv import store_kv_cpu
from localkv.kv_cache import KVCache
from localkv.simd.memory import address
from localkv.simd.quads import SCALE, STARTS

Floats = NDArray[np.float32]
INTEGER_TYPES = ["q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl"]


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
    assert np.abs(errors).max() < 2**-22.5
    assert np.sqrt((errors**2).mean()) < 2**-24.5


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


@pytest.mark.parametrize("type_k", INTEGER_TYPES)
def test_queries_that_are_no_numbers_or_zero(type_k: str) -> None:
    """They have NaN for an answer, and zero the mean; other heads don't notice."""
    cache = KVCache(
        n_layers=1, n_kv_heads=1, head_dim=64, segments=[SegmentSpec(type_k, "f32")], n_ctx=512
    )
    layer, sequence = cache.layers[0], cache.new_sequence()
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(300, 1, 64, generator=generator)
    store_kv_cpu(rows, rows, layer, cache.batch([(sequence, [0] * 300)]).segments)
    sequence.length = 299
    batch = cache.batch([(sequence, [0])])

    def run(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        args = layer.segments[0], batch.segments[0], batch
        return PackedAttention()(q, *args, AttentionParams(1.0))

    q = torch.randn(1, 5, 64, generator=generator)
    want, want_lse = run(q)
    assert want.isfinite().all()
    q[0, 1, 40], q[0, 2, 0], q[0, 3] = math.nan, math.inf, 0
    got, got_lse = run(q)
    assert got[0, 1:3].isnan().all()
    torch.testing.assert_close(got[0, 3], rows.mean((0, 1)), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got_lse[0, 3], torch.tensor(300.0).log())
    for head in (0, 4):
        assert torch.equal(got[0, head], want[0, head])
        assert torch.equal(got_lse[0, head], want_lse[0, head])
