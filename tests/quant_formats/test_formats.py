"""Formats decode bit for bit as gguf-py, from planes with any strides, and tiles as the whole."""

from __future__ import annotations

import hashlib
import importlib
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as GGMLType
from gguf import quants

from localkv.loader.gguf_file import open_gguf
from localkv.quant_formats import FORMATS, TOKEN_FORMATS, WEIGHT_FORMATS, QuantFormat
from localkv.quant_formats import packed_tensor as packed_tensor_module
from localkv.quant_formats.base import split_blocks
from localkv.quant_formats.packed_tensor import PackedTensor
from support.packed_rows import join_planes

GGML_FORMATS = [fmt for fmt in FORMATS.values() if fmt.ggml_type is not None]
FLOATS = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}

# float16 bits: zeros, denormals, ones, the largest, infinities, NaNs
HALVES = [0, 0x8000, 1, 0x8001, 0x03FF, 0x0400, 0x3C00, 0xBC00, 0x7BFF, 0xFBFF]
HALVES += [0x7C00, 0xFC00, 0x7E00, 0xFE00, 0x7C01, 0xFDFF]

by_format = pytest.mark.parametrize("fmt", GGML_FORMATS, ids=lambda fmt: fmt.name)


def dequantize(fmt: QuantFormat, rows: np.ndarray) -> np.ndarray:
    """What gguf-py makes of packed rows: float32."""
    with np.errstate(all="ignore"):
        return quants.dequantize(rows, GGMLType(fmt.ggml_type))


