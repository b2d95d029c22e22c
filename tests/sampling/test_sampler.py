"""The sampler chain against plain loops, and against llama.cpp's own samplers."""

from __future__ import annotations

import json
import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from localkv.errors import LocalKVError, UsageError
from localkv.sampling.params import SAMPLER_ORDER, SamplingParams
from localkv.sampling.sampler import Sampler
from support.paths import DATA

INF = float("inf")
FIXTURE = json.loads((DATA / "llama_cpp_samplers.json").read_text())

# Multiples of 1/8 in a narrow range, so that ties are common, and banned tokens.
finite = st.integers(-80, 80).map(lambda i: i / 8)
vocabularies = st.lists(finite | st.just(-INF), min_size=1, max_size=40).filter(
    lambda logits: max(logits) > -INF
)
wide_vocabularies = st.builds(
    lambda seed, n, levels: (np.random.default_rng(seed).integers(levels, size=n) / 16).tolist(),
    st.integers(0, 2**32),
    st.sampled_from([300, 700, 2000]),
    st.sampled_from([2, 100, 10**6]),
)
any_vocabulary = vocabularies | wide_vocabularies
probabilities = st.floats(0, 1)
histories = st.lists(st.integers(0, 4), max_size=40)
examples = settings(deadline=None, max_examples=100)


def make(logits: list[float], **params: object) -> Sampler:
    return Sampler(SamplingParams(**{"seed": 1, **params}), n_vocab=len(logits))


def left(logits: list[float], *samplers: str, history: list[int] = [], **params: object) -> dict:  # noqa: B006
    """Token -> probability after a chain of the named samplers."""
    sampler = make(logits, samplers=samplers, **params)
    for token in history:
        sampler.accept(token)
    ids, found = sampler.candidates(np.array(logits, np.float32))
    assert ids.dtype == np.int64
    assert list(ids) == sorted(ids)
    assert (found > 0).all()
    return dict(zip(ids.tolist(), found.tolist(), strict=True))


# The references: dictionaries of token -> logit, loops, no arrays.


def softmax(logits: dict[int, float]) -> dict[int, float]:
    top = max(logits.values())
    weights = {token: math.exp(x - top) for token, x in logits.items()}
    total = math.fsum(weights.values())
    return {token: w / total for token, w in weights.items()}


def by_logit(logits: dict[int, float]) -> list[int]:
    return sorted(logits, key=lambda token: (-logits[token], token))


def take(order: list[int], p: dict[int, float], mass: float, strict: bool, min_keep: int) -> list:
    """The shortest beginning of `order` that holds `mass`."""
    total = 0.0
    for i, token in enumerate(order):
        total += p[token]
        if abs(total - mass) < 1e-9:
            assume(False)  # within rounding, either side is right
        if (total > mass if strict else total >= mass) and i + 1 >= min_keep:
            return order[: i + 1]
    return order


def expect(found: dict[int, float], tokens: list[int], logits: dict[int, float]) -> None:
    """The tokens are those that are left, with the softmax of their logits."""
    expected = {t: p for t, p in softmax({t: logits[t] for t in tokens}).items() if p > 0}
    assert found.keys() == expected.keys()
    assert list(found.values()) == pytest.approx([expected[t] for t in found], rel=1e-9)


def numbered(logits: list[float]) -> dict[int, float]:
    return dict(enumerate(logits))


# Each sampler beside its reference.


@examples
@given(any_vocabulary, st.integers(-2, 60))
def test_top_k(logits: list[float], k: int) -> None:
    x = numbered(logits)
    expect(left(logits, "top_k", top_k=k), by_logit(x)[:k] if k > 0 else list(x), x)


@examples
@given(any_vocabulary, probabilities, st.integers(0, 50))
def test_top_p(logits: list[float], p: float, min_keep: int) -> None:
    x = numbered(logits)
    tokens = take(by_logit(x), softmax(x), p, False, min_keep) if p < 1 else list(x)
    expect(left(logits, "top_p", top_p=p, min_keep=min_keep), tokens, x)


