"""`plain_draw`: the sampler chain without shortcuts: whole sorts, sums from one token to the next.

The arithmetic is the sampler's, operation for operation, so the tokens must be the same, and not
only nearly so. What each sampler means is tested against loops, in tests/sampling.
"""

from __future__ import annotations

import math

import numpy as np

from localkv.sampling.params import SamplingParams, active_samplers


def plain_draw(
    logits: np.ndarray, params: SamplingParams, random: np.random.Generator, recent: list[int]
) -> int:
    """The next token.

    Args:
        logits: float32 [n_vocab].
        random: numbers for XTC and for the draw.
        recent: the text's tokens, for the penalties; DRY is left to its own tests.
    """
    ids, x = np.arange(len(logits)), logits.astype(np.float64)
    for token, bias in params.logit_bias.items():
        x[token] += bias
    for entry in active_samplers(params):
        ids, x = CHAIN[entry.name](ids, x, params, random, recent)
    p = softmax(x)
    ids, p = ids[p > 0], p[p > 0]
    if len(ids) == 1:
        return int(ids[0])
    cumulative = np.cumsum(p)
    return int(ids[np.searchsorted(cumulative, random.random() * cumulative[-1], "right")])


def softmax(x: np.ndarray) -> np.ndarray:
    p = np.exp(x - x.max())
    return p / p.sum()


def entropy(p: np.ndarray) -> float:
    p = p[p > 0]
    return float(-(p * np.log(p)).sum())


def first(keys: np.ndarray, count: int) -> np.ndarray:
    """Indices, ascending, of those with the largest keys; of equal ones the lowest."""
    return np.sort(np.argsort(-keys, kind="stable")[:count])


def holding(keys: np.ndarray, p: np.ndarray, mass: float, side: str, least: int) -> np.ndarray:
    order = np.argsort(-keys, kind="stable")
    count = int(np.searchsorted(np.cumsum(p[order]), mass, side)) + 1
    return np.sort(order[: max(count, least)])


def penalties(ids, x, params, random, recent):
    tokens, counts = np.unique(recent[-params.repeat_last_n :], return_counts=True)
    for token, count in zip(tokens.astype(int), counts, strict=True):
        at = ids == token
        repeat = params.repeat_penalty
        x[at] = np.where(x[at] > 0, x[at] / repeat, x[at] * repeat)
        x[at] -= count * params.frequency_penalty + params.presence_penalty
    return ids, x


def top_n_sigma(ids, x, params, random, recent):
    finite = x[x > -np.inf]
    return ids, np.where(x >= finite.max() - params.top_n_sigma * finite.std(), x, -np.inf)


def top_k(ids, x, params, random, recent):
    kept = first(x, params.top_k)
    return ids[kept], x[kept]


def typ_p(ids, x, params, random, recent):
    p = softmax(x)
    with np.errstate(divide="ignore"):
        keys = -np.abs(-np.log(p) - entropy(p))
    kept = holding(keys, p, params.typ_p, "right", params.min_keep)
    return ids[kept], x[kept]


def top_p(ids, x, params, random, recent):
    kept = holding(x, softmax(x), params.top_p, "left", params.min_keep)
    return ids[kept], x[kept]


def min_p(ids, x, params, random, recent):
    kept = x >= x.max() + math.log(params.min_p)
    if kept.sum() < params.min_keep:
        kept = first(x, params.min_keep)
    return ids[kept], x[kept]


def xtc(ids, x, params, random, recent):
    if len(ids) < 2 or random.random() > params.xtc_probability:
        return ids, x
    p = softmax(x)
    top = np.flatnonzero((p >= params.xtc_threshold) & (p > 0))
    if len(top) < 2 or len(p) - (len(top) - 1) < params.min_keep:
        return ids, x
    least = top[x[top] == x[top].min()][-1]
    kept = np.ones(len(p), bool)
    kept[top] = top == least
    return ids[kept], x[kept]


def temperature(ids, x, params, random, recent):
    temp = params.temperature
    if params.dynatemp_range > 0 and len(ids) > 1:
        low, high = max(0.0, temp - params.dynatemp_range), temp + params.dynatemp_range
        spread = entropy(softmax(x)) / math.log(len(ids))
        temp = low + (high - low) * spread**params.dynatemp_exponent
    if temp > 0:
        return ids, x / temp
    best = x.argmax(0, keepdims=True)
    return ids[best], x[best]


CHAIN = {
    function.__name__: function
    for function in (penalties, top_n_sigma, top_k, typ_p, top_p, min_p, xtc, temperature)
}