def random_rows(fmt: QuantFormat, *shape: int, seed: int = 0) -> np.ndarray:
    """Packed rows of random bits, `shape` counts blocks on the last axis."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (*shape[:-1], shape[-1] * fmt.block_bytes), np.uint8)


def decode(fmt: QuantFormat, rows: np.ndarray) -> np.ndarray:
    return fmt.codec.decode(split_blocks(fmt, rows))


def assert_same_bits(actual: np.ndarray, expected: np.ndarray) -> None:
    """Equal shapes and bits, where every NaN counts as the same."""
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype == np.float32
    same = actual.view(np.uint32) == expected.view(np.uint32)
    same |= np.isnan(actual) & np.isnan(expected)
    assert same.all(), f"{(~same).sum()} of {same.size} values differ"


@by_format
def test_facts_are_those_of_ggml(fmt: QuantFormat) -> None:
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[GGMLType(fmt.ggml_type)]
    assert (fmt.block_size, fmt.block_bytes) == (block_size, block_bytes)
    assert fmt.name.lower() == GGMLType(fmt.ggml_type).name.lower()
    assert fmt.bits_per_value(3 * block_size) == 8 * block_bytes / block_size
    assert fmt.row_bytes(3 * block_size) == 3 * block_bytes
    if block_size > 1:
        with pytest.raises(ValueError, match="not a multiple"):
            fmt.row_bytes(block_size + 1)
    assert WEIGHT_FORMATS[fmt.ggml_type] is fmt


@by_format
@pytest.mark.parametrize("shape", [(1,), (7,), (40, 3), (2, 3, 2)], ids=str)
def test_decode_random_bits(fmt: QuantFormat, shape: tuple[int, ...]) -> None:
    # 40 x 3 blocks and up: most bytes of every field occur
    for seed in range(4):
        rows = random_rows(fmt, *shape, seed=seed)
        assert_same_bits(decode(fmt, rows), dequantize(fmt, rows))


@by_format
def test_decode_a_megabyte(fmt: QuantFormat) -> None:
    rows = random_rows(fmt, 64, (1 << 14) // fmt.block_size)
    assert_same_bits(decode(fmt, rows), dequantize(fmt, rows))


@by_format
def test_decode_extreme_scales(fmt: QuantFormat) -> None:
    """Zeros of both signs, denormals, infinities and NaNs as d, and as m or dmin."""
    blocks = random_rows(fmt, len(HALVES) ** 2, 4).reshape(len(HALVES), len(HALVES), 4, -1)
    start = 0
    for plane in fmt.planes:
        bits = np.array(HALVES, "<u2").view(np.uint8).reshape(-1, 2)
        if plane.name == "d":
            blocks[..., start : start + 2] = bits[:, None, None]
        elif plane.name in ("m", "dmin"):
            blocks[..., start : start + 2] = bits[None, :, None]
        start += plane.n_bytes
    rows = blocks.reshape(len(HALVES) ** 2, -1)
    assert_same_bits(decode(fmt, rows), dequantize(fmt, rows))


@by_format
def test_decode_planes_with_odd_strides_and_offsets(fmt: QuantFormat) -> None:
    rows = random_rows(fmt, 6, 5)
    expected = dequantize(fmt, rows)
    padded = np.zeros((rows.shape[0], rows.shape[1] + 3), np.uint8)
    padded[:, 1:-2] = rows
    assert_same_bits(decode(fmt, padded[:, 1:-2]), expected)
    # planes that are contiguous, as a cache holds them
    planes = [plane.copy() for plane in split_blocks(fmt, rows)]
    assert_same_bits(fmt.codec.decode(planes), expected)
    # and as it hands out pages of them, or rows of every second
    planes = [plane[::-1].copy()[::-1] for plane in planes]
    assert_same_bits(fmt.codec.decode(planes), expected)
    assert_same_bits(fmt.codec.decode([plane[::2] for plane in planes]), expected[::2])
    planes = [np.asfortranarray(plane) for plane in planes]
    assert_same_bits(fmt.codec.decode(planes), expected)
    assert fmt.codec.decode([plane[:0] for plane in planes]).shape == (0, expected.shape[1])
    # one block, at an odd offset
    for n in range(rows.shape[0]):
        assert_same_bits(decode(fmt, padded[n, 1:-2]), expected[n])
        single = padded[n, 1 : 1 + fmt.block_bytes]
        assert_same_bits(decode(fmt, single), expected[n, : fmt.block_size])


@pytest.mark.parametrize(
    ("name", "values"),
    [
        (
            "q1_0",
            "+-+--++++---+++++--+-+-++-----+--++----------+-++-+-+--+-+-+-++--++--+--++++-+-+",
        ),
        ("q2_0", "00120-2201110--010----1100011110101-2211-22102-2221100121-100122"),
    ],
)
def test_few_bits_are_what_ggml_s_c_makes_of_them(name: str, values: str) -> None:
    """The first values of a block that `dequantize_row_*` of llama.cpp b11434 decoded, in terms of
    their scale."""
    block = np.frombuffer(bytes.fromhex("8b3ce5f1a94106a0956a26afbccdafe562f9"), np.uint8)
    decoded = decode(FORMATS[name], block) / np.float32(1.1357421875)
    words = {"-": -1.0, "+": 1.0, "0": 0.0, "1": 1.0, "2": 2.0}
    assert decoded[: len(values)].tolist() == [words[value] for value in values]


DECODED_BY_GGML = {
    "mxfp4": "e37ae023fbfe1e22",
    "nvfp4": "322454db79f92cab",
    "q1_0": "373f06069eba790d",
    "q2_0": "4769ef083eade46e",
}
"""SHA-256, in part, of what `dequantize_row_<type>` of llama.cpp b11434 makes of these blocks."""


@pytest.mark.parametrize("name", DECODED_BY_GGML)
def test_small_types_are_what_ggml_s_library_makes_of_them(name: str) -> None:
    fmt = FORMATS[name]
    numbers = np.arange(4096 * fmt.block_bytes, dtype=np.uint64) * 2654435761
    blocks = (numbers >> 13).astype(np.uint8).reshape(4096, -1)
    if name.startswith("q"):
        blocks[:, 1] &= 0xBF  # scales that are finite
    with np.errstate(all="ignore"):
        values = PackedTensor(fmt, blocks, (4096, fmt.block_size)).decode()
    assert hashlib.sha256(values.tobytes()).hexdigest()[:16] == DECODED_BY_GGML[name]


@by_format
def test_decode_leaves_its_input_alone(fmt: QuantFormat) -> None:
    rows = random_rows(fmt, 3, 4)
    before = rows.copy()
    decode(fmt, rows)
    np.testing.assert_array_equal(rows, before)


@by_format
def test_planes_split_and_join(fmt: QuantFormat) -> None:
    rows = random_rows(fmt, 2, 3, 4)
    planes = split_blocks(fmt, rows)
    for plane, facts in zip(planes, fmt.planes, strict=True):
        assert plane.shape == (2, 3, 4, facts.n_bytes)
        assert np.shares_memory(plane, rows)
    assert np.array_equal(join_planes(planes), rows)


def test_decode_conformance_weights(conformance: Path) -> None:
    seen = set()
    for path in (*conformance.glob("weights/*.gguf"), conformance / "archs2/gpt-oss-mxfp4.gguf"):
        opened = open_gguf(path)
        for name, tensor in opened.tensors.items():
            rows = opened.data(name)
            assert_same_bits(decode(tensor.format, rows), dequantize(tensor.format, rows))
            seen.add(tensor.format.name)
    others = {fmt.name for fmt in GGML_FORMATS if fmt.name.startswith(("iq1", "iq2", "iq3", "tq"))}
    others |= {"nvfp4", "q1_0", "q2_0"}
    assert seen >= {fmt.name for fmt in GGML_FORMATS if fmt.block_size > 1} - others


def same_floats(actual: np.ndarray, expected: np.ndarray) -> None:
    """Equal bits; of a NaN only that it is one."""
    is_nan = np.isnan(expected)
    assert np.array_equal(np.isnan(actual), is_nan)
    assert actual[~is_nan].tobytes() == expected[~is_nan].tobytes()


@pytest.mark.parametrize("name", FLOATS)
def test_floats_encode_as_torch_casts(name: str) -> None:
    rng = np.random.default_rng(0)
    # all exponents, NaNs and infinities among them
    x = rng.integers(0, 2**32, (64, 1024), np.uint32).view(np.float32)
    x[0, :8] = [0.0, -0.0, 65504, 65519.99, 65520, 1e-45, np.inf, np.nan]
    x[0, 8:16] = np.array([0x7F800001, 0xFFFFFFFF] * 4, np.uint32).view(np.float32)
    # halfway between two neighbours, where rounding to even shows
    x[1] = np.arange(1024) * 2**-11 + 1
    x[2] = np.arange(1024) * 2**-8 + 1
    (plane,) = FORMATS[name].codec.encode(x)
    expected = torch.from_numpy(x).to(FLOATS[name])
    assert plane.dtype == np.uint8
    assert plane.shape == (64, 1024, FORMATS[name].block_bytes)
    got = torch.from_numpy(plane).view(FLOATS[name])[..., 0]
    same_floats(got.float().numpy(), expected.float().numpy())
    same_floats(FORMATS[name].codec.decode([plane]), expected.float().numpy())


@pytest.mark.parametrize("name", ["f16", "bf16"])
def test_every_half_survives_a_round_trip(name: str) -> None:
    bits = np.arange(2**16, dtype=np.uint16)
    codec = FORMATS[name].codec
    values = codec.decode([bits.view(np.uint8).reshape(-1, 2)])
    again = codec.encode(values)[0].view(np.uint16)[:, 0]
    is_nan = np.isnan(values)
    assert is_nan.sum() == 2 * (2**10 - 1 if name == "f16" else 2**7 - 1)
    assert np.array_equal(again[~is_nan], bits[~is_nan])
    assert np.isnan(codec.decode([again.view(np.uint8).reshape(-1, 2)])[is_nan]).all()


@pytest.mark.parametrize("name", FLOATS)
def test_floats_encode_what_is_not_contiguous(name: str) -> None:
    x = np.arange(24, dtype=np.float32).reshape(4, 6).T
    (plane,) = FORMATS[name].codec.encode(x)
    assert np.array_equal(FORMATS[name].codec.decode([plane]), x)


@by_format
@pytest.mark.parametrize("of", [np.asarray, torch.from_numpy], ids=["numpy", "torch"])
def test_packed_tensor(fmt: QuantFormat, of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = random_rows(fmt, 5, 3, 2)
    shape = (5, 3, 2 * fmt.block_size)
    packed = PackedTensor(fmt, of(rows), shape)
    expected = dequantize(fmt, rows)
    assert packed.n_bytes == rows.nbytes
    assert_same_bits(packed.decode(), expected)
    for part in (2, slice(1, 4), [4, 0, 4]):
        indexed = packed[of(np.array(part)) if isinstance(part, list) else part]
        assert indexed.shape == expected[part].shape
        assert_same_bits(indexed.decode(), expected[part])
    for tile_values, n_tiles in ((1, 5), (3 * shape[-1], 5), (6 * shape[-1], 3), (1 << 20, 1)):
        monkeypatch.setattr(packed_tensor_module, "TILE_VALUES", tile_values)
        tiles = list(packed.row_tiles())
        assert len(tiles) == n_tiles
        for part, tile in tiles:
            assert_same_bits(tile.decode(), expected[part])
        assert [i for part, _ in tiles for i in range(part.start, part.stop)] == list(range(5))


def test_packed_vector() -> None:
    values = np.arange(64, dtype=np.float32)
    packed = PackedTensor(FORMATS["f32"], values.view(np.uint8), (64,))
    assert np.array_equal(packed.decode(), values)
    assert np.shares_memory(packed.decode(), values)
    with pytest.raises(TypeError, match="cannot be indexed"):
        packed[:2]


def test_references_import_no_torch() -> None:
    """Neither do the other files that a start on a CPU reads."""
    program = """
