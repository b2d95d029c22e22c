"""Whatever parameters are taken and however large logits are, a token is drawn."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from localkv.errors import UsageError
from localkv.sampling.params import (
    LEAST_TEMPERATURE,
    MOST_BIAS,
    NUMBERS,
    SAMPLER_ORDER,
    SamplingParams,
)
from localkv.sampling.sampler import Sampler

INF = float("inf")
N_VOCAB = 12
LARGEST = float(np.finfo(np.float32).max)


def of(name: str) -> st.SearchStrategy[Any]:
    """Values of a parameter, often at the ends of its range."""
    least, most = NUMBERS[name].range
    if isinstance(least, int):
        usual = st.integers(max(least, -2), min(most, 20))
        return st.sampled_from([least, most]) | usual
    usual = st.floats(max(least, -3.0), min(most, 3.0), exclude_min=least == 0)
    return st.sampled_from([least, most]) | usual | st.floats(least, most)


logits = st.lists(
    st.sampled_from([0.0, -0.0, LARGEST, -LARGEST, 1e-45, 1.0, -INF])
    | st.floats(-LARGEST, LARGEST, width=32)
    | st.floats(-20, 20, width=32),
    min_size=N_VOCAB,
    max_size=N_VOCAB,
)
biases = st.dictionaries(
    st.integers(0, N_VOCAB - 1),
    st.sampled_from([MOST_BIAS, -MOST_BIAS, -INF, 0.5]),
    max_size=N_VOCAB - 1,
)
chains = st.lists(st.sampled_from(SAMPLER_ORDER), unique=True) | st.permutations(SAMPLER_ORDER)


@st.composite
def accepted(draw: st.DrawFn) -> SamplingParams:
    """Accepted parameters, some at their defaults."""
    names = draw(st.lists(st.sampled_from([*NUMBERS]), unique=True))
    given = {name: draw(of(name)) for name in names}
    temperature = given.get("temperature", 1.0)
    if 0 < temperature < LEAST_TEMPERATURE:
        given["temperature"] = LEAST_TEMPERATURE
    breakers = tuple(draw(st.lists(st.text("abc", max_size=4), max_size=3)))
    return SamplingParams(
        **{"seed": 1, **given},
        logit_bias=draw(biases),
        samplers=tuple(draw(chains)),
        dry_sequence_breakers=breakers,
    )


@settings(max_examples=300)
@given(accepted(), logits, st.lists(st.integers(0, N_VOCAB - 1), max_size=12))
@example(SamplingParams(dynatemp_range=1e30, dynatemp_exponent=1e30, seed=1), [0.0] * N_VOCAB, [])
@example(
    SamplingParams(temperature=0.5, dynatemp_range=0.5, dynatemp_exponent=900.0, seed=1),
    [9.0] + [0.0] * (N_VOCAB - 1),
    [],
)
def test_a_token_is_drawn(params: SamplingParams, values: list[float], text: list[int]) -> None:
    sampler = Sampler(
        params,
        n_vocab=N_VOCAB,
        n_ctx=64,
        token_text=lambda token: "abcdefghijkl"[token],
        tokenize=lambda rest: ["abcdefghijkl".index(letter) for letter in rest],
    )
    for token in text:
        sampler.accept(token)
    row = np.float32(values)
    assume(any(np.isfinite(row[i]) and params.logit_bias.get(i) != -INF for i in range(N_VOCAB)))
    with np.errstate(all="raise", under="ignore"):
        for _ in range(3):
            token = sampler.sample(row)
            assert 0 <= token < N_VOCAB
            assert params.logit_bias.get(token) != -INF
            sampler.accept(token)


def test_banning_every_token_is_refused_before_any_is_drawn() -> None:
    params = SamplingParams(logit_bias=dict.fromkeys(range(N_VOCAB), -INF))
    with pytest.raises(UsageError, match="bans every token"):
        Sampler(params, n_vocab=N_VOCAB)
