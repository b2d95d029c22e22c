"""DRY against plain loops, and the breakers that it stops at."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localkv.sampling.candidates import Candidates
from localkv.sampling.params import SamplingParams
from localkv.sampling.sampler import Sampler
from localkv.sampling.samplers import dry
from localkv.sampling.state import NONE, Breakers, SamplerState, Tails, repeats

histories = st.lists(st.integers(0, 4), max_size=40)
examples = settings(deadline=None, max_examples=100)


def penalised(
    start: Candidates,
    history: list[int],
    breakers: Mapping[int, Tails],
    multiplier: float,
    base: float,
    allowed_length: int,
) -> Candidates:
    """What DRY makes of candidates after a text."""
    params = SamplingParams(
        dry_multiplier=multiplier, dry_base=base, dry_allowed_length=allowed_length
    )
    state = SamplerState(1, n_ctx=4096, windows=[-1], tails_of=lambda t: breakers.get(t, NONE))
    for token in history:
        state.accept(token)
    return dry(Candidates(start.ids, start.logits.copy()), params, state)


BREAKERS = {3: frozenset({()}), 2: frozenset({(1,), (1, 1, 0)}), 1: frozenset({(1,)})}


@examples
@given(
    histories, st.integers(0, 4), st.sampled_from([1.0, 1.2, 3.0]), st.sampled_from([{}, BREAKERS])
)
def test_dry(history: list[int], allowed: int, base: float, breakers: dict[int, Tails]) -> None:
    n = len(history)
    limit = n
    for at in reversed(range(n)):
        tails = breakers.get(history[at], NONE)
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
    short, both = frozenset({(1,)}), frozenset({(1,), (1, 1, 0)})
    assert penalised(start, history, {2: short}, 1.0, 1.2, 2).logits[4] == -1
    assert not penalised(start, history, {2: both}, 1.0, 1.2, 2).logits.any()


@examples
@given(histories, st.integers(1, 12))
def test_the_last_breaker_is_the_same_from_token_to_token(history: list[int], last_n: int) -> None:
    def state() -> SamplerState:
        tails = BREAKERS | {4: frozenset({(3, 3)})}
        return SamplerState(1, n_ctx=99, windows=[last_n], tails_of=lambda t: tails.get(t, NONE))

    stepwise = state()
    for n, token in enumerate(history):
        stepwise.accept(token)
        before = stepwise.snapshot()
        stepwise.accept(2)
        stepwise.since_breaker(last_n)
        stepwise.restore(before)
        at_once = state()
        for known in history[: n + 1]:
            at_once.accept(known)
        assert stepwise.since_breaker(last_n) == at_once.since_breaker(last_n)


def test_a_breaker_that_never_comes_is_looked_for_at_the_end_of_the_text_only() -> None:
    asked = list[int]()

    def tails_of(token: int) -> Tails:
        asked.append(token)
        return frozenset({(token + 1,) * 20})

    state = SamplerState(1, n_ctx=9999, windows=[-1], tails_of=tails_of)
    for n in range(5000):
        state.accept(n % 3)
    assert state.since_breaker(-1) == 5000
    asked.clear()
    state.accept(0)
    assert state.since_breaker(-1) == 5001
    assert len(asked) <= 21


@examples
@given(st.lists(st.integers(0, 1), min_size=2, max_size=99), st.integers(0, 99))
def test_runs_of_any_length(history: list[int], most: int) -> None:
    history = history[:20] + history
    n = len(history)

    def run(end: int) -> int:
        same = (m for m in range(end + 1) if history[end - m : end] == history[n - m :])
        return min(max(same), most)

    assert repeats(np.array(history), most).tolist() == [run(end) for end in range(1, n)]


TEXTS = ["a", "\n", "x\n", "##", "# y", "###", "\n###", "", "#"]


def found(
    breakers: list[str], texts: list[str], tokenize: Callable[[str], list[int]] | None = None
) -> dict[int, Tails]:
    """The tokens in which one of the breakers begins, and what completes it."""
    tails_of = Breakers(breakers, texts.__getitem__, tokenize)
    return {token: tails for token in range(len(texts)) if (tails := tails_of(token))}


def test_breakers_are_found_within_and_across_tokens() -> None:
    assert found(["\n"], TEXTS) == {1: {()}, 2: {()}, 6: {()}}
    assert found(["", "é"], TEXTS) == {}
    cut = {"###": [3, 8], "##": [3], "#": [8], "!": []}.__getitem__
    assert found(["\n###"], TEXTS, cut) == {1: {(3, 8)}, 2: {(3, 8)}, 6: {()}}
    assert found(["##"], TEXTS, cut) == {3: {()}, 5: {()}, 6: {()}, 8: {(8,)}}
    assert found(["a!"], TEXTS, cut) == {}
    assert found(["\n###"], TEXTS) == {6: {()}}


def test_long_breakers_are_cut_as_in_llama_cpp() -> None:
    texts = ["a", "b", "a" * 40, "é" * 20]

    def cut(text: str) -> list[int]:
        return [0] * len(text)

    assert found(["a" * 40 + "b"], texts, cut) == {0: {(0,) * 20}, 2: {()}}
    assert found(["é" * 30], texts, cut) == {3: {()}}


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
        ids, shares = sampler.candidates(logits)
    assert sorted(asked) == sorted(set(asked)) == [0, 1, 3]
    assert ids[shares < shares.max()].tolist() == [0]


def test_dry_without_texts_has_no_breakers() -> None:
    params = SamplingParams(dry_multiplier=1.0, samplers=("dry",), dry_allowed_length=1)
    sampler = Sampler(params, n_vocab=4)
    for token in [3, 0, 1, 3, 0, 1]:
        sampler.accept(token)
    ids, shares = sampler.candidates(np.zeros(4, np.float32))
    assert ids[shares < shares.max()].tolist() == [3]
