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

    "Don't repeat yourself" (p-e-w, text-generation-webui #5677). A token is worth
    `multiplier * base ** (length - allowed_length)` off, `length` being the longest run of last
    tokens (not across a sequence breaker) that the token followed earlier; nothing where it is
    shorter than `allowed_length`, or where the token holds a breaker. llama.cpp bounds the exponent
    so that the power stays finite in float32.
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
    if temp >= LEAST_TEMPERATURE:
        np.divide(candidates.logits, temp, out=candidates.logits)
        return candidates
    return only(candidates, candidates.logits.argmax(0, keepdims=True))