@pytest.mark.parametrize("levels", [3, 1000, 10**9])
def test_a_large_vocabulary(levels: int) -> None:
    x = (np.random.default_rng(5).integers(levels, size=128_256) / levels).astype(np.float32)
    order = np.lexsort((np.arange(len(x)), -x))
    for k in (1, 40, 256, 1000, 128_255):
        sampler = make(x.tolist(), samplers=("top_k",), top_k=k)
        assert sampler.candidates(x)[0].tolist() == sorted(order[:k])
    for p in (0.001, 0.5, 0.9):
        weights = np.exp(x[order].astype(np.float64))
        count = 1 + int((np.cumsum(weights) / weights.sum() < p).sum())
        sampler = make(x.tolist(), samplers=("top_p",), top_p=p)
        assert sampler.candidates(x)[0].tolist() == sorted(order[:count])


@examples
@given(any_vocabulary, probabilities, st.integers(0, 50))
def test_min_p(logits: list[float], p: float, min_keep: int) -> None:
    x = numbered(logits)
    probability = softmax(x)
    floor = p * max(probability.values())
    assume(not any(q != floor and abs(q - floor) <= 1e-9 * floor for q in probability.values()))
    order = by_logit(x)
    count = sum(q >= floor for q in probability.values())
    tokens = order[: max(count, min_keep)] if p > 0 else order
    expect(left(logits, "min_p", min_p=p, min_keep=min_keep), tokens, x)


@examples
@given(any_vocabulary, probabilities, st.integers(0, 50))
def test_typ_p(logits: list[float], p: float, min_keep: int) -> None:
    x = numbered(logits)
    probability = softmax(x)
    entropy = -math.fsum(q * math.log(q) for q in probability.values() if q > 0)
    distance = {t: abs(-math.log(q) - entropy) if q > 0 else INF for t, q in probability.items()}
    spots = sorted({(d, x[t]) for t, d in distance.items()})
    for (d, logit), (next_d, next_logit) in pairwise(spots):
        # Rounding decides between two tokens as far from the entropy, one on each side.
        assume(logit == next_logit or d == next_d == INF or next_d - d > 1e-9)
    order = sorted(x, key=lambda token: (round(distance[token], 10), token))
    tokens = take(order, probability, p, True, min_keep) if p < 1 else order
    expect(left(logits, "typ_p", typ_p=p, min_keep=min_keep), tokens, x)


@examples
@given(any_vocabulary, st.floats(-1, 4))
def test_top_n_sigma(logits: list[float], n: float) -> None:
    x = numbered(logits)
    numbers = [v for v in logits if v > -INF]
    mean = math.fsum(numbers) / len(numbers)
    sigma = math.sqrt(math.fsum((v - mean) ** 2 for v in numbers) / len(numbers))
    floor = max(numbers) - n * sigma
    assume(all(v == max(numbers) or abs(v - floor) > 1e-9 for v in logits))
    tokens = [t for t in x if x[t] >= floor or x[t] == max(numbers)] if n > 0 else list(x)
    expect(left(logits, "top_n_sigma", top_n_sigma=n), tokens, x)


@examples
@given(any_vocabulary, probabilities, st.integers(0, 50))
def test_xtc(logits: list[float], threshold: float, min_keep: int) -> None:
    x = numbered(logits)
    probability = softmax(x)
    assume(all(q == threshold or abs(q - threshold) > 1e-9 for q in probability.values()))
    order = by_logit(x)
    top = [t for t in order if probability[t] >= threshold and probability[t] > 0]
    tokens = order[len(top) - 1 :] if len(top) > 1 else order
    if threshold > 0.5 or len(tokens) < min_keep:
        tokens = order
    settings = {"xtc_probability": 1.0, "xtc_threshold": threshold, "min_keep": min_keep}
    expect(left(logits, "xtc", **settings), tokens, x)


