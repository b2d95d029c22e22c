"""Formats encode byte for byte as ggml, and sensibly where ggml would yield no numbers."""

from __future__ import annotations

import base64
import json
import math

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as GGMLType
from gguf import quants
from hypothesis import given, settings
from hypothesis import strategies as st

from localkv.quant_formats import FORMATS, TOKEN_FORMATS, WEIGHT_FORMATS, QuantFormat
from localkv.quant_formats.base import split_blocks
from support.fp8_inputs import fp8_inputs
from support.packed_rows import join_planes
from support.paths import DATA

PACKED = [
    fmt
    for fmt in TOKEN_FORMATS.values()
    if fmt.shares_scale and not fmt.row_planes and not fmt.n_centroids
]
FP8 = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
TOKEN = {f"{name}_token": dtype for name, dtype in FP8.items()}
LARGEST = {"fp8_e4m3": 448.0, "fp8_e5m2": 57344.0}
FLOAT_MAX = float(np.finfo(np.float32).max)


def gguf_py_packs(fmt: QuantFormat) -> bool:
    """Whether gguf-py can pack a type, and not only read it."""
    if fmt.ggml_type is None:
        return False
    try:
        quantize(fmt, np.zeros((1, fmt.block_size), np.float32))
    except NotImplementedError:
        return False
    return True


def quantize(fmt: QuantFormat, x: np.ndarray) -> np.ndarray:
    """What gguf-py makes of float32 [n_blocks, 32]."""
    with np.errstate(all="ignore"):
        return quants.quantize(x, GGMLType(fmt.ggml_type))


LIKE_GGUF_PY = [fmt for fmt in PACKED if gguf_py_packs(fmt)]

by_format = pytest.mark.parametrize("fmt", PACKED, ids=lambda fmt: fmt.name)
by_gguf_format = pytest.mark.parametrize("fmt", LIKE_GGUF_PY, ids=lambda fmt: fmt.name)


def encode(fmt: QuantFormat, x: np.ndarray) -> np.ndarray:
    """Packed rows: float32 [..., n] -> uint8 [..., bytes of a row]."""
    planes = fmt.codec.encode(x)
    assert [plane.shape[-1] for plane in planes] == [plane.n_bytes for plane in fmt.planes]
    assert {plane.dtype for plane in planes} == {np.dtype(np.uint8)}
    return join_planes(planes)


def decode(fmt: QuantFormat, rows: np.ndarray) -> np.ndarray:
    return fmt.codec.decode(split_blocks(fmt, rows))


def has_minimum(fmt: QuantFormat) -> bool:
    return any(plane.name == "m" for plane in fmt.all_planes)


def scales(fmt: QuantFormat, rows: np.ndarray) -> np.ndarray:
    """The fp16 numbers in front of each block, d and perhaps m: [n_blocks, 1 or 2]."""
    n_bytes = 4 if has_minimum(fmt) else 2
    return np.ascontiguousarray(rows[:, :n_bytes]).view(np.float16)


def steps(fmt: QuantFormat) -> int:
    """Scales that the value furthest from 0, or from the minimum, is away from it."""
    block = np.zeros((1, 32), np.float32)
    block[0, 0] = 1
    return round(1 / float(scales(fmt, encode(fmt, block))[0, 0]))


def has_zero(fmt: QuantFormat) -> bool:
    """Whether 0 has a code, beside a large value."""
    x = np.zeros((1, 32), np.float32)
    x[0, 0] = 1
    return bool((decode(fmt, encode(fmt, x))[0, 1:] == 0).all())


