"""Sums over rows of logits by the compiled kernel, against those in NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localkv.kernels.bounds import BoundsError
from localkv.kernels.cpu.cpu_backend import kept_sums_cpu
from localkv.kernels.kept_sums import Kept, kept_sums


def kept_of(random: np.random.Generator, n_rows: int, n_vocab: int, most: int) -> Kept:
    """Some tokens of each row, with logits of another model."""
    rows = [
        np.sort(random.choice(n_vocab, random.integers(1, min(most, n_vocab) + 1), replace=False))
        for _ in range(n_rows)
    ]
    ids = np.concatenate(rows).astype(np.int32)
    shifted = -random.exponential(3, len(ids)).astype(np.float32)
    return Kept(ids, shifted, np.cumsum([0, *map(len, rows)]))


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1 << 32),
    n_rows=st.integers(1, 40),
    n_vocab=st.integers(1, 2500),
    spread=st.floats(0.01, 60),
)
def test_they_are_those_of_numpy(seed: int, n_rows: int, n_vocab: int, spread: float) -> None:
    random = np.random.default_rng(seed)
    logits = random.normal(0, spread, (n_rows, n_vocab)).astype(np.float32)
    logits[0] = logits[0].max()  # the first of equals is the best
    kept = kept_of(random, n_rows, n_vocab, 300)
    found, wanted = kept_sums_cpu(logits, kept), kept_sums(logits, kept)
    assert np.array_equal(found.best, wanted.best)
    assert np.array_equal(found.largest, wanted.largest)
    for name in ("kept", "kept_apart", "rest", "rest_logs"):
        assert getattr(found, name) == pytest.approx(getattr(wanted, name), rel=1e-5, abs=1e-6), (
            name
        )


@pytest.mark.parametrize("n_vocab", [20, 48])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_logit_that_is_not_finite_leaves_a_mark(n_vocab: int, value: float) -> None:
    random = np.random.default_rng(n_vocab)
    for place in range(n_vocab):
        logits = random.normal(0, 1, (2, n_vocab)).astype(np.float32)
        logits[1, place] = value
        kept = kept_of(random, 2, n_vocab, 7)
        for sums_of in (kept_sums_cpu, kept_sums):
            sums = np.array(sums_of(logits, kept)[2:])
            assert np.isfinite(sums[:, 0]).all()
            assert not np.isfinite(sums[:, 1]).all()


@pytest.mark.parametrize(
    "kept",
    [
        Kept(np.array([0, 9], np.int32), np.zeros(2, np.float32), np.array([0, 1, 2])),
        Kept(np.array([-1, 1], np.int32), np.zeros(2, np.float32), np.array([0, 1, 2])),
        Kept(np.array([0, 1], np.int32), np.zeros(2, np.float32), np.array([0, 2])),
        Kept(np.array([0, 1], np.int32), np.zeros(2, np.float32), np.array([0, 1, 3])),
        Kept(np.array([0, 1], np.int32), np.zeros(2, np.float32), np.array([0, 3, 2])),
        Kept(np.array([0, 1], np.int32), np.zeros(1, np.float32), np.array([0, 1, 2])),
    ],
)
def test_tokens_of_other_logits_are_refused(kept: Kept) -> None:
    with pytest.raises(BoundsError):
        kept_sums_cpu(np.zeros((2, 9), np.float32), kept)