@examples
@given(any_vocabulary, st.floats(0.05, 5), st.floats(-1, 2), st.floats(0, 3))
def test_temperature(logits: list[float], temp: float, spread: float, exponent: float) -> None:
    x = numbered(logits)
    t = temp
    if spread > 0 and len(x) > 1:
        entropy = -math.fsum(q * math.log(q) for q in softmax(x).values() if q > 0)
        low, high = max(0, temp - spread), temp + spread
        t = low + (high - low) * (entropy / math.log(len(x))) ** exponent
    params = {"temperature": temp, "dynatemp_range": spread, "dynatemp_exponent": exponent}
    found = left(logits, "temperature", **params)
    if t > 0.02:
        expect(found, list(x), {token: value / t for token, value in x.items()})
    elif t == 0:
        assert found == {by_logit(x)[0]: 1}


@examples
@given(
    st.lists(finite | st.just(-INF), min_size=5, max_size=5).filter(lambda v: max(v) > -INF),
    histories,
    st.integers(-1, 12),
    st.floats(0.5, 2),
    st.floats(-1, 1),
    st.floats(-1, 1),
)
def test_penalties(
    logits: list[float],
    history: list[int],
    last_n: int,
    repeat: float,
    frequency: float,
    presence: float,
) -> None:
    x = numbered(logits)
    window = history if last_n == -1 else history[-last_n:] if last_n else []
    for token in set(window):
        x[token] = x[token] / repeat if x[token] > 0 else x[token] * repeat
        x[token] -= window.count(token) * frequency + presence
    params = {
        "repeat_last_n": last_n,
        "repeat_penalty": repeat,
        "frequency_penalty": frequency,
        "presence_penalty": presence,
    }
    expect(left(logits, "penalties", history=history, **params), list(x), x)


def test_a_mass_that_is_reached_exactly() -> None:
    logits = [0.0] * 4
    assert list(left(logits, "top_p", top_p=0.5)) == [0, 1]
    assert list(left(logits, "typ_p", typ_p=0.5)) == [0, 1, 2]


def test_xtc_leaves_min_keep() -> None:
    settings = {"xtc_probability": 1.0, "xtc_threshold": 0.2}
    logits = [2.0, 1.9, 1.8, 0.0, 0.0]
    assert list(left(logits, "xtc", min_keep=3, **settings)) == [2, 3, 4]
    assert list(left(logits, "xtc", min_keep=4, **settings)) == [0, 1, 2, 3, 4]


@examples
@given(vocabularies, st.dictionaries(st.integers(0, 39), finite | st.just(-INF), max_size=5))
def test_logit_bias(logits: list[float], bias: dict[int, float]) -> None:
    bias = {token: value for token, value in bias.items() if token < len(logits)}
    x = {token: value + bias.get(token, 0) for token, value in enumerate(logits)}
    assume(max(x.values()) > -INF)
    expect(left(logits, logit_bias=bias), list(x), x)


# The outside oracle.


@pytest.mark.parametrize("number", range(len(FIXTURE["cases"])))
def test_llama_cpp_leaves_the_same(number: int) -> None:
    case = FIXTURE["cases"][number]
    n, step, scale = case["logits"]
    logits = (np.arange(1, n + 1) * step % 4099 - 2049).astype(np.float32) * scale / 256
    logits[case.get("banned", [])] = -INF
    sampler = Sampler(
        SamplingParams(
            **{k: tuple(v) if type(v) is list else v for k, v in case["params"].items()}
        ),
        n_vocab=n,
        n_ctx=case.get("n_ctx", 24),
        token_text=FIXTURE["texts"].__getitem__,
        tokenize=FIXTURE["rests"].__getitem__,
    )
    for token in case.get("history", []):
        sampler.accept(token)
    ids, found = sampler.candidates(logits)
    assert ids[found > 1e-9].tolist() == case["ids"]
    assert found[found > 1e-9].tolist() == pytest.approx(case["probabilities"], rel=1e-4)


class Number:
    """In place of a random generator: gives the number that draws a certain candidate."""

    def __init__(self, value: float) -> None:
        self.value = value

    def random(self) -> float:
        return self.value


def draw(sampler: Sampler, logits: np.ndarray, token: int) -> None:
    """Has the sampler draw this token, and take it."""
    ids, found = sampler.candidates(logits)
    at = ids.tolist().index(token)
    sampler._state.random = Number(float(found[:at].sum() + found[at] / 2))
    assert sampler.sample(logits) == token
    sampler.accept(token)