def assert_equals_gguf_py(fmt: QuantFormat, x: np.ndarray) -> None:
    """Byte for byte, of the blocks for which gguf-py's scales are numbers and can be divided by."""
    rows, want = encode(fmt, x), quantize(fmt, x)
    exact = x.astype(np.float64)
    span = exact.max(-1) - exact.min(-1) if has_minimum(fmt) else np.abs(exact).max(-1)
    usable = np.isfinite(scales(fmt, want)).all(-1) & ((span == 0) | (span > 1e-36))
    got, want = rows[usable], want[usable]
    if has_minimum(fmt):  # a minimum among zeros of both signs can have either
        for blocks in (got, want):
            blocks[(blocks[:, 2:4] == (0, 0x80)).all(-1), 3] = 0
    differing = (got != want).any(-1)
    assert not differing.any(), f"{differing.sum()} of {len(got)} blocks, {x[usable][differing][0]}"
    # and the others decode to numbers, none of them larger than those encoded
    decoded = decode(fmt, rows[~usable])
    assert np.isfinite(decoded).all()
    assert (np.abs(decoded).max(-1) <= np.abs(exact[~usable]).max(-1) * 1.001 + 1e-7).all()


def blocks_of(elements: st.SearchStrategy[float]) -> st.SearchStrategy[list[float]]:
    return st.lists(elements, min_size=32, max_size=32)


FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
BLOCKS = st.one_of(
    blocks_of(FINITE),
    blocks_of(st.floats(-4, 4, width=32)),
    blocks_of(st.floats(-(2**-126), 2**-126, width=32)),  # denormals
    blocks_of(st.floats(-7e4, 7e4, width=32)),  # minima around fp16's largest
    blocks_of(st.integers(-16, 16).map(float)),  # equal magnitudes of both signs
    blocks_of(st.integers(-254, 254).map(lambda n: n / 2)),  # halves
    blocks_of(st.sampled_from([0.0, -0.0, 1.0])),
)


@by_gguf_format
@settings(max_examples=150)
@given(blocks=st.lists(BLOCKS, min_size=1, max_size=3))
def test_any_blocks(fmt: QuantFormat, blocks: list[list[float]]) -> None:
    assert_equals_gguf_py(fmt, np.array(blocks, np.float32))


@by_gguf_format
def test_many_blocks(fmt: QuantFormat) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((20000, 32))
    assert_equals_gguf_py(fmt, x.astype(np.float32))
    assert_equals_gguf_py(
        fmt, (x * np.exp2(rng.integers(-130, 100, (20000, 1)))).astype(np.float32)
    )
    assert_equals_gguf_py(fmt, rng.standard_t(1.2, (20000, 32)).astype(np.float32))
    assert_equals_gguf_py(fmt, rng.integers(-9, 10, (20000, 32)).astype(np.float32))
    # scales that are rounded down to fp16's largest
    largest = 65519 * steps(fmt)
    x = rng.uniform(0 if has_minimum(fmt) else -1, 1, (2000, 32)) * largest
    x[:, 0] = largest
    x[:, 1] = 0
    assert_equals_gguf_py(fmt, x.astype(np.float32))


@by_gguf_format
def test_ties(fmt: QuantFormat) -> None:
    """Values halfway between two codes, where the scale is a power of two."""
    largest = steps(fmt)
    rng = np.random.default_rng(1)
    x = rng.integers(-2 * abs(largest), 2 * abs(largest), (2000, 32)) / 2
    if has_minimum(fmt):
        x = np.abs(x)
        x[:, 1] = 0
    x[:, 0] = largest
    x *= np.exp2(rng.integers(-12, 12, (2000, 1)))
    x[1::2] *= -1
    assert_equals_gguf_py(fmt, x.astype(np.float32))


@by_gguf_format
def test_the_floats_beside_a_tie(fmt: QuantFormat) -> None:
    x = np.zeros((4, 32), np.float32)
    x[:, 0] = steps(fmt)
    ties = np.arange(1, 8, dtype=np.float32) - np.float32(0.5)
    x[0, 1:8] = ties
    x[1, 1:8] = np.nextafter(ties, np.float32(0))
    x[2, 1:8] = np.nextafter(ties, np.float32(9))
    x[3, 1:8] = -ties
    if has_minimum(fmt):
        x = np.abs(x)
    assert_equals_gguf_py(fmt, x)


