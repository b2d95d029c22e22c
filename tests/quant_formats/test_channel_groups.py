"""Types with scales by channel: bytes against a plain float64 account of KIVI's formula."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localkv.quant_formats import FORMATS, QuantFormat
from localkv.quant_formats.shared.bits import bit_fields, two_bit_codes

GROUPED = [fmt for fmt in FORMATS.values() if fmt.group_tokens > 1]
BITS = {"q8_0c": 8, "q4_1c": 4, "q4_1c128": 4, "kv3_1c": 3, "kv3_1c128": 3, "kv2_1c": 2}
by_format = pytest.mark.parametrize("fmt", GROUPED, ids=lambda fmt: fmt.name)
SPECIAL = [0.0, -0.0, 1e-9, -6e-8, 65504.0, 65520.0, -1e38, 3.4e38, math.inf, -math.inf, math.nan]


def f16(x: float) -> float:
    """The stored number, from a double that a float holds."""
    return float(np.float16(x))


def group_in_doubles(x: np.ndarray, bits: int, affine: bool) -> tuple[float, float, list[int]]:
    """d, m and codes of one channel's floats; each step is a float32's, as in the formula."""
    values = [max(-32000.0, min(32000.0, float(v))) if v == v else math.nan for v in x]
    if any(math.isnan(v) for v in values):
        return math.nan, math.nan if affine else 0.0, []
    f32 = np.float32
    if affine:
        last = (1 << bits) - 1
        m = f16(min(values))
        spread = float(f32(max(max(values), m)) - f32(m))
        low = 0
    else:
        last, m, low = 127, 0.0, -127
        spread = max(abs(v) for v in values)
    d = f16(float(f32(spread) / f32(last)))
    codes = []
    for v in values:
        inverse = f32(1) / f32(d) if d > 0 else f32(0)
        y = float((f32(v) - f32(m)) * inverse)
        if affine:
            code = math.floor(float(f32(y) + f32(0.5)))
        else:
            code = int(math.copysign(math.floor(abs(y) + 0.5), y))
        codes.append(max(low, min(last, code)))
    return d, m, codes


def channels(fmt: QuantFormat, planes: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...]:
    """The d, m and codes [channels, tokens] of one group and a block's channels."""
    scales = planes[: 1 if fmt.name == "q8_0c" else 2]
    codes, *high = (
        plane.reshape(fmt.group_tokens, fmt.block_size // 32, -1)
        for plane in planes[: len(scales) - 1 : -1]
    )
    halves = [plane.reshape(-1).view(np.float16) for plane in scales]
    if fmt.name == "q8_0c":
        integers = codes.view(np.int8).astype(int)
    elif BITS[fmt.name] == 4:
        integers = bit_fields(codes, 4, 16).astype(int)
    else:
        integers = two_bit_codes(codes).astype(int)
        if high:
            integers += bit_fields(high[0], 1, 1).astype(int) << 2
    d = halves[0]
    return (
        d,
        halves[1] if len(halves) > 1 else np.zeros_like(d),
        integers.reshape(fmt.group_tokens, fmt.block_size).T,
    )


@by_format
@settings(deadline=None, max_examples=25)
@given(
    seed=st.integers(0, 2**32 - 1),
    size=st.sampled_from([1e-7, 1e-3, 1.0, 300.0, 1e5]),
    shift=st.sampled_from([0.0, 1.0, -40.0, 3e4]),
    special=st.lists(
        st.tuples(st.integers(0, 31), st.integers(0, 31), st.sampled_from(SPECIAL)), max_size=4
    ),
)
def test_codes_are_those_of_the_formula(fmt, seed, size, shift, special):
    shape = fmt.group_tokens, fmt.block_size
    x = np.random.default_rng(seed).standard_normal(shape) * size + shift
    x = x.astype(np.float32)
    for token, channel, value in special:
        x[token, channel] = value
    d, m, codes = channels(fmt, fmt.codec.encode(x))
    for channel in range(fmt.block_size):
        with np.errstate(all="ignore"):
            want = group_in_doubles(x[:, channel], BITS[fmt.name], fmt.name != "q8_0c")
        np.testing.assert_array_equal(d[channel], np.float16(want[0]))
        if math.isnan(want[0]):
            continue
        np.testing.assert_array_equal(m[channel], np.float16(want[1]))
        assert codes[channel].tolist() == want[2]


@by_format
def test_decodes_to_the_nearest_step(fmt):
    n, block = fmt.group_tokens, fmt.block_size
    x = np.random.default_rng(3).standard_normal((2, 3, 3 * n, 64)).astype(np.float32)
    x *= np.exp2(np.arange(64) % 9 - 4).astype(np.float32)
    planes = fmt.codec.encode(x)
    assert [plane.shape for plane in planes] == [
        (2, 3, 3 * n, 64 // block, plane.n_bytes) for plane in fmt.planes
    ]
    got = fmt.codec.decode(planes).astype(np.float64)
    assert got.shape == x.shape
    groups = x.reshape(2, 3, 3, n, 64).astype(np.float64)
    if fmt.name == "q8_0c":
        step = np.abs(groups).max(-2) / 127
    else:
        step = (groups.max(-2) - groups.min(-2)) / ((1 << BITS[fmt.name]) - 1)
    # half a step, and what fp16 takes off the scale and the minimum
    bound = step * 0.5 + np.abs(groups).max(-2) * 2.0**-10
    error = np.abs(got.reshape(groups.shape) - groups)
    assert (error <= bound[..., None, :]).all()
    # a group knows nothing of its neighbours
    alone = fmt.codec.decode(fmt.codec.encode(x[1, 2, n : 2 * n]))
    np.testing.assert_array_equal(alone, got[1, 2, n : 2 * n])


@by_format
def test_what_is_decoded_in_fp16_is_finite(fmt):
    x = np.full((fmt.group_tokens, fmt.block_size), -3e38, np.float32)
    x[1::2] = np.inf
    d, m, codes = channels(fmt, fmt.codec.encode(x))
    products = d[:, None] * codes.astype(np.float16)
    assert np.isfinite(products + m[:, None]).all()


@by_format
def test_constant_channels_and_nan(fmt):
    x = np.full((fmt.group_tokens, fmt.block_size), 0.375, np.float32)
    x[5, 7] = np.nan
    got = fmt.codec.decode(fmt.codec.encode(x))
    assert np.isnan(got[:, 7]).all()
    others = np.delete(got, 7, axis=1)
    np.testing.assert_allclose(others, 0.375, rtol=1e-3)
    if fmt.name != "q8_0c":
        assert (others == 0.375).all()