@pytest.mark.parametrize("way", FIXTURE["paths"], ids=lambda way: str(way["params"]))
def test_llama_cpp_corrects_itself_alike(way: dict) -> None:
    n_vocab = way["n_vocab"]
    chain = {"samplers": ("min_p", "adaptive_p")}
    sampler = Sampler(SamplingParams(seed=1, **way["params"], **chain), n_vocab=n_vocab)
    for step, scale, n_left, token, shown in way["steps"]:
        logits = (np.arange(1, n_vocab + 1) * step % 4099 - 2049).astype(np.float32) * scale / 256
        ids, found = sampler.candidates(logits)
        # a probability at the edge is rounded to float32 there
        assert len(ids) == pytest.approx(n_left, abs=1)
        assert ids[:8].tolist() == [id for id, _ in shown]
        assert found[:8].tolist() == pytest.approx([p for _, p in shown], rel=2e-3)
        draw(sampler, logits, token)


vocabularies_of_two = vocabularies.filter(lambda x: sum(value > -INF for value in x) > 1)
targets = st.floats(0, 1)


@examples
@given(st.lists(vocabularies_of_two, min_size=1, max_size=4), targets, st.floats(0, 0.99))
def test_adaptive_p(rows: list[list[float]], target: float, decay: float) -> None:
    total, weight = target / (1 - decay), 1 / (1 - decay)
    params = {"adaptive_target": target, "adaptive_decay": decay, "samplers": ("adaptive_p",)}
    sampler = Sampler(SamplingParams(seed=1, **params), n_vocab=40)
    for row in rows:
        row = row + [-INF] * (40 - len(row))
        before = softmax({t: x for t, x in numbered(row).items() if x > -INF})
        aim = min(max(2 * target - total / weight, 0.0), 1.0)
        off = {t: abs(p - aim) / 0.3 for t, p in before.items()}
        after = softmax({t: 5 - 10 * d * d / (1 + d) for t, d in off.items()})
        found = dict(zip(*map(np.ndarray.tolist, sampler.candidates(np.float32(row))), strict=True))
        assert found == pytest.approx({t: p for t, p in after.items() if p > 0}, rel=1e-9)
        token = sampler.sample(np.float32(row))
        sampler.accept(token)
        total, weight = before[token] + decay * total, 1 + decay * weight


def surprises(probability: dict[int, float]) -> dict[int, float]:
    return {t: -math.log2(p) if p else INF for t, p in probability.items()}


@examples
@given(
    st.lists(vocabularies, min_size=1, max_size=4),
    st.floats(0, 8),
    st.floats(0, 2),
    st.sampled_from([0.0, 0.5, 1.0, 3.0]),
)
def test_mirostat_2(rows: list[list[float]], tau: float, eta: float, temp: float) -> None:
    mu = 2 * tau
    params = {"mirostat": 2, "mirostat_tau": tau, "mirostat_eta": eta, "temperature": temp}
    sampler = Sampler(SamplingParams(seed=1, top_k=1, **params), n_vocab=40)
    for row in rows:
        row = row + [-INF] * (40 - len(row))
        x = {t: value / temp for t, value in numbered(row).items()} if temp else numbered(row)
        surprise = surprises(softmax(x))
        assume(all(abs(bits - mu) > 1e-9 for bits in surprise.values()))
        kept = [t for t, bits in surprise.items() if bits < mu] if temp else []
        kept = kept or by_logit(x)[:1]
        found = dict(zip(*map(np.ndarray.tolist, sampler.candidates(np.float32(row))), strict=True))
        expect(found, kept, x)
        token = sampler.sample(np.float32(row))
        sampler.accept(token)
        mu -= eta * (-math.log2(found[token]) - tau)


