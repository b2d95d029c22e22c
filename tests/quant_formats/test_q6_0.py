"""q6_0 against ik_llama.cpp's block, written down again in plain Python."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from localkv.quant_formats import FORMATS
from localkv.quant_formats.base import split_blocks
from support.packed_rows import join_planes

Q6_0 = FORMATS["q6_0"]
VALUES = st.floats(-(2.0**20), 2.0**20, width=32)
f32 = np.float32


def packed(x: list[float]) -> bytes:
    """32 numbers -> a block: fp16 d; 8 bytes of high bits; 16 bytes of low bits."""
    values = [f32(v) for v in x]
    extreme = max(values, key=abs)  # the first of several
    d = extreme / f32(-32)
    inverse = f32(1) / d if d and math.isfinite(f32(1) / d) else f32(0)
    codes = [min(63, int(v * inverse + f32(32.5))) for v in values]
    high, low = [0] * 8, [0] * 16
    products = squares = f32(0)
    for i in range(16):
        low[i] = codes[i] % 16 + 16 * (codes[i + 16] % 16)
        above = codes[i] // 16 + 4 * (codes[i + 16] // 16)
        high[i % 8] += above * 16 ** (i // 8)
        terms = []
        for j in (i, i + 16):
            q, weight = f32(codes[j] - 32), (values[j] * inverse) * (values[j] * inverse)
            terms.append((weight * values[j] * q, weight * q * q))
        products += terms[0][0] + terms[1][0]
        squares += terms[0][1] + terms[1][1]
    d = products / squares if squares > 0 else d
    return np.float16(d).tobytes() + bytes(high) + bytes(low)


def unpacked(block: bytes) -> list[np.float32]:
    d = np.frombuffer(block[:2], np.float16)[0].astype(np.float32)
    high, low = block[2:10], block[10:]
    values = []
    for i in range(32):
        byte, is_upper = i % 16, i // 16
        above = high[byte % 8] >> (4 * (byte // 8) + 2 * is_upper) & 3
        values.append(d * f32((low[byte] >> (4 * is_upper) & 15) + 16 * above - 32))
    return values


def encoded(x: list[float]) -> bytes:
    return join_planes(Q6_0.codec.encode(np.array([x], np.float32))).tobytes()


@pytest.mark.filterwarnings("ignore:overflow")
@given(x=st.lists(VALUES, min_size=32, max_size=32))
def test_any_block(x: list[float]) -> None:
    assert encoded(x) == packed(x)


def test_many_blocks() -> None:
    x = np.random.default_rng(0).standard_normal((300, 32)).astype(np.float32)
    x[::2] = np.round(x[::2] * 8) / 2  # with codes halfway, and the same magnitude twice
    for row in x.tolist():
        assert encoded(row) == packed(row)


@pytest.mark.filterwarnings("ignore:invalid value")
@given(block=st.binary(min_size=26, max_size=26))
def test_any_bytes(block: bytes) -> None:
    rows = np.frombuffer(block, np.uint8)[None]
    got = Q6_0.codec.decode(split_blocks(Q6_0, rows))[0]
    np.testing.assert_array_equal(got, np.array(unpacked(block), np.float32))
