"""The inline PTX, run on a CPU for every byte in every place."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from localkv.formats.bits import IQ4_CODEBOOK
from localkv.triton_primitives import codebook_ptx, ptx
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


@pytest.mark.parametrize("offset", [0, 4])
def test_three_bits(offset: int) -> None:
    for turn in range(16):
        thirds = [(turn + 5 * i) % 16 for i in range(4)]  # of the first code of each byte, ...
        word = thirds[0] | thirds[1] << 16 | thirds[2] << 8 | thirds[3] << 24 | 0xA0F05030
        out = run(ptx.three_bits_ptx(offset), [WORDS, np.full_like(WORDS, word)], 8)
        for i, third in enumerate(thirds):
            top = np.array([(third >> lane) & 1 for lane in range(4)]) * 4 - offset
            want = (BYTES >> 2 * i & 3) + top
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
    """Numbers of a codebook, and its words as the assembly takes them: four times each."""
    numbers = np.sort(np.random.default_rng(n_words).choice(range(-127, 128), 4 * n_words, False))
    words = (numbers + 128).astype(np.uint8).view(np.uint32)
    return numbers, [np.full_like(WORDS, word) for word in words for _ in range(4)]


def test_codebooks_of_sixteen() -> None:
    numbers, words = tables(4)
    out = run(codebook_ptx.sixteen_numbers_ptx(), [WORDS, *words], 4)
    np.testing.assert_array_equal(halves(out[:2]), numbers[BYTES & 15])
    np.testing.assert_array_equal(halves(out[2:]), numbers[BYTES >> 4])


def test_values_of_codebooks_of_four() -> None:
    """With an outlier in every place of a word, and in a word before and after it."""
    numbers, words = tables(1)
    pairs = run(codebook_ptx.four_numbers_ptx(), [words[0]], 2)
    scale, missing = np.float16(0.37), np.float16(-211.5)
    bits = [np.full_like(WORDS, int(x.view(np.uint16))) for x in (scale, missing)]
    made = run(codebook_ptx.four_values_ptx(), [*bits, *pairs], 4)
    four_times = [table for table in made for _ in range(4)]
    values = numbers.astype(np.float16) * scale
    for nibble in (-9, *range(16), 16, 24):
        place = [np.full_like(WORDS, 4 * nibble & 0xFFFF_FFFF)] * 4
        out = run(codebook_ptx.look_up_values_ptx(), [WORDS, *four_times, *place], 8)
        for i in range(4):
            want = values[BYTES >> 2 * i & 3]
            if 0 <= nibble < 16 and i == nibble // 8 + 2 * (nibble % 2):
                want[:, nibble % 8 // 2] += missing
            np.testing.assert_array_equal(halves(out[2 * i : 2 * i + 2]), want)


def test_codebooks_of_eight() -> None:
    numbers, words = tables(2)
    for turn in range(16):
        thirds = [(turn + 5 * i) % 16 for i in range(4)]  # of the first code of each byte, ...
        word = thirds[0] | thirds[1] << 16 | thirds[2] << 8 | thirds[3] << 24 | 0xA0F05030
        above = [np.full_like(WORDS, word)] * 4
        out = run(codebook_ptx.eight_numbers_ptx(), [WORDS, *above, *words], 8)
        for i, third in enumerate(thirds):
            top = np.array([(third >> lane) & 1 for lane in range(4)]) * 4
            want = numbers[(BYTES >> 2 * i & 3) + top]
            np.testing.assert_array_equal(halves(out[2 * i : 2 * i + 2]), want)


def test_outliers_are_added_where_they_are() -> None:
    rng = np.random.default_rng(0)
    x, missing = (rng.standard_normal((256, 2)).astype(np.float16) for _ in range(2))
    places, columns = (rng.integers(0, 4, (256, 2)) for _ in range(2))
    as_halves = ((0x6400 | n).astype(np.uint16).view(np.float16) for n in (places, columns))
    place, column = as_halves
    words = [a.view(np.uint32)[:, 0] for a in (x, place, missing, column)]
    want = np.where(places == columns, x + missing, x)
    np.testing.assert_array_equal(halves(run(codebook_ptx.outlier_ptx(), words, 1)), want)


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
