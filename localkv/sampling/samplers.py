"""The samplers of the chain: functions from `Candidates` to `Candidates`, named as in `SAMPLERS`.

Each computes the same as in llama.cpp's `src/llama-sampler.cpp`; where llama.cpp leaves
the choice between equal logits to its sort, the lowest token id wins here.
"""

from __future__ import annotations

import math

import numpy as np

from localkv.sampling.candidates import (
    Candidates,
    Floats,
    Ints,
    deviation,
    entropy,
    fewest,
    find,
    largest,
    only,
    scratch,
    softmax,
    without,
)
from localkv.sampling.params import LEAST_TEMPERATURE, SamplingParams
from localkv.sampling.state import SamplerState

LEAST_POSITIVE = 5e-324
"""The smallest number above 0."""


def logit_bias(candidates: Candidates, tokens: Ints, amounts: Floats) -> Candidates:
    """Adds numbers [n] to the logits of tokens [n] of the whole vocabulary; -inf bans one."""
    candidates.logits[tokens] += amounts
    return candidates


def penalties(candidates: Candidates, params: SamplingParams, state: SamplerState) -> Candidates:
    """Lowers the logits of tokens that came up recently.

    Keskar et al. 2019 (CTRL) divide a logit by `repeat_penalty`; llama.cpp multiplies one that is
    not positive, so that it does fall. Then `count * frequency_penalty + presence_penalty` is taken
    off, as OpenAI's interface defines them.
    """
    recent = state.recent(params.repeat_last_n)
    tokens, counts = np.unique(recent, return_counts=True)
    at, found = find(candidates.ids, tokens)
    x = candidates.logits[at]
    x = np.where(x > 0, x / params.repeat_penalty, x * params.repeat_penalty)
    x -= counts[found] * params.frequency_penalty + params.presence_penalty
    candidates.logits[at] = x
    return candidates


def dry(candidates: Candidates, params: SamplingParams, state: SamplerState) -> Candidates:
    """Lowers the logits of tokens that would go on with a sequence that was there before.

    "Don't repeat yourself" (p-e-w, text-generation-webui #5677). A token loses `multiplier * base
    ** (length - allowed_length)`. `length` is the longest run of last tokens (not across a sequence
    breaker) that the token followed earlier. A token loses nothing where that is shorter than
    `allowed_length`, or where the token holds a breaker. llama.cpp bounds the exponent so that the
    power stays finite in float32.
    """
    base, allowed_length = params.dry_base, params.dry_allowed_length
    recent, breakers = state.recent(params.dry_penalty_last_n), state.breakers
    n = len(recent)
    limit = state.since_breaker(params.dry_penalty_last_n)
    if n <= allowed_length or limit < allowed_length:
        return candidates
    max_exponent = int(88.7228391 / math.log(base)) if base > 1.000001 else n
    lengths = state.repeats(params.dry_penalty_last_n, allowed_length + max_exponent)
    lengths = np.minimum(lengths, limit)
    again = lengths >= allowed_length
    tokens, inverse = np.unique(recent[1:][again], return_inverse=True)
    longest = np.zeros(len(tokens), np.int64)
    np.maximum.at(longest, inverse, lengths[again])
    breaks = np.array([() in breakers(token) for token in tokens.tolist()], np.bool_)
    penalty = params.dry_multiplier * np.power(base, longest - allowed_length)
    penalty = np.where(breaks, 0.0, penalty)
    at, found = find(candidates.ids, tokens)
    candidates.logits[at] -= penalty[found]
    return candidates


def top_n_sigma(candidates: Candidates, params: SamplingParams, _: SamplerState) -> Candidates:
    """Keeps logits within n standard deviations of the largest (Tang et al. 2024, top-nσ).

    The others become -inf, but stay: they count in the size by which `temperature` normalises.
    """
    logits = candidates.logits
    finite = logits if np.isfinite(logits.min()) else logits[logits > -np.inf]
    if not len(finite):
        return candidates
    logits[logits < finite.max() - params.top_n_sigma * deviation(finite)] = -np.inf
    return candidates


def top_k(candidates: Candidates, params: SamplingParams, _: SamplerState) -> Candidates:
    """Keeps the k most likely (Fan et al. 2018)."""
    return only(candidates, largest(candidates.logits, params.top_k))


def typ_p(candidates: Candidates, params: SamplingParams, _: SamplerState) -> Candidates:
    """Keeps the fewest tokens that hold more than typ_p, the most typical ones first.

    Locally typical sampling (Meister et al. 2022): the closer a token's `-log(probability)` is to
    the entropy, the more typical it is.
    """
    probabilities = softmax(candidates.logits)
    keys = scratch("keys", len(probabilities))
    with np.errstate(divide="ignore"):
        np.log(probabilities, out=keys)
    keys += entropy(probabilities, keys)
    np.negative(np.abs(keys, out=keys), out=keys)
    return only(candidates, fewest(keys, probabilities, params.typ_p, "right", params.min_keep))


def top_p(candidates: Candidates, params: SamplingParams, _: SamplerState) -> Candidates:
    """Keeps the fewest tokens that hold at least top_p, the most likely first.

    Nucleus sampling (Holtzman et al. 2019).
    """
    probabilities = softmax(candidates.logits)
    logits, min_keep = candidates.logits, params.min_keep
    kept = fewest(logits, probabilities, params.top_p, "left", min_keep, in_order=True)
    return only(candidates, kept)


def min_p(candidates: Candidates, params: SamplingParams, _: SamplerState) -> Candidates:
    """Keeps tokens with at least min_p times the largest probability (Nguyen et al. 2024)."""
    logits = candidates.logits
    kept = np.flatnonzero(logits >= logits.max() + math.log(params.min_p))
    if len(kept) < params.min_keep:
        kept = largest(logits, params.min_keep)
    return only(candidates, kept)


