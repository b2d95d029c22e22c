"""The inline PTX, run on a CPU for every byte in every place."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from localkv.formats.bits import IQ4_CODEBOOK
from localkv.triton_primitives import ptx
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


def test_signed_bytes() -> None:
    out = run(ptx.signed_bytes_ptx(), [WORDS], 2)
    np.testing.assert_array_equal(halves(out), BYTES.view(np.int8))


def test_e4m3() -> None:
    want = torch.from_numpy(BYTES).view(torch.float8_e4m3fn).float().numpy()
    want = np.where(np.isnan(want), np.where(BYTES >= 128, -480, 480), want)
    np.testing.assert_array_equal(halves(run(ptx.e4m3_ptx(), [WORDS], 2)), want)


def test_e5m2() -> None:
    want = torch.from_numpy(BYTES).view(torch.float8_e5m2).float().numpy()
    np.testing.assert_array_equal(halves(run(ptx.e5m2_ptx(), [WORDS], 2)), want)
