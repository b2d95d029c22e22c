"""What adapters add to products on a CPU: values in float64, and bits that others don't change."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from localkv.errors import LocalKVError
from localkv.kernels.bounds import BoundsError
from localkv.kernels.cpu.linear.products import CpuProducts
from localkv.kernels.layer_weights import Linear
from localkv.kernels.low_rank import MOST_ROWS, Adapters, LowRank, TokenScales
from localkv.quant_formats import FORMATS
from localkv.quant_formats.packed_tensor import PackedTensor
from localkv.system.threads import use_threads

RANKS = (16, 5, 1)
SHAPES = [(64, 80), (48, 37), (40, 21), (16, 1), (2048, 16), (33, 300)]
"""n_in and n_out: whole vectors and panels, and not."""


def product(n_in: int, n_out: int, scales: TokenScales) -> tuple[Linear, Linear, list]:
    """A product without adapters, the same with some, and A and B of these."""
    generator = np.random.default_rng(n_in + n_out)
    weight = generator.standard_normal((n_out, n_in), np.float32)
    packed = PackedTensor(FORMATS["f32"], weight.view(np.uint8), weight.shape)
    plain = Linear(CpuProducts().prepare(packed), generator.standard_normal(n_out, np.float32))
    pairs = [
        (
            np.float32(np.float16(generator.standard_normal((rank, n_in)))),
            np.float32(np.float16(generator.standard_normal((n_out, rank)))),
        )
        for rank in RANKS
    ]
    parts = tuple(LowRank.of(i, a, b, 0.5) for i, (a, b) in enumerate(pairs))
    return plain, replace(plain, adapters=Adapters(parts, scales)), pairs


@pytest.mark.parametrize(("n_in", "n_out"), SHAPES)
@pytest.mark.parametrize("threads", [1, 2])
def test_values_and_bits(n_in: int, n_out: int, threads: int) -> None:
    use_threads(threads)
    products, scales = CpuProducts(), TokenScales(len(RANKS))
    plain, adapted, pairs = product(n_in, n_out, scales)
    generator = np.random.default_rng(3)
    for n in (1, 2, 5, 8, 9, 41):
        x = generator.standard_normal((n, n_in), np.float32)
        given = generator.choice([0, 0, 1, 0.5, -2], (n, len(RANKS))).astype(np.float32)
        scales.put(given)
        got, base = products.linear(x, adapted), products.linear(x, plain)
        want = np.float64(base)
        for i, (a, b) in enumerate(pairs):
            want += 0.5 * given[:, [i]] * ((np.float64(x) @ a.T) @ b.T)
        limit = 2e-6 * (np.abs(want).max() + np.sqrt(n_in))
        assert np.abs(got - want).max() < limit
        assert adapted.adapters is not None
        composed = adapted.adapters.add(x, base)
        assert np.abs(composed - want).max() < limit
        for i in range(n):
            scales.put(given[i : i + 1])
            alone = products.linear(x[i : i + 1], adapted)[0]
            assert np.array_equal(alone, got[i])
            if not given[i].any():
                assert np.array_equal(alone, base[i])
    use_threads(1)


def test_rows_that_go_on_keep_their_scales() -> None:
    scales = TokenScales(2)
    scales.put(np.arange(10, dtype=np.float32).reshape(5, 2))
    scales.keep([1, 4])
    assert scales.rows[:2].tolist() == [[2.0, 3.0], [8.0, 9.0]]


def test_halves_are_kept_as_they_are() -> None:
    """A file's fp16 values, the smallest too, are the same times a power of two."""
    values = np.array([[6e-8, 2.5, -65504.0, 0.0], [1.0, 3e-5, -6e-8, 1e-3]], np.float16)
    part = LowRank.of(0, np.float32(values), np.float32(values[:, :2]), 1.0)
    for kept, given in ((part.a, values), (part.matrices(2)[1], values[:, :2])):
        ratio = np.float64(given)[given != 0] / np.float64(kept)[given != 0]
        assert len(set(ratio.tolist())) == 1


def test_zeros_have_no_power() -> None:
    part = LowRank.of(0, np.zeros((2, 16), np.float32), np.ones((3, 2), np.float32), 1.0)
    assert not part.a.any()
    assert np.isfinite(part.factor).all()


def test_wrong_shapes_and_too_many_rows_are_refused() -> None:
    scales = TokenScales(1)
    with pytest.raises(LocalKVError, match="too long for adapters"):
        scales.put(np.zeros((MOST_ROWS + 1, 1), np.float32))
    plain, _, _ = product(64, 80, scales)
    for a, b in (((2, 48), (80, 2)), ((2, 64), (100, 2))):
        part = LowRank.of(0, np.zeros(a, np.float32), np.zeros(b, np.float32), 1.0)
        wrong = replace(plain, adapters=Adapters((part,), scales))
        with pytest.raises(BoundsError, match="an adapter"):
            CpuProducts().linear(np.zeros((1, 64), np.float32), wrong)
