"""DRY against plain loops, and the breakers that it stops at."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localkv.sampling.candidates import Candidates
from localkv.sampling.dry import Breakers, dry, dry_breakers
from localkv.sampling.params import SamplingParams
from localkv.sampling.sampler import Sampler
from localkv.sampling.state import SamplerState

histories = st.lists(st.integers(0, 4), max_size=40)
examples = settings(deadline=None, max_examples=100)


def penalised(
    start: Candidates,
    history: list[int],
    breakers: Breakers,
    multiplier: float,
    base: float,
    allowed_length: int,
) -> Candidates:
    """What DRY makes of candidates after a text."""
    params = SamplingParams(
        dry_multiplier=multiplier, dry_base=base, dry_allowed_length=allowed_length
    )
    state = SamplerState(1, n_ctx=4096, windows=[-1], find_breakers=lambda: breakers)
    for token in history:
        state.accept(token)
    return dry(Candidates(start.ids, start.logits.copy()), params, state)


BREAKERS = {3: {()}, 2: {(1,), (1, 1, 0)}, 1: {(1,)}}


@examples
@given(
    histories, st.integers(0, 4), st.sampled_from([1.0, 1.2, 3.0]), st.sampled_from([{}, BREAKERS])
)
def test_dry(
    history: list[int], allowed: int, base: float, breakers: dict[int, set[tuple[int, ...]]]
) -> None:
    n = len(history)
    limit = n
    for at in reversed(range(n)):
        tails = breakers.get(history[at], set())
        ends = [at + 1 + len(t) for t in tails if tuple(history[at + 1 : at + 1 + len(t)]) == t]
        if ends:
            limit = n - max(ends)
            break
    expected = [0.0] * 5
    for token in range(5):
        runs = [
            max(m for m in range(min(i, limit) + 1) if history[i - m : i] == history[n - m :])
            for i in range(1, n)
            if history[i] == token
        ]
        if runs and max(runs) >= allowed and limit >= allowed and () not in breakers.get(token, ()):
            expected[token] = -0.7 * base ** (max(runs) - allowed)
    if n <= allowed:
        expected = [0.0] * 5
    start = Candidates(np.arange(5), np.zeros(5))
    found = penalised(start, history, breakers, 0.7, base, allowed)
    assert found.logits.tolist() == pytest.approx(expected)


@pytest.mark.parametrize(("base", "exponent"), [(1.75, 158), (1.2, 486), (1.0, 997)])
def test_dry_bounds_the_exponent(base: float, exponent: int) -> None:
    start = Candidates(np.array([7, 9]), np.zeros(2))
    found = penalised(start, [7] * 1000, {}, 1e-38, base, 2)
    assert found.logits.tolist() == pytest.approx([-1e-38 * base**exponent, 0], rel=1e-9)


def test_dry_takes_the_longest_breaker() -> None:
    # 2 1 is a breaker and 2 1 1 0 is one, after which nothing is left that could be a repeat.
    history = [1, 0, 4, 2, 1, 1, 0]
    start = Candidates(np.arange(5), np.zeros(5))
    assert penalised(start, history, {2: {(1,)}}, 1.0, 1.2, 2).logits[4] == -1
    assert not penalised(start, history, {2: {(1,), (1, 1, 0)}}, 1.0, 1.2, 2).logits.any()


TEXTS = ["a", "\n", "x\n", "##", "# y", "###", "\n###", "", "#"]


def test_breakers_are_found_within_and_across_tokens() -> None:
    assert dry_breakers(["\n"], TEXTS) == {1: {()}, 2: {()}, 6: {()}}
    assert dry_breakers(["", "é"], TEXTS) == {}
    across = dry_breakers(["\n###"], TEXTS)
    assert across == {1: {(5,)}, 2: {(5,)}, 6: {()}}
    assert dry_breakers(["##"], TEXTS) == {3: {()}, 5: {()}, 6: {()}, 8: {(8,)}}
    cut = dry_breakers(["\n###"], TEXTS, {"###": [3, 8], "##": [3], "#": [8]}.__getitem__)
    assert cut == {1: {(3, 8)}, 2: {(3, 8)}, 6: {()}}


def test_a_rest_that_no_tokens_spell_breaks_nothing() -> None:
    assert dry_breakers(["a!"], TEXTS) == {}


def test_long_breakers_are_cut_as_in_llama_cpp() -> None:
    texts = ["a", "b", "a" * 40, "é" * 20]
    assert dry_breakers(["a" * 40 + "b"], texts) == {0: {(0,) * 20}, 2: {()}}
    assert dry_breakers(["é" * 30], texts) == {3: {()}}


def test_texts_are_asked_for_once_and_only_by_dry() -> None:
    asked: list[int] = []

    def token_text(token: int) -> str:
        asked.append(token)
        return TEXTS[token]

    logits = np.zeros(len(TEXTS), np.float32)
    plain = Sampler(SamplingParams(seed=0), n_vocab=len(TEXTS), token_text=token_text)
    plain.sample(logits)
    assert not asked
    params = SamplingParams(dry_multiplier=1.0, samplers=("dry",), dry_allowed_length=1)
    sampler = Sampler(params, n_vocab=len(TEXTS), token_text=token_text)
    for token in [3, 0, 1, 3, 0, 1, 3]:
        sampler.accept(token)
    for _ in range(3):
        ids, found = sampler.candidates(logits)
    assert asked == list(range(len(TEXTS)))
    assert ids[found < found.max()].tolist() == [0]


def test_dry_without_texts_has_no_breakers() -> None:
    params = SamplingParams(dry_multiplier=1.0, samplers=("dry",), dry_allowed_length=1)
    sampler = Sampler(params, n_vocab=4)
    for token in [3, 0, 1, 3, 0, 1]:
        sampler.accept(token)
    ids, found = sampler.candidates(np.zeros(4, np.float32))
    assert ids[found < found.max()].tolist() == [3]
