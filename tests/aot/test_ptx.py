"""The inline PTX, run on a CPU for every byte in every place."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from localkv.quant_formats.iq4_nl import CODEBOOK as IQ4_CODEBOOK
from localkv.triton_primitives import ptx
from localkv.triton_primitives.ptx import plus_1024
from support.aot.ptx_emulator import Words, run

BYTES = np.stack([np.roll(np.arange(256), shift) for shift in (0, 37, 91, 200)], 1).astype(np.uint8)
WORDS = BYTES.view(np.uint32)[:, 0]


def halves(words: list[Words]) -> NDArray[np.float16]:
    """The fp16 numbers of pairs: [256, 2 * number of words]."""
    return np.stack(words, 1).view(np.float16)


@pytest.mark.parametrize("offset", [0, 8])
def test_nibbles(offset: int) -> None:
    out = run(ptx.nibbles_ptx(offset), [WORDS], 4)
    np.testing.assert_array_equal(halves(out[:2]), (BYTES & 15).astype(int) - offset)
    np.testing.assert_array_equal(halves(out[2:]), (BYTES >> 4).astype(int) - offset)


@pytest.mark.parametrize("offset", [0, 16])
def test_five_bits(offset: int) -> None:
    for above in range(256):
        bits = np.full_like(WORDS, (above & 15) | (above >> 4) << 16 | 0xABC0_FF50)
        out = run(ptx.five_bits_ptx(offset), [WORDS, bits], 4)
        top = np.array([(above >> i) & 1 for i in range(8)]) * 16 - offset
        np.testing.assert_array_equal(halves(out[:2]), (BYTES & 15) + top[:4])
        np.testing.assert_array_equal(halves(out[2:]), (BYTES >> 4) + top[4:])


@pytest.mark.parametrize(("step", "offset"), [(1, 0), (1, 2), (2, 3)])
def test_two_bits(step: int, offset: int) -> None:
    out = run(ptx.two_bits_ptx(step, offset), [WORDS], 8)
    for i in range(4):
        want = (BYTES >> 2 * i & 3).astype(int) * step - offset
        np.testing.assert_array_equal(halves(out[2 * i : 2 * i + 2]), want)


def third_bits(turn: int) -> tuple[Words, NDArray[np.int64]]:
    """Words of third bits, and 4 times the words of the first, second, ... codes of four bytes."""
    words = np.random.default_rng(turn).integers(0, 1 << 32, 256).astype(np.uint32) & 0x55555555
    of_bytes = words.view(np.uint8).reshape(-1, 4).astype(np.int64)
    return words, np.stack([(of_bytes >> 2 * i & 1) * 4 for i in range(4)])


@pytest.mark.parametrize("offset", [0, 4])
def test_three_bits(offset: int) -> None:
    for turn in range(16):
        thirds, above = third_bits(turn)
        out = run(ptx.three_bits_ptx(offset), [WORDS, thirds], 8)
        for i in range(4):
            want = (BYTES >> 2 * i & 3) + above[i] - offset
            np.testing.assert_array_equal(halves(out[2 * i : 2 * i + 2]), want)


@pytest.mark.parametrize(
    ("shift", "n_bits", "above_shift", "above_bits", "offset"),
    [(0, 4, 0, 1, 16), (4, 4, 7, 1, 0), (4, 4, 6, 2, 32), (0, 4, 0, 2, 32), (2, 2, 5, 1, 4),
     (6, 2, 0, 0, 0)],
)  # fmt: skip
def test_bit_fields(
    shift: int, n_bits: int, above_shift: int, above_bits: int, offset: int
) -> None:
    ptx_text = ptx.bit_field_ptx(shift, n_bits, above_shift, above_bits, offset)
    for turn in range(0, 256, 5):
        above = (BYTES * 3 + turn).astype(np.uint8)
        out = run(ptx_text, [WORDS, above.view(np.uint32)[:, 0]], 2)
        codes = (BYTES >> shift) & (2**n_bits - 1)
        codes = codes | ((above >> above_shift) & (2**above_bits - 1)) << n_bits
        np.testing.assert_array_equal(halves(out), codes.astype(int) - offset)


def test_codebook() -> None:
    out = run(ptx.codebook_ptx(IQ4_CODEBOOK), [WORDS], 4)
    table = np.array(IQ4_CODEBOOK)
    np.testing.assert_array_equal(halves(out[:2]), table[BYTES & 15])
    np.testing.assert_array_equal(halves(out[2:]), table[BYTES >> 4])


def tables(n_words: int) -> tuple[NDArray[np.int64], list[Words]]:
    """Numbers of a codebook, and its words."""
    numbers = np.sort(np.random.default_rng(n_words).choice(range(-127, 128), 4 * n_words, False))
    words = (numbers + 128).astype(np.uint8).view(np.uint32)
    return numbers, [np.full_like(WORDS, word) for word in words]


def four_times(words: list[Words]) -> list[Words]:
    """Each word four times, as assembly takes what is the same for four bytes."""
    return [word for word in words for _ in range(4)]


def filled(bits: int) -> Words:
    return np.full_like(WORDS, bits & 0xFFFF_FFFF)


def bits_of(x: float, times: int = 1) -> int:
    return int(np.float16(x).view(np.uint16)) * (0x10001 if times == 2 else 1)


@pytest.mark.parametrize(
    ("scales", "missing"),
    [((0.5, -3), -7), ((600, 0.1), 65504), ((-516, np.nan), -65504), ((np.nan, 2), np.inf)],
)
def test_limits_of_scales_and_outliers(scales: tuple[float, float], missing: float) -> None:
    words = [filled(bits_of(scales[0]) | bits_of(scales[1]) << 16), filled(bits_of(missing))]
    d, left = run(ptx.limited_ptx(515.5, 65472.0), words, 2)
    want = np.clip(np.array(scales, np.float16), np.float16(-515.5), np.float16(515.5))
    np.testing.assert_array_equal(halves([d])[0], want)
    limit = np.float16(65472 - 127 * np.nanmax(np.abs(want.astype(np.float64))))
    np.testing.assert_array_equal(halves([left])[0], np.clip(missing, -limit, limit))


SCALE, MISSING = np.float16(0.37), np.float16(-211.5)
LOWER_HALF = filled(bits_of(SCALE) | 0x1234_0000)


def test_values_of_codebooks_of_four() -> None:
    """With an outlier in every place of a word, and in a word before and after it."""
    numbers, words = tables(1)
    pairs = run(ptx.number_pairs_ptx(1), words, 2)
    inputs = [LOWER_HALF, filled(bits_of(MISSING, 2)), *pairs]
    made = four_times(run(ptx.four_values_ptx(), inputs, 4))
    values = numbers.astype(np.float16) * SCALE
    for nibble in (-9, *range(16), 16, 24):
        place = [filled(4 * nibble)] * 4
        out = run(ptx.look_up_values_ptx(), [WORDS, *made, *place], 8)
        for i in range(4):
            want = values[BYTES >> 2 * i & 3]
            if 0 <= nibble < 16 and i == nibble // 8 + 2 * (nibble % 2):
                want[:, nibble % 8 // 2] += MISSING
            np.testing.assert_array_equal(halves(out[2 * i : 2 * i + 2]), want)


def outlier_of(place: int, first: int) -> list[Words]:
    """What is missing at a place among 64, as bytes whose first channel is `first` take it."""
    inputs = [filled(bits_of(MISSING, 2)), filled(place << 16 | 0x1234)]
    group = filled(plus_1024(first & ptx.OF_GROUP) * 0x10001)
    return four_times([*run(ptx.outlier_ptx(), inputs, 5), group])


@pytest.mark.parametrize("first", [4, 32])
def test_values_of_codebooks_of_eight(first: int) -> None:
    """With an outlier in every place among 64."""
    numbers, words = tables(2)
    pairs = run(ptx.number_pairs_ptx(2), words, 4)
    made = four_times(run(ptx.eight_values_ptx(), [LOWER_HALF, *pairs], 4))
    values = numbers.astype(np.float16) * SCALE
    for place in range(64):
        thirds, above = third_bits(place)
        inputs = [WORDS, *[thirds] * 4, *made, *outlier_of(place, first)]
        out = run(ptx.look_up_eight_ptx(), inputs, 8)
        for i, further in enumerate((0, 16, 8, 24)):
            want = values[(BYTES >> 2 * i & 3) + above[i]]
            if first + further <= place < first + further + 4:
                want[:, place - first - further] += MISSING
            np.testing.assert_array_equal(halves(out[2 * i : 2 * i + 2]), want)


def block_of_sixteen(d: float, other: float, missing: float, place: int, first: int) -> list[Words]:
    """What bytes from byte `first` of two blocks on take beside their words, scales included."""
    second = first // 16
    scales = bits_of(other) | bits_of(d) << 16 if second else bits_of(d) | bits_of(other) << 16
    half, turn = 0x7610 if second else 0x5410, 1 << (-16 * second - first % 16 // 2) % 32
    words = (scales, bits_of(missing) | place << 16, half, turn)
    return [filled(word) for word in (0x58585858, *words)]


def even_tables() -> tuple[NDArray[np.int64], list[Words]]:
    """Sixteen even numbers, the largest and smallest among them, and words of their halves."""
    numbers = tables(4)[0] // 2 * 2
    numbers[[0, -1]] = -126, 126
    halves_of = (numbers // 2 + 64).astype(np.uint8)
    return numbers, [np.full_like(WORDS, word) for word in halves_of.view(np.uint32)]


@pytest.mark.parametrize("first", [0, 16, 24, 4])
def test_values_of_codebooks_of_sixteen(first: int) -> None:
    """An outlier is in every place among 64, with more bits above it than tell 64 places.

    Runs of 16, 8 and 4 bytes begin in the block or in the middle of it.
    """
    numbers, words = even_tables()
    scale, n_words = np.float16(0.296875), 4 - first % 16 // 4
    values = numbers.astype(np.float16) * scale
    codes = np.concatenate([np.roll(BYTES, shift, 0) for shift in (0, 17, 90, 133)], 1)
    packed = list(np.ascontiguousarray(codes).view(np.uint32).T)
    for place in range(64):
        rest = block_of_sixteen(float(scale), 3.5, float(MISSING), place | 0xFF40, first)
        inputs = [np.ascontiguousarray(word) for word in packed]
        inputs += [word for one in (*words, *rest) for word in [one] * 16]
        out = run(ptx.look_up_sixteen_ptx(), inputs, 16)
        for i in range(2):
            want = values[codes >> 4 * i & 15]
            byte = place % 16 - first % 16
            if place // 32 == first // 16 and place // 16 % 2 == i and 0 <= byte < 4 * n_words:
                want[:, byte] += MISSING
            got = halves(out[8 * i : 8 * i + 2 * n_words])
            np.testing.assert_array_equal(got, want[:, : 4 * n_words] / 16)


@pytest.mark.parametrize("scale", [0.0, 63 * 2**-24, 33 * 2**-19, 31.0, 252.0, -256.0])
def test_scales_of_six_bits_are_exact_beside_sixteen_numbers(scale: float) -> None:
    numbers, words = even_tables()
    inputs = [WORDS] * 4
    rest = block_of_sixteen(scale, 1.0, 0.0, 0, 0)
    inputs += [word for one in (*words, *rest) for word in [one] * 16]
    out = run(ptx.look_up_sixteen_ptx(), inputs, 16)
    want = (numbers * scale / 16).astype(np.float16)  # rounded once
    np.testing.assert_array_equal(halves(out[:2]), want[BYTES & 15])
    np.testing.assert_array_equal(halves(out[8:10]), want[BYTES >> 4])


@pytest.mark.parametrize(
    ("scale", "missing", "limits"),
    [(65504.0, 65504.0, (256, 32768)), (-9e3, -np.inf, (-256, -32768)), (np.nan, 1, (np.nan, 1))],
)
def test_what_sixteen_numbers_limit(
    scale: float, missing: float, limits: tuple[float, float]
) -> None:
    _, words = even_tables()
    inputs = [np.full_like(WORDS, 0xFFFFFFFF)] * 4
    rest = block_of_sixteen(scale, 1.0, missing, 1, 0)
    inputs += [word for one in (*words, *rest) for word in [one] * 16]
    pair = halves(run(ptx.look_up_sixteen_ptx(), inputs, 16))[0, :2]
    value = np.float16(limits[0] * 126 / 16)
    np.testing.assert_array_equal(pair, [value, np.float16(value + limits[1] / 16)])


def test_signed_bytes() -> None:
    out = run(ptx.signed_bytes_ptx(), [WORDS], 2)
    np.testing.assert_array_equal(halves(out), BYTES.view(np.int8))


@pytest.mark.parametrize("first", [0, 4, 12])
def test_points_with_signs(first: int) -> None:
    """Every byte below 64 in every place, with every pattern of eight signs."""
    rng = np.random.default_rng(first)
    for signs in range(256):
        bits = [(signs >> i) & 1 for i in range(8)]
        own = sum(bit << (first + i // 2 + 16 * (i % 2)) for i, bit in enumerate(bits))
        others = int(rng.integers(1 << 32)) & ~(0x000F000F << first)
        word = np.full_like(WORDS, (others | own) & 0xFFFFFFFF)
        small = BYTES % 64
        packed = small.view(np.uint32)[:, 0]
        out = run(ptx.signed_points_ptx(first, 8), [packed, packed, *[word] * 8], 4)
        factors = np.where(bits, -1, 1)
        np.testing.assert_array_equal(halves(out), np.tile(small, 2) * factors)
        out = run(ptx.signed_points_ptx(first, 4), [packed, *[word] * 4], 2)
        np.testing.assert_array_equal(halves(out), small * factors[:4])


@pytest.mark.parametrize("n", [7, 9])
def test_points_that_are_shifted(n: int) -> None:
    offset = np.full_like(WORDS, 0x64006400 + n * 0x10001)
    out = run(ptx.shifted_points_ptx(), [WORDS, *[offset] * 4], 2)
    np.testing.assert_array_equal(halves(out), BYTES.astype(int) - n)


def test_ternary_digits() -> None:
    out = run(ptx.digits_ptx(), [WORDS], 10)
    rest = BYTES.astype(int)
    for digit in range(5):
        np.testing.assert_array_equal(halves(out[2 * digit : 2 * digit + 2]), rest * 3 // 256 - 1)
        rest = rest * 3 % 256


def test_e4m3() -> None:
    want = torch.from_numpy(BYTES).view(torch.float8_e4m3fn).float().numpy()
    want = np.where(np.isnan(want), np.where(BYTES >= 128, -480, 480), want)
    np.testing.assert_array_equal(halves(run(ptx.e4m3_ptx(), [WORDS], 2)), want)


def test_e5m2() -> None:
    want = torch.from_numpy(BYTES).view(torch.float8_e5m2).float().numpy()
    np.testing.assert_array_equal(halves(run(ptx.e5m2_ptx(), [WORDS], 2)), want)
