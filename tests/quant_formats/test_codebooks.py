"""The `nuq` types: codes of a codebook, outliers apart."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localkv.quality.kv_profile import learn_codebook
from localkv.quant_formats import FORMATS, QuantFormat
from localkv.quant_formats.shared.codebooks import NORMAL, check_codebook, table_of

NUQ = [fmt for fmt in FORMATS.values() if fmt.n_centroids]
by_format = pytest.mark.parametrize("fmt", NUQ, ids=lambda fmt: fmt.name)
WIDTHS = (32, 64, 96, 128)

NUMBERS = st.one_of(
    st.floats(-4, 4, width=32),
    st.floats(width=32, allow_nan=False),
    st.sampled_from([0.0, -0.0, 1.0, -1.0, 100.0, 65504.0, 7e4, 1e-40, float("inf")]),
)


def codebooks(n: int) -> st.SearchStrategy[tuple[int, ...]]:
    step = 2 if n == 16 else 1
    parts = st.lists(
        st.integers(-127 // step + 1, 127 // step), min_size=n, max_size=n, unique=True
    )
    return parts.map(lambda values: tuple(sorted(value * step for value in values)))


LIMIT = 65519.99609375


def nearest(y: np.float32, codebook: tuple[int, ...]) -> int:
    return codebook[sum(2 * float(y) >= a + b for a, b in itertools.pairwise(codebook))]


def six_bits(x: float) -> float:
    """The nearest number of six significant bits, halfway the one further from 0."""
    mantissa, exponent = math.frexp(abs(x))
    return math.copysign(math.ldexp(math.floor(64 * mantissa + 0.5), exponent - 6), x)


def scale_by_hand(inliers: list[float], codebook: tuple[int, ...]) -> np.float32:
    """The scale of a block, in fp16 and back, by exact sums."""
    high, low = (np.float32(f(0, *inliers)) for f in (max, min))
    extreme = high if high >= -low else low
    d = np.float32(np.clip(extreme / np.float32(127), -LIMIT, LIMIT))
    inverse = np.float32(1) / d if d else np.float32(0)
    y = [np.float32(x) * (inverse if np.isfinite(inverse) else np.float32(0)) for x in inliers]
    best, fitted = np.float32(0), d
    for stretch in (1, 1.125, 0.875):
        chosen = [nearest(value * np.float32(stretch), codebook) for value in y]
        above = np.float32(sum(int(value * 256) * c for value, c in zip(y, chosen, strict=True)))
        below = np.float32(sum(c * c for c in chosen))
        if below and above * (above / below) > best:
            best = above * (above / below)
            fitted = np.clip(d * (above / below / np.float32(256)), -LIMIT, LIMIT)
    if len(codebook) == 16:
        fitted = np.float32(six_bits(float(np.clip(fitted, -63 * 1024, 63 * 1024))))
    return np.float32(np.float16(fitted))


def row_by_hand(x: np.ndarray, codebook: tuple[int, ...]) -> np.ndarray:
    """What a row becomes, by exact arithmetic but for the scale: float64 [n]."""
    exact = np.clip(x.astype(np.float64), -127 * LIMIT, 127 * LIMIT)
    out = exact.copy()
    for first in range(0, len(x), 64):
        places = range(first, min(first + 64, len(x)))
        outlier = None
        if len(places) == 64:
            outlier = max(places, key=lambda i: (abs(exact[i]), -i))
        for block in range(first, places.stop, 32):
            members = range(block, block + 32)
            d = scale_by_hand([exact[i] for i in members if i != outlier], codebook)
            inverse = np.float32(1) / d if d else np.float32(0)
            for i in members:
                made = float(np.float32(nearest(np.float32(exact[i]) * inverse, codebook)) * d)
                out[i] = made
                if i == outlier:
                    missing = np.float32(exact[i]) - np.float32(made)
                    missing = np.clip(missing, -LIMIT, LIMIT)
                    out[i] = np.float32(np.float32(np.float16(missing)) + np.float32(made))
    return out


@by_format
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_rows_against_exact_arithmetic(fmt: QuantFormat, data: st.DataObject) -> None:
    width = data.draw(st.sampled_from(WIDTHS))
    row = data.draw(st.lists(NUMBERS, min_size=width, max_size=width))
    codebook = data.draw(st.one_of(st.just(NORMAL[fmt.n_centroids]), codebooks(fmt.n_centroids)))
    x = np.array(row, np.float32)
    planes = fmt.codec.encode(x, codebook)
    sizes = [plane.n_bytes for plane in fmt.planes]
    assert [plane.shape for plane in planes] == [(width // 32, n) for n in sizes]
    np.testing.assert_array_equal(fmt.codec.decode(planes, codebook), row_by_hand(x, codebook))


@by_format
def test_an_outlier_costs_the_others_nothing(fmt: QuantFormat) -> None:
    rng = np.random.default_rng(2)
    x = rng.standard_normal((500, 128), np.float32)
    x[:, 5], x[:, 70] = 300, -77.25
    got = fmt.codec.decode(fmt.codec.encode(x))
    np.testing.assert_allclose(got[:, [5, 70]], x[:, [5, 70]], rtol=2**-10)
    without = np.delete(x, (5, 70), axis=1)
    error = ((np.delete(got, (5, 70), axis=1) - without) ** 2).sum() / (without**2).sum()
    assert error < {4: 0.11, 8: 0.027, 16: 0.0065}[fmt.n_centroids]  # measured 0.099, 0.024, 0.0058


@by_format
def test_a_scale_is_fitted(fmt: QuantFormat) -> None:
    """No scale of either sign that takes the extreme to the codebook's end is better.

    Six bits of a scale cost a relative error of 2^-6 of all values at most.
    """
    rng = np.random.default_rng(8)
    x = rng.standard_normal((300, 32), np.float32)
    book = np.array(NORMAL[fmt.n_centroids], np.float64)
    extreme = np.take_along_axis(x, np.abs(x).argmax(-1, keepdims=True), -1)

    def errors(scales: np.ndarray) -> np.ndarray:
        near = np.abs(x[..., None] / scales[..., None] - book).argmin(-1)
        return ((book[near] * scales - x) ** 2).sum(-1)

    got = ((fmt.codec.decode(fmt.codec.encode(x)) - x) ** 2).sum(-1)
    ends = np.array([book[0], book[-1], 127, -127])
    plain = np.stack([errors(extreme / end) for end in ends])
    assert got.sum() < 0.97 * plain.sum(-1).min()
    of_bits = 2**-12 * (x**2).sum(-1) if fmt.n_centroids == 16 else 0
    assert (got <= 1.001 * errors(extreme / 127) + of_bits).all()


def test_three_bits_beat_integers_of_as_many() -> None:
    """Rows as rotated outliers make them, whose channels are alike: `nuq3` against `kv3_1`."""
    rng = np.random.default_rng(9)
    x = rng.standard_normal((2000, 64), np.float32)
    x[:, [3, 40]] *= 8
    signs = np.array([[1]])
    while len(signs) < 64:
        signs = np.block([[signs, signs], [signs, -signs]])
    x = x @ (signs / 8).astype(np.float32)
    error = {}
    for name in ("nuq3", "kv3_1"):
        codec = FORMATS[name].codec
        error[name] = ((codec.decode(codec.encode(x)) - x) ** 2).sum()
    assert error["nuq3"] < 0.9 * error["kv3_1"]


@by_format
def test_a_nan_spoils_its_block_only(fmt: QuantFormat) -> None:
    x = np.random.default_rng(3).standard_normal((2, 96)).astype(np.float32)
    alone = fmt.codec.decode(fmt.codec.encode(x[:, 64:]))
    clean = fmt.codec.decode(fmt.codec.encode(x))
    x[1, 40] = np.nan
    got = fmt.codec.decode(fmt.codec.encode(x))
    np.testing.assert_array_equal(got[0], clean[0])
    assert np.isnan(got[1, 32:64]).all()
    assert np.isfinite(got[1, :32]).all()
    np.testing.assert_array_equal(got[1, 64:], clean[1, 64:])
    np.testing.assert_array_equal(alone, clean[:, 64:])


@by_format
def test_any_bytes_are_numbers(fmt: QuantFormat) -> None:
    rng = np.random.default_rng(4)
    planes = [
        rng.integers(256, size=(50, 3, plane.n_bytes), dtype=np.uint8) for plane in fmt.planes
    ]
    assert fmt.codec.decode(planes).shape == (50, 96)


@by_format
def test_learned_codebooks_fit_better(fmt: QuantFormat) -> None:
    rng = np.random.default_rng(5)
    rows = rng.standard_normal((2000, 64), np.float32)
    rows[:, :32] = np.abs(rows[:, :32]) ** 2  # nothing like normal numbers
    learned = learn_codebook(rows, fmt.n_centroids)

    def error(codebook: tuple[int, ...]) -> float:
        return float(
            ((fmt.codec.decode(fmt.codec.encode(rows, codebook), codebook) - rows) ** 2).sum()
        )

    assert error(learned) < 0.9 * error(NORMAL[fmt.n_centroids])
    moved = [
        (*learned[:i], learned[i] + step, *learned[i + 1 :]) for i in (0, 1) for step in (-8, 8)
    ]
    assert all(error(learned) < error(tuple(sorted(other))) for other in moved)


@by_format
def test_a_codebook_is_found_again(fmt: QuantFormat) -> None:
    codebook = np.linspace(-127, 127, fmt.n_centroids).round().astype(int)
    rng = np.random.default_rng(6)
    rows = rng.choice(codebook.astype(np.float32), (500, 64))
    rows[:, 0] = rows[:, 32] = 127
    learned = learn_codebook(rows, fmt.n_centroids)
    assert np.abs(np.subtract(learned, codebook)).max() <= 1


def test_normal_codebooks_are_those_of_normal_numbers() -> None:
    rows = np.random.default_rng(7).standard_normal((40000, 64), np.float32)
    for n, expected in NORMAL.items():
        check_codebook(expected)
        assert np.abs(np.subtract(learn_codebook(rows, n), expected)).max() <= 2
        table = table_of(expected)
        np.testing.assert_array_equal(table[:n], expected)
        step = 2 if n == 16 else 1
        np.testing.assert_array_equal(table[16:].view(np.uint8), (table[:16] + 128) / step)
    constant = np.ones((3, 64), np.float32)
    check_codebook(learn_codebook(constant, 16))
    check_codebook(learn_codebook(0 * constant, 8))


@pytest.mark.parametrize(
    "bad",
    [
        (),
        (1, 2),
        (1, 2, 3, 3),
        (4, 3, 2, 1),
        (0, 1, 2, 128),
        (0, 1, 2, 3.0),
        (*range(-16, 14, 2), 15),
    ],
)
def test_what_is_no_codebook(bad: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="codebook"):
        check_codebook(bad)
