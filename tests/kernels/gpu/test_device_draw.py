"""Draws on the device: the distribution of the host's sampler chain."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from localkv.cache.arrays import NO_TOKEN
from localkv.kernels.gpu.device_draw import device_draw, uniform
from localkv.sampling.params import SamplingParams
from localkv.sampling.sampler import Sampler


def random_words(seed: int, n: int) -> list[int]:
    """SplitMix64 as its authors wrote it."""
    words, state = [], seed
    for _ in range(n):
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        z = state
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        words.append(z ^ (z >> 31))
    return words


def test_uniform_numbers_are_splitmix64s() -> None:
    assert random_words(0, 1) == [0xE220A8397B1DCDAF]  # the published first word
    for seed in (0, 1, 2**32 - 1):
        got = [uniform(torch.tensor([seed, i])).item() for i in range(20)]
        assert got == [(word >> 11) / 2**53 for word in random_words(seed, 20)]


CHAINS = (
    ("top_k", "top_p", "min_p", "temperature"),
    ("temperature", "top_p"),
    ("min_p", "temperature", "top_k"),
    ("top_p", "top_k"),
    (),
)


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**31),
    chain=st.sampled_from(CHAINS),
    temperature=st.sampled_from([0.3, 0.8, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 7, 40, 500]),
    top_p=st.sampled_from([0.1, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.7]),
    min_keep=st.sampled_from([0, 3]),
)
def test_the_token_is_the_one_that_the_chain_gives_for_that_number(
    seed: int,
    chain: tuple[str, ...],
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    min_keep: int,
) -> None:
    params = SamplingParams(
        seed=seed,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        min_keep=min_keep,
        samplers=chain,
    )
    draw = device_draw(params)
    assert draw is not None
    logits = np.random.default_rng(seed).normal(0, 4, 100).astype(np.float32)
    ids, probabilities = Sampler(params, n_vocab=100).candidates(logits)
    order = np.argsort(-probabilities, kind="stable")
    cumulative = np.cumsum(probabilities[order])
    for number in range(5):
        random = torch.tensor([seed, number])
        target = uniform(random).item() * cumulative[-1]
        expected = ids[order][np.searchsorted(cumulative, target, "right")]
        assert draw(torch.from_numpy(logits)[None], random).tolist() == [expected]


def test_greedy_takes_the_largest_whatever_else_is_on() -> None:
    draw = device_draw(SamplingParams(temperature=0.0))
    assert draw is not None
    logits = torch.randn(1, 1000, generator=torch.Generator().manual_seed(1))
    assert draw(logits, torch.tensor([5, 0])).tolist() == [int(logits.argmax())]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_logits_that_are_no_numbers_yield_no_token(temperature: float, bad: float) -> None:
    draw = device_draw(SamplingParams(temperature=temperature))
    assert draw is not None
    logits = torch.full((1, 50), bad) if bad < 0 else torch.zeros(1, 50)
    logits[0, 7] = bad
    assert draw(logits, torch.tensor([5, 0])).tolist() == [NO_TOKEN]


def test_banned_tokens_are_never_drawn() -> None:
    draw = device_draw(SamplingParams(temperature=1.0, samplers=()))
    assert draw is not None
    logits = torch.full((1, 50), -torch.inf)
    logits[0, 7:9] = 0.0
    drawn = {draw(logits, torch.tensor([3, i])).item() for i in range(40)}
    assert drawn == {7, 8}


@pytest.mark.parametrize(
    "options",
    [
        {"repeat_penalty": 1.1},
        {"dry_multiplier": 0.8},
        {"typ_p": 0.9},
        {"xtc_probability": 0.5},
        {"top_n_sigma": 1.0},
        {"dynatemp_range": 0.3},
        {"logit_bias": {3: 1.0}},
    ],
)
def test_the_host_draws_what_needs_more_than_the_logits(options: dict) -> None:
    assert device_draw(SamplingParams(**options)) is None


def test_equal_parameters_draw_alike() -> None:
    a, b = (device_draw(SamplingParams(seed=seed)) for seed in (1, 2))
    assert a == b
    assert hash(a) == hash(b)
    assert a != device_draw(SamplingParams(top_k=3))