@examples
@given(any_vocabulary, st.floats(0, 8))
def test_mirostat_1(logits: list[float], tau: float) -> None:
    x = numbered(logits)
    p = softmax(x)
    top = [p[token] for token in by_logit(x)[:100] if p[token] > 0]
    k = 1.0
    if len(top) > 1:
        ranks = [math.log((i + 2) / (i + 1)) for i in range(len(top) - 1)]
        falls = [math.log(one / following) for one, following in pairwise(top)]
        s = math.fsum(map(math.prod, zip(ranks, falls, strict=True)))
        s /= math.fsum(rank * rank for rank in ranks)
        assume(s > 0.05 and abs(s - 1) > 1e-6)
        k = ((s - 1) * 4**tau / (1 - len(logits) ** (1 - s))) ** (1 / s)
        assume(abs(k - round(k)) > 1e-6 * k)
    found = left(logits, mirostat=1, mirostat_tau=tau, temperature=1.0)
    expect(found, by_logit(x)[: int(min(max(k, 1), len(x)))], x)


def test_a_token_that_was_not_drawn_teaches_nothing() -> None:
    logits = np.array([2.0, 1.5, 1.0, 0.5], np.float32)
    params = SamplingParams(seed=1, adaptive_target=0.3)
    plain, put = (Sampler(params, n_vocab=4) for _ in range(2))
    drawn = put.sample(logits)
    put.accept((drawn + 1) % 4)
    assert put.candidates(logits)[1].tolist() == plain.candidates(logits)[1].tolist()
    draw(put, logits, 0)
    assert put.candidates(logits)[1].tolist() != plain.candidates(logits)[1].tolist()
    put.reset()
    assert put.candidates(logits)[1].tolist() == plain.candidates(logits)[1].tolist()


# The chain.


def test_samplers_run_in_the_order_given() -> None:
    logits = [3.0, 2.0, 1.0, 0.0]
    params = {"temperature": 0.1, "min_p": 0.1}
    assert len(left(logits, "min_p", "temperature", **params)) == 3
    assert len(left(logits, "temperature", "min_p", **params)) == 1
    assert len(left(logits, "temperature", **params)) == 4
    assert left(logits, **params) == pytest.approx(softmax(numbered(logits)))


def test_the_default_chain_is_that_of_llama_cpp() -> None:
    logits = np.random.default_rng(3).normal(0, 3, 1000).tolist()
    x = numbered(np.float32(logits).tolist())
    kept = {t: x[t] for t in by_logit(x)[:40]}
    kept = {t: x[t] for t in take(by_logit(kept), softmax(kept), 0.95, False, 0)}
    probability = softmax(kept)
    kept = {
        t: v / 0.8 for t, v in kept.items() if probability[t] >= 0.05 * max(probability.values())
    }
    found = make(logits).candidates(np.array(logits, np.float32))
    expect(dict(zip(*map(np.ndarray.tolist, found), strict=True)), list(kept), kept)


@examples
@given(
    any_vocabulary,
    st.permutations(SAMPLER_ORDER),
    st.sampled_from([0, 1, 40]),
    st.sampled_from([0.1, 0.9, 1.0]),
    st.sampled_from([0.0, 0.1, 1.0]),
    st.sampled_from([-1.0, 0.5]),
)
def test_greedy_takes_the_largest_logit(
    logits: list[float], chain: tuple[str, ...], k: int, p: float, q: float, sigma: float
) -> None:
    params = {"samplers": tuple(chain), "top_k": k, "top_p": p, "min_p": q, "top_n_sigma": sigma}
    array = np.array(logits, np.float32)
    sampler = make(logits, temperature=0, **params)
    assert sampler.sample(array) == logits.index(max(logits))
    assert left(
        logits, *chain, temperature=-1.0, **{k: v for k, v in params.items() if k != "samplers"}
    ) == {logits.index(max(logits)): 1}


def test_greedy_comes_after_what_moves_logits() -> None:
    logits = [1.0, 5.0, 4.0]
    greedy = {"temperature": 0.0}
    assert make(logits, logit_bias={1: -INF}, **greedy).sample(np.float32(logits)) == 2
    penalised = make(logits, repeat_penalty=2.0, **greedy)
    penalised.accept(1)
    assert penalised.sample(np.float32(logits)) == 2
    repeating = make(logits, dry_multiplier=9.0, **greedy)
    for token in [0, 2, 1, 0, 2]:
        repeating.accept(token)
    assert repeating.sample(np.float32(logits)) == 2
    typical = make([math.log(2), 0.0, 0.0, 0.0], typ_p=0.5, **greedy)
    assert typical.sample(np.float32([math.log(2), 0, 0, 0])) == 1
    chosen = make(logits, xtc_probability=1.0, samplers=("xtc", "temperature"), **greedy)
    assert chosen.sample(np.float32(logits)) == 2