import sys
from localkv.quant_formats import FORMATS, packed_tensor
assert all(fmt.codec.decode for fmt in FORMATS.values())
assert not {"torch", "triton", "numba"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda fmt: fmt.name)
def test_a_format_is_a_folder_of_its_name_or_stands_in_one(fmt: QuantFormat) -> None:
    name = fmt.name.removesuffix("_head")  # whose scales are applied outside
    module = importlib.import_module(f"localkv.quant_formats.{fmt.folder or name.lower()}")
    assert fmt.codec is (getattr(module, name.lower()) if fmt.folder else module)
    assert name in re.split(r"[^\w]+", module.__doc__)
    folder = Path(module.__file__).parent
    known = {"__init__.py", "cpu.py", "gpu.py", "quantize.py"}
    if folder.name == "i_quants":  # the search in its grids is a thought of its own
        known.add("neighbours.py")
    assert {path.name for path in folder.glob("*.py")} <= known


def test_every_cache_format_encodes() -> None:
    for fmt in TOKEN_FORMATS.values():
        x = np.random.default_rng(0).standard_normal((3, 2 * fmt.block_size), np.float32)
        planes = fmt.codec.encode(x)
        shapes = [(2, plane.n_bytes) for plane in fmt.planes]
        shapes += [(1, plane.n_bytes) for plane in fmt.row_planes]
        assert [tuple(plane.shape[1:]) for plane in planes] == shapes
        assert sum(n * n_bytes for n, n_bytes in shapes) == fmt.row_bytes(x.shape[-1])
        assert fmt.codec.decode(planes).shape == x.shape
