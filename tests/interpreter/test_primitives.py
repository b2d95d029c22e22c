"""The portable twins of the unpackers, and the encoders of fp8 and bf16."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from localkv.quant_formats.iq4_nl import CODEBOOK as IQ4_CODEBOOK
from localkv.quant_formats.nuq.gpu import bit_of_place
from localkv.quant_formats.shared.bits import pack_two_bits
from localkv.triton_primitives import codebooks, float_bits, unpack
from support.fp8_inputs import fp8_inputs

CODEBOOK = tl.constexpr(IQ4_CODEBOOK)
BYTES = torch.arange(256, dtype=torch.int32).to(torch.uint8)
ITEMS = 1 << 16


@triton.jit
def map_kernel(x_ptr, out_ptr, F: tl.constexpr, N: tl.constexpr):
    i = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(out_ptr + i, F(tl.load(x_ptr + i)))


@triton.jit
def map_two_kernel(x_ptr, low_ptr, high_ptr, F: tl.constexpr, OFFSET: tl.constexpr):
    i = tl.arange(0, 256)
    low, high = F(tl.load(x_ptr + i), OFFSET, False)
    tl.store(low_ptr + i, low)
    tl.store(high_ptr + i, high)


@triton.jit
def five_bits_kernel(x_ptr, low_ptr, high_ptr, above, OFFSET: tl.constexpr):
    i = tl.arange(0, 256)
    bits = tl.zeros((256,), tl.int32) + above
    low, high = unpack.unpack_five_bits(tl.load(x_ptr + i), bits, i % 4, OFFSET, False)
    tl.store(low_ptr + i, low)
    tl.store(high_ptr + i, high)


@triton.jit
def bits_of_words_kernel(x_ptr, out_ptr, above, SHIFT: tl.constexpr, ABOVE: tl.constexpr):
    i = tl.arange(0, 256)
    words = tl.zeros((256,), tl.int32) + above
    x = tl.load(x_ptr + i)
    out = unpack.unpack_bit_field_of_words(x, words, i % 4, SHIFT, 4, ABOVE, 2, 32, False)
    tl.store(out_ptr + i, out)


@triton.jit
def signed_bytes(x):
    return unpack.unpack_signed_bytes(x, False)


@triton.jit
def e4m3(x):
    return float_bits.decode_e4m3(x, False)


@triton.jit
def e5m2(x):
    return float_bits.decode_e5m2(x, False)


@triton.jit
def bits_of_places_kernel(out_ptr):
    i = tl.arange(0, 64)
    tl.store(out_ptr + i, bit_of_place(i))


def test_an_outlier_is_looked_up_where_its_code_is() -> None:
    """Codes of 64 values as in `qs`; of four bytes the first and third codes are nibbles, then the
    second and fourth ones."""
    out = torch.empty(64, dtype=torch.int32)
    bits_of_places_kernel[(1,)](out)
    for place, bit in enumerate(out.tolist()):
        codes = np.zeros((2, 32), np.uint8)
        codes.flat[place] = 3
        word, nibble = divmod(bit // 4, 16)
        packed = int(pack_two_bits(codes).reshape(-1).view("<u4")[word])
        assert (packed >> 2 * (nibble // 8)) & 0x33333333 == 3 << 4 * (nibble % 8)


@triton.jit
def places_kernel(half_ptr, turn_ptr):
    half, turn = codebooks.places_of_nibbles(64)
    i = tl.arange(0, 64)
    tl.store(half_ptr + i, half)
    tl.store(turn_ptr + i, turn)


@pytest.mark.parametrize("run", [16, 8, 4])
def test_an_outlier_is_one_of_the_pairs_of_its_nibbles(run: int) -> None:
    """Pairs of low nibbles have the bits from 0 on, and pairs of high ones the bits from 8 on."""
    half, turn = torch.empty(64, dtype=torch.int32), torch.empty(64, dtype=torch.int32)
    places_kernel[(1,)](half, turn)
    assert half.tolist() == ([0x5410] * 16 + [0x7610] * 16) * 2
    tested = ((1 << run // 2) - 1) * 0x101
    for first in range(0, 64, run):
        for place in range(64):
            word, n = int(turn[first]) & 0xFFFFFFFF, place // 2
            pairs = (word << n | word >> (32 - n)) & tested
            is_high, byte = divmod(place % 32, 16)
            byte += place // 32 * 16 - first % 32
            assert pairs == (1 << 8 * is_high + byte // 2 if 0 <= byte < run else 0)


def mapped(function: Callable[..., object], x: Tensor, dtype: torch.dtype) -> Tensor:
    """`function` of every item of `x` [n]."""
    padded = torch.nn.functional.pad(x, (0, -len(x) % min(ITEMS, len(x))))
    out = torch.empty(len(padded), dtype=dtype)
    n = min(ITEMS, len(x))
    map_kernel[(len(padded) // n,)](padded, out, F=function, N=n)
    return out[: len(x)]


def halves() -> tuple[Tensor, Tensor]:
    return torch.empty(256, dtype=torch.float16), torch.empty(256, dtype=torch.float16)


@pytest.mark.parametrize("offset", [0, 8])
def test_nibbles(offset: int) -> None:
    low, high = halves()
    map_two_kernel[(1,)](BYTES, low, high, F=unpack.unpack_nibbles, OFFSET=offset)
    assert torch.equal(low, (BYTES & 15).half() - offset)
    assert torch.equal(high, (BYTES >> 4).half() - offset)


def test_codebook() -> None:
    low, high = halves()
    map_two_kernel[(1,)](BYTES, low, high, F=unpack.unpack_codebook, OFFSET=CODEBOOK)
    table = torch.tensor(IQ4_CODEBOOK, dtype=torch.float16)
    assert torch.equal(low, table[(BYTES & 15).int()])
    assert torch.equal(high, table[(BYTES >> 4).int()])


@pytest.mark.parametrize("offset", [0, 16])
def test_five_bits(offset: int) -> None:
    low, high = halves()
    for above in (0, 0x000F_0000, 0x0000_000F, 0x0006_0009, 0x0001_0008):
        five_bits_kernel[(1,)](BYTES, low, high, above, OFFSET=offset)
        lane = torch.arange(256) % 4
        assert torch.equal(low, (BYTES & 15) + ((above >> lane) & 1) * 16.0 - offset)
        assert torch.equal(high, (BYTES >> 4) + ((above >> (lane + 16)) & 1) * 16.0 - offset)


@pytest.mark.parametrize(("shift", "above_shift"), [(0, 0), (4, 2), (0, 6)])
def test_bit_fields_of_words(shift: int, above_shift: int) -> None:
    got, _ = halves()
    for above in (0, 0x1234_5678, -0x1234_5678, -1):
        bits_of_words_kernel[(1,)](BYTES, got, above, SHIFT=shift, ABOVE=above_shift)
        high = (above >> (8 * (torch.arange(256) % 4) + above_shift)) & 3
        assert torch.equal(got, (BYTES >> shift & 15) + high * 16.0 - 32)


def test_signed_bytes() -> None:
    got = mapped(signed_bytes, BYTES, torch.float16)
    assert torch.equal(got, BYTES.view(torch.int8).half())


def test_decode_fp8() -> None:
    want = BYTES.view(torch.float8_e4m3fn).half()
    want[[0x7F, 0xFF]] = torch.tensor([480.0, -480.0], dtype=torch.float16)
    assert torch.equal(mapped(e4m3, BYTES, torch.float16), want)
    got = mapped(e5m2, BYTES, torch.float16)
    torch.testing.assert_close(
        got, BYTES.view(torch.float8_e5m2).half(), rtol=0, atol=0, equal_nan=True
    )


@pytest.mark.parametrize(
    ("function", "dtype", "largest"),
    [
        (float_bits.encode_e4m3, torch.float8_e4m3fn, 448.0),
        (float_bits.encode_e5m2, torch.float8_e5m2, 57344.0),
    ],
)
def test_encode_fp8(function: Callable[..., object], dtype: torch.dtype, largest: float) -> None:
    x = fp8_inputs()
    want = x.clamp(-largest, largest).to(dtype).view(torch.uint8)
    assert torch.equal(mapped(function, x, torch.uint8), want)


def test_bf16() -> None:
    x = fp8_inputs()
    got = mapped(float_bits.encode_bf16, x, torch.uint16).view(torch.bfloat16)
    torch.testing.assert_close(got, x.bfloat16(), rtol=0, atol=0, equal_nan=True)
    codes = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16)
    got = mapped(float_bits.decode_bf16, codes, torch.float32)
    torch.testing.assert_close(
        got, codes.view(torch.bfloat16).float(), rtol=0, atol=0, equal_nan=True
    )
