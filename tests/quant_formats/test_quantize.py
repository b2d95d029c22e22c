"""Rows of weights become the bytes that llama.cpp makes of them."""

from __future__ import annotations

import hashlib
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localkv.kernels.cpu.quantize.rows import encode_rows
from localkv.quant_formats import FORMATS, KV_FORMATS, WEIGHT_FORMATS, QuantFormat
from localkv.quant_formats.base import split_blocks
from support.packed_rows import join_planes
from support.paths import DATA
from support.quantize_models import N_IN, importance, weights, weights_for

LLAMA_CPP = json.loads((DATA / "llama_cpp_quantize.json").read_text())["types"]
MADE = [fmt for fmt in WEIGHT_FORMATS.values() if fmt.block_size > 1]
OFTEN = ("q4_0", "q4_K", "q6_K")
"""Types that are always tried; kernels of the others take a minute to compile."""


def marked(items: list[tuple[QuantFormat, str]]) -> list[object]:
    return [
        pytest.param(
            fmt,
            key,
            id=f"{fmt.name}-{key}",
            marks=[pytest.mark.exhaustive] * (fmt.name not in OFTEN),
        )
        for fmt, key in items
    ]


def decoded(fmt: QuantFormat, rows: np.ndarray) -> np.ndarray:
    return fmt.codec.decode(split_blocks(fmt, rows))


@pytest.mark.parametrize(
    ("fmt", "key"), marked([(fmt, key) for fmt in MADE for key in LLAMA_CPP[fmt.name]])
)
def test_bytes_are_llama_cpps(fmt: QuantFormat, key: str) -> None:
    columns = importance(N_IN) if key == "weighted" else None
    rows = encode_rows(fmt, weights_for(fmt.name), columns)
    assert hashlib.sha256(rows.tobytes()).hexdigest()[:24] == LLAMA_CPP[fmt.name][key]


@pytest.mark.parametrize("name", ["f32", "f16", "bf16"])
def test_floats_are_llama_cpps(name: str) -> None:
    (plane,) = FORMATS[name].codec.encode(weights())
    assert hashlib.sha256(plane.tobytes()).hexdigest()[:24] == LLAMA_CPP[name]["plain"]


def test_llama_cpp_was_asked_about_every_type_that_is_made() -> None:
    assert {fmt.name for fmt in MADE} <= set(LLAMA_CPP)


@pytest.mark.parametrize(
    "fmt",
    [
        pytest.param(fmt, id=fmt.name, marks=[pytest.mark.exhaustive] * (fmt.name not in OFTEN))
        for fmt in MADE
        if fmt.name in KV_FORMATS and fmt.name != "iq4_nl"  # whose cache tries no further scales
    ],
)
def test_without_importance_a_cache_types_reference_gives_the_bytes(fmt: QuantFormat) -> None:
    x = np.delete(weights(), [8], 0)  # ggml stores the sign of a minimum of 0
    expected = join_planes(fmt.codec.encode(x)).reshape(len(x), -1)
    assert (encode_rows(fmt, x) == expected).all()


@pytest.mark.parametrize("n_rows", [1, 2, 15, 16, 17, 33])
def test_a_row_has_the_same_bytes_among_any_others(n_rows: int) -> None:
    fmt, x = FORMATS["q4_K"], np.concatenate([weights(), weights()[::-1]])[:, :512]
    together = encode_rows(fmt, x)
    assert (encode_rows(fmt, x[:n_rows]) == together[:n_rows]).all()


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 1 << 16),
    exponent=st.integers(-6, 10),
    name=st.sampled_from(OFTEN),
    weighted=st.booleans(),
)
def test_errors_are_small(seed: int, exponent: int, name: str, weighted: bool) -> None:
    fmt, rng = FORMATS[name], np.random.default_rng(seed)
    x = (rng.standard_normal((3, 256)) * 2.0**exponent).astype(np.float32)
    columns = rng.random(256).astype(np.float32) + 0.5 if weighted else None
    error = decoded(fmt, encode_rows(fmt, x, columns)) - x
    bound = {"q4_0": 0.12, "q4_K": 0.1, "q6_K": 0.025}[name]
    assert np.sqrt((error**2).mean() / (x**2).mean()) < bound


@pytest.mark.parametrize("name", OFTEN)
def test_tiny_and_zero_values_stay_near_zero(name: str) -> None:
    fmt = FORMATS[name]
    for x in (np.zeros((2, 256)), np.full((2, 256), 1e-42), np.eye(2, 256) * 1e-39):
        values = decoded(fmt, encode_rows(fmt, x.astype(np.float32)))
        assert np.isfinite(values).all()
        assert np.abs(values).max() < 1e-6


def test_importance_moves_errors_to_columns_that_count_less() -> None:
    fmt, x = FORMATS["q4_K"], weights()[:1, :256].repeat(16, 0) + np.float32(0)
    x *= np.linspace(0.5, 1.5, 16, dtype=np.float32)[:, None]
    columns = np.where(np.arange(256) % 4 == 0, 100, 1).astype(np.float32)
    plain, weighted = (
        ((decoded(fmt, encode_rows(fmt, x, w)) - x) ** 2)[:, ::4].mean() for w in (None, columns)
    )
    assert weighted < plain
