"""The samplers of the chain: plain functions from `Candidates` to `Candidates`.

What each one computes is what llama.cpp's `src/llama-sampler.cpp` computes; where llama.cpp leaves
the choice between equal logits to its sort, the lowest token id wins here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from localkv.sampling.candidates import Candidates, Ints, entropy, fewest, find, largest, softmax


def logit_bias(candidates: Candidates, bias: Mapping[int, float]) -> Candidates:
    """Adds a number to the logits of some tokens; -inf bans one."""
    at, found = find(candidates.ids, np.array(list(bias), np.int64))
    logits = candidates.logits.copy()
    logits[at] += np.array(list(bias.values()), np.float64)[found]
    return Candidates(candidates.ids, logits)


def penalties(
    candidates: Candidates, recent: Ints, repeat: float, frequency: float, presence: float
) -> Candidates:
    """Lowers the logits of tokens that came up recently.

    Keskar et al. 2019 (CTRL) divide a logit by `repeat`; llama.cpp multiplies one that is not
    positive, so that it does fall. Then `count * frequency + presence` is taken off, as OpenAI's
    interface defines them.

    Args:
        recent: the last tokens, int64 [any].
    """
    tokens, counts = np.unique(recent, return_counts=True)
    at, found = find(candidates.ids, tokens)
    logits = candidates.logits.copy()
    x = logits[at]
    x = np.where(x > 0, x / repeat, x * repeat)
    logits[at] = x - (counts[found] * frequency + presence)
    return Candidates(candidates.ids, logits)


def top_n_sigma(candidates: Candidates, n: float) -> Candidates:
    """Keeps logits within n standard deviations of the largest (Tang et al. 2024, top-nσ).

    The others become -inf, but stay: they count in the size by which `temperature` normalises.
    """
    logits = candidates.logits
    finite = logits[logits > -np.inf]
    if not len(finite):
        return candidates
    keep = logits >= finite.max() - n * finite.std()
    return Candidates(candidates.ids, np.where(keep, logits, -np.inf))


def top_k(candidates: Candidates, k: int) -> Candidates:
    """Keeps the k most likely (Fan et al. 2018)."""
    kept = largest(candidates.logits, k)
    return Candidates(candidates.ids[kept], candidates.logits[kept])


def typ_p(candidates: Candidates, p: float, min_keep: int) -> Candidates:
    """Keeps the fewest tokens that hold more than p, those with the most typical probability first.

    Locally typical sampling (Meister et al. 2022): `-log(probability)` closest to the entropy.
    """
    probabilities = softmax(candidates.logits)
    with np.errstate(divide="ignore"):
        surprise = -np.log(probabilities)
    keys = -np.abs(surprise - entropy(probabilities))
    kept = fewest(keys, probabilities, p, "right", min_keep)
    return Candidates(candidates.ids[kept], candidates.logits[kept])


def top_p(candidates: Candidates, p: float, min_keep: int) -> Candidates:
    """Keeps the fewest tokens that hold at least p, the most likely first.

    Nucleus sampling (Holtzman et al. 2019).
    """
    probabilities = softmax(candidates.logits)
    kept = fewest(candidates.logits, probabilities, p, "left", min_keep)
    return Candidates(candidates.ids[kept], candidates.logits[kept])


def min_p(candidates: Candidates, p: float, min_keep: int) -> Candidates:
    """Keeps tokens with at least p times the largest probability (Nguyen et al. 2024)."""
    logits = candidates.logits
    kept = np.flatnonzero(logits >= logits.max() + math.log(p))
    if len(kept) < min_keep:
        kept = largest(logits, min_keep)
    return Candidates(candidates.ids[kept], logits[kept])


def xtc(candidates: Candidates, threshold: float, min_keep: int) -> Candidates:
    """Drops all tokens with at least the threshold's probability but the least likely of them.

    "Exclude top choices" (p-e-w, text-generation-webui #6335). Whether it runs on a token is drawn
    by the caller. Does nothing where fewer than `min_keep` would be left.
    """
    probabilities = softmax(candidates.logits)
    top = np.flatnonzero((probabilities >= threshold) & (probabilities > 0))
    if len(top) < 2 or len(probabilities) - (len(top) - 1) < min_keep:
        return candidates
    least = top[candidates.logits[top] == candidates.logits[top].min()][-1]
    kept = np.ones(len(probabilities), np.bool_)
    kept[top] = top == least
    return Candidates(candidates.ids[kept], candidates.logits[kept])


def temperature(
    candidates: Candidates, temp: float, dynatemp_range: float, dynatemp_exponent: float
) -> Candidates:
    """Divides the logits by the temperature; one that is not positive leaves the largest only.

    With a range the temperature is, after kalomaze's dynamic temperature,
    `low + (high - low) * (entropy / log(n)) ** exponent`, with `low = max(0, temp - range)` and
    `high = temp + range`.
    """
    if dynatemp_range > 0 and len(candidates.ids) > 1:
        spread = entropy(softmax(candidates.logits)) / math.log(len(candidates.ids))
        low, high = max(0.0, temp - dynatemp_range), temp + dynatemp_range
        temp = low + (high - low) * spread**dynatemp_exponent
    if temp > 0:
        return Candidates(candidates.ids, candidates.logits / temp)
    best = candidates.logits.argmax(0, keepdims=True)
    return Candidates(candidates.ids[best], candidates.logits[best])