def xtc(candidates: Candidates, params: SamplingParams, state: SamplerState) -> Candidates:
    """Drops all tokens with at least the threshold's probability but the least likely of them.

    "Exclude top choices" (p-e-w, text-generation-webui #6335). Does nothing where fewer than
    `min_keep` would be left, and for those tokens of the text that the random generator leaves out.
    """
    if len(candidates.ids) < 2 or state.random.random() > params.xtc_probability:
        return candidates
    probabilities = softmax(candidates.logits)
    top = np.flatnonzero(probabilities >= max(params.xtc_threshold, LEAST_POSITIVE))
    if len(top) < 2 or len(probabilities) - (len(top) - 1) < params.min_keep:
        return candidates
    least = top[candidates.logits[top] == candidates.logits[top].min()][-1]
    return without(candidates, top[top != least])


def temperature(candidates: Candidates, params: SamplingParams, _: SamplerState) -> Candidates:
    """Divides the logits by the temperature. One that is not positive, or too small to divide by,
    leaves only the largest.

    With a range the temperature is, after kalomaze's dynamic temperature,
    `low + (high - low) * (entropy / log(n)) ** exponent`, with `low = max(0, temp - range)` and
    `high = temp + range`.
    """
    temp = params.temperature
    if params.dynatemp_range > 0 and len(candidates.ids) > 1:
        spread = entropy(softmax(candidates.logits)) / math.log(len(candidates.ids))
        spread = min(1.0, spread)  # but for rounding it is
        low, high = max(0.0, temp - params.dynatemp_range), temp + params.dynatemp_range
        temp = low + (high - low) * spread**params.dynatemp_exponent
    return _divided(candidates, temp)


def _divided(candidates: Candidates, temp: float) -> Candidates:
    if temp >= LEAST_TEMPERATURE:
        np.divide(candidates.logits, temp, out=candidates.logits)
        return candidates
    return only(candidates, candidates.logits.argmax(0, keepdims=True))


_PEAK, _SHARPNESS, _WIDTH = 5.0, 10.0, 0.3


def adaptive_p(candidates: Candidates, params: SamplingParams, state: SamplerState) -> Candidates:
    """Prefers tokens of about the target's probability: a logit becomes `5 - 10 d * d / (1 + d)`
    where the probability is 0.3 d away from it.

    Adaptive-P (llama.cpp #17927). The mean probability of the text's tokens is off the target, and
    the target is moved to the other side by as much. In the mean a token counts `adaptive_decay`
    times as much as the next one. At first the mean is the target.
    """
    target, decay = params.adaptive_target, params.adaptive_decay
    total, weight = state.feedback or (target / (1 - decay), 1 / (1 - decay))
    aim = min(max(2 * target - total / weight, 0.0), 1.0)
    probabilities = softmax(candidates.logits)
    before = probabilities.copy()
    off = np.abs((probabilities - aim) / _WIDTH)
    can_be = candidates.logits > -np.inf
    np.copyto(candidates.logits, _PEAK - _SHARPNESS * off * off / (1 + off), where=can_be)
    state.after = lambda at, _: (float(before[at]) + decay * total, 1 + decay * weight)
    return candidates


_MOST_RANKS = 100
"""Tokens that Mirostat estimates the distribution by (llama.cpp's `m`)."""


def mirostat(candidates: Candidates, params: SamplingParams, state: SamplerState) -> Candidates:
    """Divides by the temperature, then keeps as many of the likeliest tokens as make the surprise
    of the text's tokens stay at about `mirostat_tau` bits (Basu et al. 2021).

    Version 2 drops the tokens that would surprise by more than mu bits. Version 1 keeps k, for
    which a distribution with the exponent of Zipf's law that the likeliest tokens have would
    surprise by mu. After each token `mirostat_eta` times what its surprise was above tau is taken
    off mu, which begins at 2 tau.
    """
    n_vocab, tau = len(candidates.ids), params.mirostat_tau
    candidates = _divided(candidates, params.temperature)
    (mu,) = state.feedback or (2 * tau,)
    probabilities = softmax(candidates.logits)
    if params.mirostat == 1:
        top = probabilities[largest(probabilities, _MOST_RANKS)]
        kept = largest(candidates.logits, _zipf_rank(np.sort(top[top > 0])[::-1], n_vocab, mu))
    else:
        with np.errstate(divide="ignore"):
            kept = np.flatnonzero(-np.log2(probabilities) <= mu)
        if not len(kept):
            kept = largest(candidates.logits, 1)
    eta = params.mirostat_eta
    state.after = lambda at, found: (mu - eta * (-math.log2(found[at]) - tau),)
    return only(candidates, kept)


def _zipf_rank(top: Floats, n_vocab: int, mu: float) -> int:
    """How many tokens Mirostat keeps: the paper's k.

    Args:
        top: the largest probabilities, float64 [n], descending, above 0.
    """
    n = len(top)
    if n < 2:
        return 1
    ranks = np.log(np.arange(2, n + 1) / np.arange(1, n))
    exponent = float(ranks @ -np.diff(np.log(top)) / (ranks @ ranks))
    beyond, size = exponent - 1, math.log(n_vocab)
    # (beyond * 2^mu / (1 - n_vocab^-beyond)) ^ (1 / exponent), by logarithms
    scale = beyond / -math.expm1(-beyond * size) if abs(beyond) > 1e-9 else 1 / size
    bits = mu * math.log(2) + math.log(scale)
    if bits <= 0:
        return 1
    return n_vocab if bits >= exponent * size else int(math.exp(bits / exponent))