def test_a_range_around_zero_is_not_greedy() -> None:
    sampler = make([0.0] * 2, temperature=0, dynatemp_range=5.0, samplers=("temperature",))
    sampler._state.random = Dial(0.99)
    assert sampler.sample(np.float32([1, 0.9])) == 1


def test_temperature_left_out_is_a_temperature_of_one() -> None:
    logits = [0.0, 1.0]
    assert left(logits, "top_k", temperature=0) == pytest.approx(softmax(numbered(logits)))


@pytest.mark.parametrize("first", [-INF, -3e38, 0.0, 3e38])
def test_a_vocabulary_of_one_token(first: float) -> None:
    sampler = make([first], typ_p=0.5, top_n_sigma=1.0, dynatemp_range=0.5, xtc_probability=1.0)
    if first == -INF:
        with pytest.raises(LocalKVError):
            sampler.sample(np.float32([first]))
    else:
        assert sampler.sample(np.float32([first])) == 0


@pytest.mark.parametrize("temperature", [1e-30, 0.8, 1e30])
def test_logits_of_any_size(temperature: float) -> None:
    logits = [3e38, -3e38, 2.9e38, -INF, 1e-45]
    everything = {"typ_p": 0.9, "top_n_sigma": 1.0, "dynatemp_range": 0.1, "xtc_probability": 1.0}
    sampler = make(logits, temperature=temperature, **everything)
    assert sampler.sample(np.float32(logits)) == 0


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("bad", [float("nan"), -INF, INF])
def test_logits_that_are_not_numbers_are_refused(bad: float, temperature: float) -> None:
    logits = np.full(300, bad, np.float32)
    sampler = make([0.0] * 300, temperature=temperature)
    with pytest.raises(LocalKVError, match="the model produced NaN or infinite logits"):
        sampler.sample(logits)
    if bad != -INF:
        logits[:299] = 1
        with pytest.raises(LocalKVError, match="the model produced NaN or infinite logits"):
            sampler.sample(logits)


def test_nothing_left_to_draw_is_an_error() -> None:
    logits = np.float32([0, 0, -INF])  # a grammar leaves two
    bias = {0: -INF, 1: -INF}
    for params in ({}, {"temperature": 0.0}, {"top_n_sigma": 1.0}, {"samplers": ()}):
        with pytest.raises(LocalKVError, match="no token is left to draw"):
            make([0.0] * 3, logit_bias=bias, **params).sample(logits)


def test_logits_of_another_length_are_a_bug() -> None:
    with pytest.raises(ValueError, match="shape"):
        make([0.0] * 3).sample(np.zeros(4, np.float32))


def test_the_logits_are_left_as_they_are() -> None:
    logits = np.arange(10, dtype=np.float32)
    logits.flags.writeable = False
    params = {"typ_p": 0.9, "top_n_sigma": 2.0, "repeat_penalty": 1.3, "dry_multiplier": 1.0}
    sampler = make([0.0] * 10, logit_bias={3: 1.0}, dynatemp_range=0.2, **params)
    for token in [9, 8, 9, 8, 9]:
        sampler.accept(token)
    sampler.sample(logits)
    assert logits.tolist() == list(range(10))


# Drawing.


class Dial:
    """In place of the generator: numbers set by hand, and how many were drawn."""

    def __init__(self, *numbers: float) -> None:
        self.numbers = list(numbers)

    def random(self) -> float:
        return self.numbers.pop(0)


