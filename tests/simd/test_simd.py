"""SIMD values against NumPy, on this CPU and as Numba compiles for older ones."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from numba import njit

from localkv.simd.arithmetic import (
    absolute,
    any_above,
    at_least,
    exp,
    exp2,
    f32x16,
    first_lane,
    lanes_below,
    max_lanes,
    select,
    sum_lanes,
    tanh,
    zero_f32,
    zero_i32,
)
from localkv.simd.cpu_features import HAS_AVX512, HAS_SIGNED_BYTE_DOTS
from localkv.simd.integer import (
    MOST_SIGNED,
    dot_of_bfloats,
    dot_of_bytes,
    dot_of_signed_bytes,
    dot_u8_i8,
    load_nibbles_from_table,
    rounded_to_bfloats,
)
from localkv.simd.memory import (
    get_i64s,
    load_bf16,
    load_e4m3,
    load_e5m2,
    load_f16,
    load_f32,
    load_i32,
    load_mask,
    load_nibbles,
    store_f32,
    store_i32,
    store_mask,
    store_nibbles,
    take_next,
)
from localkv.simd.quads import (
    load_quads,
    load_quads_of_five_bits,
    load_quads_of_nibbles,
    load_two_quads,
)
from localkv.simd.shuffle import add_turned_rows, gather_of_64, turn_rows
from localkv.simd.vector import (
    F32x16,
    I32x16,
    constant,
    f32,
    fma_each,
    fma_grid,
    i32,
    lanes_of,
    lanewise,
    load_grid,
    store_grid,
)
from support.other_cpus import ALDERLAKE, HASWELL, NEHALEM, runs_here

as_bfloats = lanewise(
    lambda b, x: b.bitcast(
        b.shl(b.zext(rounded_to_bfloats(b, x), lanes_of(i32)), constant(i32, 16)), lanes_of(f32)
    ),
    [F32x16],
    F32x16,
)
dot_small_u8_i8 = lanewise(
    lambda b, total, x, y: dot_of_bytes(b, total, x, y, most=MOST_SIGNED), [I32x16] * 3, I32x16
)
dot_i8_i8 = lanewise(
    dot_of_signed_bytes if HAS_SIGNED_BYTE_DOTS else dot_of_bytes, [I32x16] * 3, I32x16
)

CODEBOOK = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


@njit
def convert(kind: int, values: np.ndarray, out: np.ndarray) -> None:
    for i in range(0, out.size, 16):
        if kind == 0:
            store_f32(out, i, load_f16(values, i))
        elif kind == 1:
            store_f32(out, i, load_bf16(values, i))
        elif kind == 2:
            store_f32(out, i, load_e4m3(values, i))
        else:
            store_f32(out, i, load_e5m2(values, i))


def check_conversions() -> None:
    """All bit patterns of the narrow float types, but e4m3's NaN, which becomes 480."""
    kinds = [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
    for kind, dtype in enumerate(kinds):
        n = 1 << 8 * dtype.itemsize
        values = np.arange(n).astype(np.uint8 if dtype.itemsize == 1 else np.uint16)
        want = torch.from_numpy(values).view(dtype).float().numpy()
        got = np.zeros(n, np.float32)
        convert(kind, values, got)
        if dtype == torch.float8_e4m3fn:
            want = np.where(np.isnan(want), np.copysign(np.float32(480), got), want)
        np.testing.assert_array_equal(got, want)


@njit
def exponentials(x: np.ndarray, out: np.ndarray) -> None:
    for i in range(0, x.size, 16):
        store_f32(out, i, exp(load_f32(x, i)))


def check_exp() -> None:
    x = np.linspace(-87, 88, 1 << 16, dtype=np.float32)
    got = np.zeros_like(x)
    exponentials(x, got)
    want = np.exp(x.astype(np.float64))
    assert np.abs(got / want - 1).max() < 2e-7
    low = np.full(16, -1e30, np.float32)
    exponentials(low, low)
    assert low.max() < 1e-37


@njit
def powers(kind: int, x: np.ndarray, out: np.ndarray) -> None:
    for i in range(0, x.size, 16):
        if kind == 0:
            store_f32(out, i, exp2(load_f32(x, i)))
        else:
            store_f32(out, i, tanh(load_f32(x, i)))


def check_powers() -> None:
    x = np.linspace(-126, 127.5, 1 << 16, dtype=np.float32)
    got = np.zeros_like(x)
    powers(0, x, got)
    assert np.abs(got / np.exp2(x.astype(np.float64)) - 1).max() < 2e-7
    low = np.array([-126.6, -127, -128, -1e30] * 4, np.float32)
    powers(0, low, low)
    assert (low == 0).all()


def check_tanh() -> None:
    small = np.geomspace(1e-30, 100, 1 << 15, dtype=np.float32)
    x = np.concatenate((-small, small))
    got = np.zeros_like(x)
    powers(1, x, got)
    assert np.abs(got / np.tanh(x.astype(np.float64)) - 1).max() < 5e-7


@njit
def above(x: np.ndarray, limit: float) -> bool:
    return any_above(load_f32(x, 0), f32x16(np.float32(limit)))


def check_any_above() -> None:
    for lane in range(16):
        x = np.full(16, -1, np.float32)
        assert not above(x, -1.0)
        x[lane] = 2
        assert above(x, 1.5)
        assert not above(x, 2.0)


@njit
def sum_of_three(x: np.ndarray) -> int:
    first, second, third = get_i64s(x, 3)
    return first + 10 * second + 100 * third


def check_integers_as_a_tuple() -> None:
    assert sum_of_three(np.array([1, 2, -3, 4])) == -279


@njit
def dots(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
    x, y = load_i32(a, 0), load_i32(b, 0)
    store_i32(out, 0, dot_u8_i8(zero_i32(), x, y))
    store_i32(out, 16, dot_small_u8_i8(load_i32(out, 0), x, y))
    store_i32(out, 32, dot_i8_i8(load_i32(out, 0), x, y))


dot_of_pairs = lanewise(dot_of_bfloats, [F32x16, I32x16, I32x16], F32x16)


@njit
def bfloats(x: np.ndarray, y: np.ndarray, out: np.ndarray) -> None:
    total = load_f32(out, 0)
    store_f32(out, 0, dot_of_pairs(total, load_i32(x, 0), load_i32(y, 0)))


def check_bfloats() -> None:
    """Products of two bfloats have 16 bits, so that sums of small integers are exact."""
    generator = np.random.default_rng(0)
    x, y = (generator.integers(-128, 129, (16, 2)).astype(np.float32) for _ in range(2))
    out = generator.integers(-1000, 1000, 16).astype(np.float32)
    want = out + (x * y).sum(1)
    bfloats(*((v.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8) for v in (x, y)), out)
    np.testing.assert_array_equal(out, want)


@njit
def round_to_bfloats(x: np.ndarray, out: np.ndarray) -> None:
    for i in range(0, x.size, 16):
        store_f32(out, i, as_bfloats(load_f32(x, i)))


def check_rounding_to_bfloats() -> None:
    """Ties, the largest numbers, infinity, small numbers and any others."""
    generator = np.random.default_rng(0)
    bits = generator.integers(0, 1 << 32, 1 << 12, dtype=np.uint64).astype(np.uint32)
    bits[:1024] = bits[:1024] & 0xFFFF0000 | 0x8000
    bits[1024:1030] = 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000, 1, 0x7F800001
    x = bits.view(np.float32)
    got = np.zeros_like(x)
    round_to_bfloats(x, got)
    np.testing.assert_array_equal(got, torch.from_numpy(x).bfloat16().float().numpy())


@njit
def nibbles(packed: np.ndarray, out: np.ndarray) -> None:
    low, high = load_nibbles_from_table(packed, 0, CODEBOOK)
    store_f32(out, 0, low)
    store_f32(out, 16, high)


def check_integers() -> None:
    generator = np.random.default_rng(0)
    a = generator.integers(0, 256, 64).astype(np.uint8)
    b = generator.integers(-128, 128, 64).astype(np.int8)
    a[:8], b[:8] = 255, [-128] * 4 + [127] * 4  # the sums that saturate in 16 bits
    got = np.zeros(48, np.int32)
    dots(a, b, got)
    want = (a.astype(np.int32) * b).reshape(16, 4).sum(1)
    np.testing.assert_array_equal(got[:16], want)
    a[a > 127] -= 128
    a[:8], b[b == -128] = 127, -127
    dots(a, b, got)
    want = (a.astype(np.int32) * b).reshape(16, 4).sum(1)
    np.testing.assert_array_equal(got[16:32], 2 * want)
    if HAS_SIGNED_BYTE_DOTS:
        a = generator.integers(0, 256, 64).astype(np.uint8)
        a[:8] = 128
        dots(a, b, got)
        want = (a.view(np.int8).astype(np.int32) * b).reshape(16, 4).sum(1)
        np.testing.assert_array_equal(got[32:] - got[:16], want)
    values = np.zeros(32, np.float32)
    nibbles(a, values)
    codes = np.concatenate([a[:16] & 15, a[:16] >> 4])
    np.testing.assert_array_equal(values, np.array(CODEBOOK)[codes])


@njit
def transposed(x: np.ndarray, bits: np.ndarray, out: np.ndarray) -> None:
    store_i32(out, 0, load_quads(x, 64))
    both = load_two_quads(x, 0)
    store_i32(out, 16, both[0])
    store_i32(out, 32, both[1])
    both = load_quads_of_five_bits(x, 64, bits, 8)
    store_i32(out, 48, both[0])
    store_i32(out, 64, both[1])
    store_i32(out, 80, load_quads_of_nibbles(x, 96))


def nibbles_of(x: np.ndarray) -> np.ndarray:
    """The low nibbles of each eight bytes, then the high ones."""
    eights = x.reshape(-1, 1, 8)
    return np.concatenate([eights & 15, eights >> 4], 1).reshape(-1)


@njit
def low_then_high(x: np.ndarray, out: np.ndarray) -> None:
    for i in range(x.size // 8):
        store_i32(out, i * 16, load_nibbles(x, i * 8))


@njit
def put_nibbles(x: np.ndarray, out: np.ndarray) -> None:
    for i in range(x.size // 16):
        store_nibbles(out, i * 8, load_i32(x, i * 16))


@njit
def where_at_least(x: np.ndarray, bits: np.ndarray, limit: float) -> int:
    mask = at_least(load_f32(x, 0), f32x16(np.float32(limit)))
    store_mask(bits, 1, mask)
    return first_lane(mask)


def check_where_something_is() -> None:
    x = np.arange(16, dtype=np.float32)[::-1] % 7  # 1, 0, 6, 5, ...
    x[4] = np.nan
    for limit in (0, 1, 3, 6, 6.5):
        bits = np.zeros(3, np.uint16)
        lane = where_at_least(x, bits, limit)
        wanted = x >= limit
        assert lane == (wanted.argmax() if wanted.any() else 16)
        assert bits.tolist() == [0, (wanted * (1 << np.arange(16))).sum(), 0]


def check_nibbles_of_eight() -> None:
    x = np.arange(256).astype(np.uint8)
    got = np.zeros(512, np.int32)
    low_then_high(x, got)
    np.testing.assert_array_equal(got, nibbles_of(x))
    back = np.zeros(257, np.uint8)
    put_nibbles(got, back)
    np.testing.assert_array_equal(back, [*x, 0])


def check_quads() -> None:
    generator = np.random.default_rng(0)
    x = generator.integers(0, 256, 128).astype(np.uint8)
    bits = generator.integers(0, 256, 32).astype(np.uint8)
    got = np.zeros(96, np.int32)
    transposed(x, bits, got)
    rows = x.reshape(8, 16)
    fifth = np.unpackbits(bits[16:], bitorder="little").reshape(4, 2, 16) << 4
    want = [
        rows[4:],
        rows[::2],
        rows[1::2],
        rows[4:] & 15 | fifth[:, 0],
        rows[4:] >> 4 | fifth[:, 1],
        nibbles_of(x[96:]).reshape(4, 16),
    ]
    np.testing.assert_array_equal(got.view(np.uint8).reshape(6, 16, 4), np.array(want).mT)


@njit
def masked(bits: np.ndarray, n: int, out: np.ndarray) -> None:
    nan = f32x16(np.float32(np.nan))
    store_f32(out, 0, select(lanes_below(n), f32x16(np.float32(1)), zero_f32()))
    store_f32(out, 16, select(load_mask(bits, 1), nan, f32x16(np.float32(2))))


def check_masks() -> None:
    got = np.zeros(32, np.float32)
    for n in (-5, 0, 1, 15, 16, 100):
        masked(np.array([0, 0b1010], np.uint16), n, got)
        np.testing.assert_array_equal(got[:16], np.arange(16) < n)
    np.testing.assert_array_equal(got[16:], [2, np.nan, 2, np.nan, *[2] * 12])


@njit
def product(a: np.ndarray, b: np.ndarray, out: np.ndarray, n: int) -> None:
    """out [3, 32] += a [3, n] b [n, 32]"""
    sums = load_grid(out, 0, 16, 32, 2, 3)
    for i in range(n):
        rows = (load_f32(b, i * 32), load_f32(b, i * 32 + 16))
        sums = fma_grid(sums, rows, a, i, 0, n)
    store_grid(out, 0, 16, 32, 2, sums)


@njit
def reduced(x: np.ndarray, counter: np.ndarray) -> tuple[float, float, int]:
    v = load_f32(x, 0)
    take_next(counter)
    return max_lanes(absolute(v)), sum_lanes(v), take_next(counter)


@njit
def scaled(x: np.ndarray, factors: np.ndarray, out: np.ndarray) -> None:
    """out [2, 3, 16] += x [2, 3, 16] * factors [2, 16]"""
    sums = load_grid(out, 0, 48, 16, 2, 3)
    scales = (load_f32(factors, 0), load_f32(factors, 16))
    store_grid(out, 0, 48, 16, 2, fma_each(sums, load_grid(x, 0, 48, 16, 2, 3), scales))


def check_products() -> None:
    generator = np.random.default_rng(0)
    a, b, out = (
        generator.standard_normal(s).astype(np.float32) for s in ((3, 7), (7, 32), (3, 32))
    )
    want = out + a @ b
    product(a, b, out, 7)
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-5)
    x = generator.standard_normal(16).astype(np.float32)
    top, total, counted = reduced(x, np.array([41]))
    assert top == np.abs(x).max()
    assert counted == 42
    np.testing.assert_allclose(total, x.sum(), rtol=1e-4)
    x, factors, out = (
        generator.standard_normal(s).astype(np.float32)
        for s in ((2, 3, 16), (2, 1, 16), (2, 3, 16))
    )
    want = out + x * factors
    scaled(x, factors, out)
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-5)


@njit
def gathered(x: np.ndarray, index: np.ndarray, out: np.ndarray) -> None:
    store_f32(out, 0, gather_of_64(x, load_i32(index, 0)))


@njit
def turned(x: np.ndarray, columns: np.ndarray, out: np.ndarray) -> None:
    three = (zero_f32(), zero_f32(), zero_f32())
    turn_rows(x, 20, three, columns)
    add_turned_rows(out, 24, three, columns)


def check_rows_as_columns() -> None:
    generator = np.random.default_rng(0)
    x = generator.standard_normal(64).astype(np.float32)
    index, got = generator.integers(0, 64, 16).astype(np.int32), np.zeros(16, np.float32)
    gathered(x, index, got)
    np.testing.assert_array_equal(got, x[index])
    columns, out = np.zeros((16, 16), np.float32), np.ones((3, 24), np.float32)
    turned(x, columns, out)
    rows = x[:60].reshape(3, 20)[:, :16]
    np.testing.assert_array_equal(columns[:, :3].T, rows)
    np.testing.assert_array_equal(out[:, :16], 1 + rows)
    assert (out[:, 16:] == 1).all()


CHECKS = [
    check_conversions,
    check_exp,
    check_powers,
    check_tanh,
    check_any_above,
    check_where_something_is,
    check_integers_as_a_tuple,
    check_integers,
    check_bfloats,
    check_rounding_to_bfloats,
    check_quads,
    check_nibbles_of_eight,
    check_masks,
    check_products,
    check_rows_as_columns,
]


@pytest.mark.parametrize("check", CHECKS)
def test_here(check: object) -> None:
    check()  # type: ignore[operator]


@pytest.mark.slow
@pytest.mark.parametrize(
    "cpu",
    [pytest.param(ALDERLAKE, marks=pytest.mark.slow), HASWELL, NEHALEM],
    ids=lambda cpu: cpu["NUMBA_CPU_NAME"],
)
def test_older_cpus(cpu: dict[str, str]) -> None:
    """The same, as code for a CPU without AVX-512, and without AVX; no register is too wide."""
    if not runs_here(cpu):
        pytest.skip("the CPU lacks some instructions")
    env = os.environ | cpu | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, __file__], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


if __name__ == "__main__":
    for each in CHECKS:
        each()
    assert not HAS_AVX512
    functions = (
        convert,
        exponentials,
        powers,
        above,
        dots,
        nibbles,
        transposed,
        masked,
        product,
        reduced,
    )
    for compiled in functions:
        assert "zmm" not in "".join(compiled.inspect_asm().values())
