"""Tokens drawn in torch, against the sampler chain."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from localkv.config import SamplingParams
from localkv.kernels.gpu.draw_token import can_draw, draw, greedy
from localkv.sampling import samplers
from localkv.sampling.candidates import Candidates, softmax

N_VOCAB, N_DRAWS = 50, 40_000
OFF = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}


def chain(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Probabilities of all tokens."""
    c = Candidates(np.arange(len(logits)), logits.astype(np.float64))
    if params.top_k > 0:
        c = samplers.top_k(c, params.top_k)
    if params.top_p < 1:
        c = samplers.top_p(c, params.top_p, 0)
    if params.min_p > 0:
        c = samplers.min_p(c, params.min_p, 0)
    c = samplers.temperature(c, params.temperature, 0.0, 1.0)
    p = np.zeros(len(logits))
    p[c.ids] = softmax(c.logits)
    return p


@pytest.mark.parametrize(
    "settings",
    [
        {**OFF, "temperature": 1.0},
        {**OFF, "temperature": 0.5},
        {**OFF, "top_k": 7},
        {**OFF, "top_p": 0.8},
        {**OFF, "top_p": 0.0},
        {**OFF, "min_p": 0.1},
        {"top_k": 20, "top_p": 0.9, "min_p": 0.05, "temperature": 1.5},
        {"top_k": 1000},
    ],
)
def test_draws_follow_the_chain(settings: dict[str, float]) -> None:
    """The same tokens can come up, as often as they should: within five standard deviations."""
    params = SamplingParams(**settings)
    assert can_draw(params)
    logits = torch.randn(N_VOCAB, generator=torch.Generator().manual_seed(1)) * 2
    generator = torch.Generator().manual_seed(2)
    drawn = draw(logits.expand(N_DRAWS, -1), params, generator)
    shares = np.bincount(drawn.numpy(), minlength=N_VOCAB) / N_DRAWS
    p = chain(logits.numpy(), params)
    assert not shares[p == 0].any()
    assert (abs(shares - p) <= 5 * np.sqrt(p / N_DRAWS) + 5 / N_DRAWS).all()


def test_rows_are_drawn_for_themselves() -> None:
    logits = torch.full((3, N_VOCAB), -50.0)
    logits[[0, 1, 2], [4, 9, 2]] = 50.0
    assert draw(logits, SamplingParams(), torch.Generator()).tolist() == [4, 9, 2]
    assert greedy(logits).tolist() == [4, 9, 2]


def test_greedy_takes_the_lowest_of_equal_tokens() -> None:
    logits = torch.zeros(2, 1000)
    logits[1, 300:] = 1.0
    assert greedy(logits).tolist() == [0, 300]


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.0},
        {"repeat_penalty": 1.1},
        {"typ_p": 0.9},
        {"min_keep": 2},
        {"dynatemp_range": 0.1},
        {"logit_bias": {3: 1.0}},
        {"xtc_probability": 0.5},
        {"samplers": ("temperature", "top_k", "top_p", "min_p")},
        {"samplers": ("top_k", "temperature")},
    ],
)
def test_chains_that_the_host_must_run(settings: dict[str, object]) -> None:
    assert not can_draw(SamplingParams(**settings))