def test_a_draw_is_the_inverse_of_the_cumulative_distribution() -> None:
    logits = np.float32([0.0, -INF, math.log(3), math.log(4), -INF])  # 1/8, 0, 3/8, 1/2, 0
    sampler = make([0.0] * 5, samplers=())
    draws = {0.0: 0, 0.12: 0, 0.13: 2, 0.49: 2, 0.51: 3, 1 - 2**-53: 3}
    sampler._state.random = Dial(*draws)
    assert [sampler.sample(logits) for _ in draws] == list(draws.values())
    even = make([0.0] * 4, samplers=())
    even._state.random = Dial(0.0, 0.25, 0.5, 0.75)
    assert [even.sample(np.zeros(4, np.float32)) for _ in range(4)] == [0, 1, 2, 3]


def test_xtc_runs_with_its_probability() -> None:
    logits = np.float32([2.0, 1.9, 0.0])
    sampler = make([0.0] * 3, samplers=("xtc",), xtc_probability=0.3)
    for number, n_left in [(0.0, 2), (0.3, 2), (0.31, 3), (0.99, 3)]:
        sampler._state.random = Dial(number)
        assert len(sampler.candidates(logits)[0]) == n_left


def test_xtc_draws_no_number_where_it_cannot_run() -> None:
    for params in ({"top_k": 1}, {"xtc_threshold": 0.6}):
        sampler = make([0.0] * 3, samplers=("top_k", "xtc"), xtc_probability=1.0, **params)
        sampler._state.random = Dial()
        sampler.candidates(np.float32([2, 1, 0]))


def test_greedy_draws_no_random_numbers() -> None:
    logits = np.float32([2.0, 1.9, 0.0])
    for params in ({}, {"repeat_penalty": 1.1}, {"typ_p": 0.5}):
        sampler = make([0.0] * 3, temperature=0, **params)
        sampler._state.random = Dial()
        sampler.sample(logits)


def draws(sampler: Sampler, n: int = 30) -> list[int]:
    logits = (np.arange(500) * 7919 % 4099).astype(np.float32) / 1024
    tokens = []
    for _ in range(n):
        tokens.append(sampler.sample(logits))
        sampler.accept(tokens[-1])
    return tokens


def test_the_same_seed_gives_the_same_tokens() -> None:
    params = {"temperature": 1.5, "repeat_penalty": 1.2, "xtc_probability": 0.5}
    sampler = make([0.0] * 500, seed=42, **params)
    tokens = draws(sampler)
    assert tokens[:8] == [206, 339, 485, 382, 192, 456, 397, 89]
    sampler.reset()
    assert draws(sampler) == tokens
    assert draws(make([0.0] * 500, seed=42, **params)) == tokens
    assert draws(make([0.0] * 500, seed=43, **params)) != tokens


@pytest.mark.parametrize("seed", [None, -1])
def test_a_drawn_seed_can_be_used_again(seed: int | None) -> None:
    first, second = (make([0.0] * 500, seed=seed, temperature=3.0) for _ in range(2))
    assert first.seed != second.seed
    assert 0 <= first.seed < 2**32
    assert draws(first) == draws(make([0.0] * 500, seed=first.seed, temperature=3.0))


# What the sampler remembers.


def test_the_window_of_the_penalties_moves() -> None:
    logits = np.zeros(6, np.float32)
    sampler = make([0.0] * 6, samplers=("penalties",), repeat_last_n=3, presence_penalty=1.0)
    for n in range(40):
        sampler.accept(n % 6)
        recent = {m % 6 for m in range(max(0, n - 2), n + 1)}
        ids, found = sampler.candidates(logits)
        assert set(ids[found < found.max()].tolist()) == recent
    sampler.reset()
    assert len(set(sampler.candidates(logits)[1].tolist())) == 1


def test_minus_one_is_the_context() -> None:
    logits = np.zeros(6, np.float32)
    params = SamplingParams(samplers=("penalties",), repeat_last_n=-1, presence_penalty=1.0)
    sampler = Sampler(params, n_vocab=6, n_ctx=4)
    for token in [5, 0, 1, 2, 3]:
        sampler.accept(token)
    ids, found = sampler.candidates(logits)
    assert ids[found == found.max()].tolist() == [4, 5]


def test_a_bias_on_a_token_that_is_not_there_is_refused() -> None:
    with pytest.raises(UsageError, match="logit_bias names token 3; the vocabulary has 3"):
        make([0.0] * 3, logit_bias={3: 1.0})
