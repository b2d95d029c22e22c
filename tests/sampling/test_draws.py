"""Draws are the same as by sorting everything; several rows; taking draws back."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localkv.sampling import candidates
from localkv.sampling.params import SamplingParams
from localkv.sampling.sampler import Sampler
from localkv.sampling.state import MOST_UNDONE
from support.plain_sampler import holding, plain_draw

CHAINS = (
    {},
    {"top_k": 0},
    {"top_k": 0, "min_p": 0.0, "top_p": 0.999},
    {"samplers": (), "logit_bias": {3: 5.0, 4: -np.inf}},
    {"samplers": ("temperature", "top_p"), "temperature": 3.0, "top_p": 0.9},
    {"samplers": ("top_k",), "top_k": 5000},
    {"samplers": ("min_p", "temperature"), "min_p": 0.001, "temperature": 1.5},
    {"samplers": ("typ_p", "temperature"), "typ_p": 0.9},
    {"samplers": ("typ_p",), "typ_p": 0.5, "min_keep": 300},
    {"samplers": ("xtc", "temperature"), "xtc_probability": 0.7, "xtc_threshold": 0.01},
    {"samplers": ("xtc",), "xtc_probability": 1.0, "xtc_threshold": 1e-6},
    {"samplers": ("top_n_sigma", "top_p"), "top_n_sigma": 1.0, "top_p": 0.8},
    {"samplers": ("temperature",), "dynatemp_range": 0.5},
    {"samplers": ("penalties", "top_p"), "repeat_penalty": 1.2, "frequency_penalty": 0.1},
)


def rows(n: int, seed: int) -> list[np.ndarray]:
    """Logits: even, peaked, with ties, in a small range, with banned tokens."""
    random = np.random.default_rng(seed)
    even = random.normal(0, 3, n)
    peaked = random.normal(0, 2, n)
    peaked[random.integers(n, size=30)] += np.linspace(3, 14, 30)
    ties = random.integers(40, size=n) / 4
    close = random.normal(0, 1e-4, n)
    banned = np.where(random.random(n) < 0.5, even, -np.inf)
    return [x.astype(np.float32) for x in (even, peaked, ties, close, banned)]


@pytest.mark.parametrize("n", [5_000, pytest.param(128_256, marks=pytest.mark.slow)])
def test_the_same_draws_as_by_sorting_everything(n: int) -> None:
    logits = rows(n, 1)
    for chain in CHAINS:
        params = SamplingParams(seed=7, **chain)
        sampler, random = Sampler(params, n_vocab=n), np.random.Generator(np.random.PCG64(7))
        text: list[int] = []
        for row in logits * 3:
            token = sampler.sample(row)
            assert token == plain_draw(row, params, random, text), chain
            sampler.accept(token)
            text.append(token)


numbers = st.integers(0, 2**32)


@settings(deadline=None, max_examples=40)
@given(
    numbers,
    st.sampled_from([2049, 4096, 20_000]),
    st.sampled_from([2, 16, 1000, 10**6]),
    st.sampled_from([0.25, 0.5, 0.9, 0.9999999, 1.0]) | st.floats(0, 1),
    st.sampled_from(["left", "right"]),
)
def test_the_fewest_that_hold_a_mass(seed: int, n: int, levels: int, mass: float, side) -> None:
    keys = np.random.default_rng(seed).integers(levels, size=n) * (8 / levels)
    p = candidates.softmax(keys).copy()
    found = candidates.fewest(keys, p, mass, side, 0)
    assert found.tolist() == holding(keys, p, mass, side, 0).tolist()


@settings(deadline=None, max_examples=40)
@given(numbers, st.sampled_from([2049, 4608, 20_000]), st.floats(0, 1, exclude_max=True))
def test_a_draw_in_blocks_is_that_of_one_sum(seed: int, n: int, number: float) -> None:
    random = np.random.default_rng(seed)
    p = candidates.softmax(random.normal(0, random.uniform(0, 20), n)).copy()
    cumulative = np.cumsum(p)
    edge = int(random.integers(n))
    near = [number, *(cumulative[edge] / cumulative[-1] + np.array([-1, 0, 1]) * 2.0**-52)]
    for x in near:
        if 0 <= x < 1:
            expected = np.searchsorted(cumulative, x * cumulative[-1], "right")
            assert candidates.drawn(p, x) == expected


def test_no_bins_where_rounding_would_decide() -> None:
    even = np.full(4096, 1 / 4096)
    keys = np.arange(4096.0)[::-1] / 1000
    assert candidates._fewest_by_bins(keys, even, 0.5, "left") is None
    assert len(candidates._fewest_by_bins(keys, even, 0.5001, "left")) == 2049


# Taking back.

STATEFUL = {
    "temperature": 2.0,
    "repeat_penalty": 1.3,
    "frequency_penalty": 0.2,
    "dry_multiplier": 0.8,
    "xtc_probability": 0.5,
    "top_k": 20,
}
CORRECTING = ({}, {"adaptive_target": 0.3}, {"mirostat": 1}, {"mirostat": 2, "mirostat_tau": 3.0})


def draw(sampler: Sampler, logits: np.ndarray, n: int) -> list[int]:
    tokens = []
    for _ in range(n):
        tokens.append(sampler.sample(logits))
        sampler.accept(tokens[-1])
    return tokens


@settings(deadline=None, max_examples=40)
@given(
    numbers,
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=6),
    st.sampled_from([3, 64, -1]),
    st.sampled_from([5, -1]),
    st.sampled_from(CORRECTING),
)
def test_tokens_taken_back_are_drawn_again(
    seed: int, rounds: list[tuple[int, int]], window: int, dry_window: int, more: dict
) -> None:
    logits = np.random.default_rng(seed).normal(0, 2, 50).astype(np.float32)
    windows = {"repeat_last_n": window, "dry_penalty_last_n": dry_window}
    params = SamplingParams(seed=seed, **windows, **STATEFUL, **more)
    sampler, straight = (Sampler(params, n_vocab=50, n_ctx=100) for _ in range(2))
    for n_undone, n_kept in rounds:
        snapshot = sampler.snapshot()
        draw(sampler, logits, n_undone)
        sampler.restore(snapshot)
        assert draw(sampler, logits, n_kept) == draw(straight, logits, n_kept)
    ours, theirs = sampler.snapshot(), straight.snapshot()
    assert (ours.n_accepted, ours.random) == (theirs.n_accepted, theirs.random)
    assert ours.feedback == theirs.feedback


def test_a_snapshot_of_too_long_ago_is_refused() -> None:
    sampler = Sampler(SamplingParams(seed=1, repeat_penalty=1.1), n_vocab=5)
    snapshot = sampler.snapshot()
    for n in range(MOST_UNDONE):
        sampler.accept(n % 5)
    later = sampler.snapshot()
    sampler.restore(snapshot)
    with pytest.raises(ValueError, match="snapshot"):
        sampler.restore(later)
    for n in range(MOST_UNDONE + 1):
        sampler.accept(n % 5)
    with pytest.raises(ValueError, match="snapshot"):
        sampler.restore(snapshot)


def test_what_dry_knows_from_the_last_token_is_what_it_would_count() -> None:
    params = SamplingParams(seed=1, samplers=("dry",), dry_multiplier=1.0, dry_penalty_last_n=30)
    random = np.random.default_rng(3)
    sampler = Sampler(params, n_vocab=4)
    logits = np.zeros(4, np.float32)
    text: list[int] = []
    for _ in range(150):
        for _ in range(int(random.integers(1, 3))):
            text.append(int(random.integers(2)) if random.random() < 0.9 else 3)
            sampler.accept(text[-1])
        fresh = Sampler(params, n_vocab=4)
        for token in text:
            fresh.accept(token)
        assert np.array_equal(sampler.candidates(logits)[1], fresh.candidates(logits)[1])