@by_format
def test_blocks_that_are_all_one_value(fmt: QuantFormat) -> None:
    values = np.float32([0, -0.0, 1, -1, 0.3, 1e-4, -300, 65504, -65504, 1e-45, -1e-38])
    x = np.repeat(values[:, None], 32, axis=1)
    decoded = decode(fmt, encode(fmt, x))
    np.testing.assert_allclose(decoded, x, rtol=6e-4, atol=2e-6)
    assert (decoded[:2] == 0).all()


def test_iq4_nl_equals_llama_cpp() -> None:
    fixture = json.loads((DATA / "llama_cpp_iq4_nl.json").read_text())
    blocks = np.array([*range(fixture["n_first"]), *fixture["others"]])
    want = np.frombuffer(base64.b64decode(fixture["packed"]), np.uint8).reshape(-1, 18)
    x = iq4_nl_values(blocks)
    differing = (encode(FORMATS["iq4_nl"], x) != want).any(-1)
    assert not differing.any(), f"blocks {blocks[differing]}"


def iq4_nl_values(blocks: np.ndarray) -> np.ndarray:
    """`values` of make_llama_cpp_iq4_nl.py."""
    i = (32 * blocks[:, None] + np.arange(1, 33)).astype(np.uint64)
    i *= np.uint64(0x9E3779B97F4A7C15)
    i = (i ^ (i >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    i = (i ^ (i >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    sums = i.view(np.uint16).reshape(-1, 32, 4).astype(np.int32).sum(-1) - 131070
    x = sums.astype(np.float32) * np.float32(2.0**-15)
    x[np.arange(len(x)), blocks % 32] *= np.where(blocks % 3 == 0, 8, 1)
    x *= np.exp2(blocks % 35 - 17)[:, None]
    ties = blocks[blocks < 15]
    x[blocks < 15, 0] = -127
    x[blocks < 15, 1:] = (31 * ties[:, None] + np.arange(31) - 231) / 2
    return x.astype(np.float32)


def test_iq4_nl_of_tiny_values_is_zero() -> None:
    x = np.full((3, 32), 9.9e-16, np.float32)
    x[1] *= -1
    x[2] = 0
    assert not encode(FORMATS["iq4_nl"], x).any()


@by_format
def test_huge_values_saturate(fmt: QuantFormat) -> None:
    """Beyond the range of a type's scale come its largest values; the rest of the block is kept."""
    rng = np.random.default_rng(2)
    x = rng.standard_normal((12, 32)).astype(np.float32)
    x[:, 3] = np.float32([1, -1] * 6) * np.repeat(np.float32([1e9, 1e30, FLOAT_MAX]), 4)
    x[2::4, 5] = -x[2::4, 3]
    x[3::4, 5] = -x[3::4, 3]
    decoded = decode(fmt, encode(fmt, x))
    largest = decoded[:, 3]
    assert (np.sign(largest) == np.sign(x[:, 3])).all()
    n_steps = abs(steps(fmt)) - has_minimum(fmt)  # the minimum takes the place of one
    for row, value in zip(x, largest, strict=True):
        alone = has_minimum(fmt) and value < 0  # a minimum reaches no further than fp16
        if not has_zero(fmt):  # the others of a block pull its scale down
            n_steps = 0.6
        assert abs(value) >= (65504 if alone else 65504 * n_steps * 0.99), row
    small = np.abs(x) < 10
    assert (np.abs(decoded[small]) <= 65504).all()
    assert np.isfinite(decoded).all()
    if has_minimum(fmt):
        decoded = decode(fmt, encode(fmt, np.full((1, 32), -1e9, np.float32)))
        assert (decoded == -65504).all()


@by_format
@settings(max_examples=60)
@given(block=blocks_of(st.sampled_from([0.0, 1.0, -3.0, np.inf, -np.inf])))
def test_infinities_are_as_the_largest_floats(fmt: QuantFormat, block: list[float]) -> None:
    x = np.array([block], np.float32)
    rows = encode(fmt, x)
    np.testing.assert_array_equal(rows, encode(fmt, np.clip(x, -FLOAT_MAX, FLOAT_MAX)))
    assert np.isfinite(decode(fmt, rows)).all()


@by_format
def test_a_nan_shows(fmt: QuantFormat) -> None:
    """Its whole block decodes to NaN, the others as without it."""
    x = np.random.default_rng(3).standard_normal((6, 4 * 32)).astype(np.float32)
    want = decode(fmt, encode(fmt, x))
    for row, position in enumerate((32, 40, 63)):
        x[row, position] = np.nan
    x[1, 33] = np.inf
    x[2, 33] = -np.inf
    x[:3, :32] = 0
    want[:3, :32] = 0
    decoded = decode(fmt, encode(fmt, x))
    assert np.isnan(decoded[:3, 32:64]).all()
    decoded[:3, 32:64] = want[:3, 32:64]
    np.testing.assert_array_equal(decoded, want)


@pytest.mark.parametrize("fmt", TOKEN_FORMATS.values(), ids=lambda fmt: fmt.name)
def test_any_leading_shape_and_strides(fmt: QuantFormat) -> None:
    x = np.random.default_rng(4).standard_normal((6, 4, 64), np.float32)
    before = x.copy()
    want = fmt.codec.encode(x)
    assert np.array_equal(x, before)  # the input is left alone
    views = {
        "transposed": x.swapaxes(0, 1),
        "row": x[3, 2],
        "every second": x[::2],
        "channels last": np.moveaxis(np.moveaxis(x, -1, 0).copy(), 0, -1),
        "none": x[:0],
    }
    picks = {
        "transposed": lambda p: p.swapaxes(0, 1),
        "row": lambda p: p[3, 2],
        "every second": lambda p: p[::2],
        "channels last": lambda p: p,
        "none": lambda p: p[:0],
    }
    for name, view in views.items():
        got = fmt.codec.encode(view)
        for plane, whole in zip(got, want, strict=True):
            assert plane.shape == picks[name](whole).shape
            assert np.array_equal(plane, picks[name](whole)), name
        assert fmt.codec.decode(got).shape == view.shape


def code_bits(fmt: QuantFormat) -> float:
    """Bits of a code, or of a float's significand with the bit that is not stored."""
    if fmt.shares_scale:
        n_bytes = sum(plane.n_bytes for plane in fmt.planes if plane.name not in ("d", "m"))
        return 8 * n_bytes / fmt.block_size
    codec, fractions = fmt.codec, 1 + np.exp2(-np.arange(1, 24, dtype=np.float32))
    # beside the largest number, with which a scale of the row is 1
    rows = np.stack([np.full_like(fractions, fmt.largest or 1), fractions], -1)
    return 1 + int((codec.decode(codec.encode(rows)) == rows).all(-1).sum())


LEAST_ERROR = {4: 0.1175**0.5, 8: 0.03454**0.5, 16: 0.009497**0.5}
"""Error over norm of the best numbers for normal values (Max, 1960, table I)."""
OF_LEAST_ERROR = {4: 0.830, 8: 0.750, 16: 0.706}
"""Less of it, as the largest of 64 values is kept, and a block has a scale with a sign."""


@pytest.mark.parametrize("fmt", TOKEN_FORMATS.values(), ids=lambda fmt: fmt.name)
def test_each_bit_halves_the_error(fmt: QuantFormat) -> None:
    """Error over norm for Gaussian rows: a mistake in a format would stand out."""
    x = np.random.default_rng(5).standard_normal((4096, 64), np.float32)
    error = fmt.codec.decode(fmt.codec.encode(x)) - x
    n_steps = 2 ** code_bits(fmt) - has_minimum(fmt)  # from the minimum to the last code
    in_steps = float(np.linalg.norm(error) / np.linalg.norm(x)) * n_steps
    if fmt.name == "f32":
        assert in_steps == 0
    elif fmt.n_centroids:
        share = in_steps / n_steps / LEAST_ERROR[fmt.n_centroids]
        assert share == pytest.approx(OF_LEAST_ERROR[fmt.n_centroids], rel=0.01)
    elif fmt.shares_scale:  # a block's largest value is some 2.1 times its norm, a row's 2.6
        assert 1.15 < in_steps < (1.55 if fmt.row_planes else 1.42)
    else:
        assert 0.40 < in_steps < 0.45


def test_cache_types() -> None:
    """Types that ggml has are compared with it in `test_formats.py`."""
    for fmt in TOKEN_FORMATS.values():
        of_rows = fmt.bits_per_value(64) - fmt.bits_per_value(128)
        assert of_rows == 0.125 * len(fmt.row_planes)
        for row_values in (64, 96, 128):
            assert 8 * fmt.row_bytes(row_values) == fmt.bits_per_value(row_values) * row_values
    assert {fmt.bits_per_value(128) for fmt in TOKEN_FORMATS.values() if fmt.largest} == {8, 8.125}
    assert None not in WEIGHT_FORMATS
    assert not any(fmt.name.startswith("fp8") for fmt in WEIGHT_FORMATS.values())
    by_head = {name for name, fmt in TOKEN_FORMATS.items() if fmt.scales_by_head}
    assert by_head == {"fp8_e4m3_head", "fp8_e5m2_head"}
    for name, fmt in TOKEN_FORMATS.items():
        dtype = {fp8: dtype for fp8, dtype in FP8.items() if name.startswith(fp8)}
        assert [fmt.largest] == ([torch.finfo(d).max for d in dtype.values()] or [0.0])


@pytest.mark.parametrize("name", FP8)
def test_fp8_encodes_as_torch_casts(name: str) -> None:
    x = fp8_inputs()
    (plane,) = FORMATS[name].codec.encode(x.numpy())
    want = x.clamp(-LARGEST[name], LARGEST[name]).to(FP8[name])
    assert np.array_equal(plane.ravel(), want.view(torch.uint8).numpy())
    decoded = FORMATS[name].codec.decode([plane])
    assert np.array_equal(np.isnan(decoded), np.isnan(x.numpy()))
    assert np.nanmax(np.abs(decoded)) == LARGEST[name]


@pytest.mark.parametrize("name", FP8)
def test_fp8_is_the_nearest(name: str) -> None:
    """Against the 256 values themselves: the nearest one, of two equally near the even one."""
    codes = np.arange(256, dtype=np.uint8)
    values = FORMATS[name].codec.decode([codes[:, None]])
    as_torch = torch.from_numpy(codes).view(FP8[name]).float().numpy()
    np.testing.assert_array_equal(values, as_torch)
    n_mantissa, bias = (3, 7) if name == "fp8_e4m3" else (2, 15)
    n_finite = 127 if name == "fp8_e4m3" else 124
    exponents, mantissas = np.divmod(np.arange(n_finite), 1 << n_mantissa)
    fractions = np.where(exponents == 0, 0, 1) + mantissas / (1 << n_mantissa)
    positive = fractions * np.exp2(np.maximum(exponents, 1) - bias)
    np.testing.assert_array_equal(values[:n_finite], positive)
    np.testing.assert_array_equal(values[128 : 128 + n_finite], -positive)
    assert positive[-1] == LARGEST[name]

    x = fp8_inputs()
    x = x[~x.isnan()].numpy()
    magnitude = np.abs(x).astype(np.float64)
    halfway = (positive[:-1] + positive[1:]) / 2
    code = np.searchsorted(halfway, magnitude)  # of those halfway, the lower one
    tie = halfway[np.minimum(code, len(halfway) - 1)] == magnitude
    code += tie & (code % 2 == 1)
    want = code + 128 * np.signbit(x)
    (plane,) = FORMATS[name].codec.encode(x)
    np.testing.assert_array_equal(plane.ravel(), want)


HALVES = np.arange(1, 0x7C00, dtype=np.uint16).view(np.float16).astype(np.float64)
"""All positive finite fp16 numbers."""


def as_torch_rounds(name: str, x: np.ndarray) -> np.ndarray:
    """The codes of torch's cast to the type of the values: uint8."""
    return torch.from_numpy(x).to(TOKEN[name]).view(torch.uint8).numpy()


def check_token(name: str, x: np.ndarray) -> None:
    """Rows without NaN: the smallest scale that fits, codes as torch casts, a bounded error."""
    fmt = TOKEN_FORMATS[name]
    values, d = fmt.codec.encode(x)
    assert (values.shape, d.shape) == ((*x.shape, 1), (*x.shape[:-1], 1, 2))
    scale = d.view(np.float16)[..., 0].astype(np.float64)
    absmax = np.abs(x).max(-1, keepdims=True)
    place = np.searchsorted(HALVES, (absmax / np.float32(fmt.largest)).astype(np.float64))
    assert np.array_equal(scale, HALVES[np.minimum(place, len(HALVES) - 1)])
    absmax = absmax.astype(np.float64)
    fits = absmax <= 65504 * fmt.largest
    # nothing is beyond the largest, but for the last bit of a float32
    assert (absmax[fits] / scale[fits] <= fmt.largest * (1 + 2**-23)).all()

    with np.errstate(over="ignore"):
        scaled = (x / scale.astype(np.float32)).clip(-fmt.largest, fmt.largest)
    assert np.array_equal(values[..., 0], as_torch_rounds(name, scaled))
    decoded = fmt.codec.decode([values, d]).astype(np.float64)
    codes = torch.from_numpy(values[..., 0]).view(TOKEN[name]).double().numpy()
    assert np.array_equal(decoded, codes * scale)
    within = x.astype(np.float64).clip(-65504 * fmt.largest, 65504 * fmt.largest)
    relative, smallest = (2**-4, 2**-9) if name.startswith("fp8_e4m3") else (2**-3, 2**-16)
    limit = relative * np.abs(within) + smallest * scale
    assert (np.abs(decoded - within) <= 1.001 * limit).all()


@pytest.mark.parametrize("name", TOKEN)
def test_fp8_rows_of_any_size(name: str) -> None:
    rng = np.random.default_rng(7)
    x = rng.standard_normal((4000, 48), np.float32)
    x[1::2] *= np.exp2(rng.integers(-149, 127, (2000, 1))).astype(np.float32)
    check_token(name, x)
    # rows whose scale is an fp16 number, and the floats beside them
    exact = HALVES.astype(np.float32) * np.float32(TOKEN_FORMATS[name].largest)
    for absmax in (exact, np.nextafter(exact, exact + 1), np.nextafter(exact, exact - 1)):
        rows = np.stack([absmax, -absmax / 3, absmax / 1000, np.zeros_like(absmax)], -1)
        check_token(name, rows)
        check_token(name, -rows)


@pytest.mark.parametrize("name", TOKEN)
@settings(max_examples=150)
@given(rows=st.lists(BLOCKS, min_size=1, max_size=3))
def test_any_fp8_rows(name: str, rows: list[list[float]]) -> None:
    check_token(name, np.array(rows, np.float32))


@pytest.mark.parametrize("name", TOKEN)
@pytest.mark.filterwarnings("error")
def test_fp8_rows_that_are_no_ordinary_numbers(name: str) -> None:
    """Zeros stay, infinities are as the largest float, and a NaN shows in its own row only."""
    codec = TOKEN_FORMATS[name].codec
    x = np.zeros((6, 32), np.float32)
    x[0, 1] = -0.0
    x[1] = 1e-45
    x[2, :2] = math.inf, -math.inf
    x[3, :2] = FLOAT_MAX, -FLOAT_MAX
    x[4, :3] = math.nan, math.inf, 1.0
    x[5] = np.linspace(-2, 2, 32)
    values, d = codec.encode(x)
    decoded = codec.decode([values, d])
    assert not decoded[:2].any()
    assert np.signbit(decoded[0]).nonzero()[0].tolist() == [1]
    assert np.array_equal(decoded[2], decoded[3])
    limit = 65504 * TOKEN_FORMATS[name].largest
    assert decoded[2, :3].tolist() == [limit, -limit, 0]
    assert np.isnan(decoded[4]).all()
    assert np.isnan(d[4].view(np.float16)).all()
    assert np.array_equal(decoded[5], codec.decode(codec.encode(x[5])))


def test_fp8_by_head_has_the_codes_of_fp8() -> None:
    for name in FP8:
        assert TOKEN_FORMATS[f"{name}_head"].codec is TOKEN_FORMATS[name].codec


ROWS_OF_64 = st.lists(BLOCKS, min_size=2, max_size=2).map(lambda pair: pair[0] + pair[1])


@settings(max_examples=100)
@given(row=ROWS_OF_64)
def test_any_row_of_8_bits(row: list[float]) -> None:
    """q8_t: the smallest scale that fits, and the nearest codes, in float64."""
    x = np.array([row], np.float32)
    fmt = TOKEN_FORMATS["q8_t"]
    planes = fmt.codec.encode(x)
    (d,) = planes[1].view(np.float16)[..., 0].astype(np.float64)[0]
    exact = x.astype(np.float64).clip(-65504 * 127, 65504 * 127)
    assert d == HALVES[np.searchsorted(HALVES, np.float32(np.abs(exact).max()) / np.float32(127))]
    decoded = fmt.codec.decode(planes).astype(np.float64)
    assert (np.abs(decoded - exact) <= d * (0.5 + 2**-15)).all()
    np.testing.assert_array_equal(decoded, planes[0].view(np.int8).reshape(1, 64) * d)


@settings(max_examples=100)
@given(row=ROWS_OF_64)
def test_any_row_of_4_bits(row: list[float]) -> None:
    """q4_t: steps from the least value to the largest, in float64."""
    x = np.array([row], np.float32)
    fmt = TOKEN_FORMATS["q4_t"]
    planes = fmt.codec.encode(x)
    d, m = (float(plane.view(np.float16)[0, 0, 0]) for plane in planes[1:])
    exact = x.astype(np.float64).clip(-65519.99, 65504 * 16)  # fp16's range, once rounded
    low, high = exact.min(), exact.max()
    step = min((high - low) / 15, 65519.99)
    assert abs(m - low) <= 2**-11 * abs(low) + 2**-25
    assert abs(d - step) <= 2**-11 * step + 2**-25
    decoded = fmt.codec.decode(planes).astype(np.float64)
    # the nearest step, of a scale and a minimum that are then rounded
    rounding = 2**-11 * (abs(low) + 15 * step) + 2**-20
    within = exact.clip(low, low + 15 * step)
    assert (np.abs(decoded - within) <= step / 2 * (1 + 2**-15) + rounding).all()


@pytest.mark.parametrize("name", ["q8_t", "q4_t"])
def test_rows_of_integers_that_are_no_ordinary_numbers(name: str) -> None:
    """A NaN shows in its own row only, infinities saturate, and zeros stay."""
    codec = TOKEN_FORMATS[name].codec
    x = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
    x[0, 3], x[1, 40], x[2] = np.nan, np.inf, 0
    decoded = codec.decode(codec.encode(x))
    assert np.isnan(decoded[0]).all()
    assert np.isfinite(decoded[1:]).all()
    assert decoded[1, 40] >= 65504 * 14
    assert (decoded[2] == 0).all()
    np.testing.assert_array_equal(decoded[3], codec.decode(codec.encode(x[3])))
