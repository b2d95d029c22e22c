"""The tokens that can still be drawn, and the arithmetic that samplers share."""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from localkv.errors import LocalKVError

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


class Candidates(NamedTuple):
    """The tokens that can still be drawn.

    Attributes:
        ids: ascending token ids, int64 [n], n >= 1.
        logits: theirs, float64 [n]; -inf for one that cannot be drawn but that llama.cpp counts.
    """

    ids: Ints
    logits: Floats


def softmax(logits: Floats) -> Floats:
    """Probabilities of the candidates, float64 [n]."""
    largest = logits.max()
    if not np.isfinite(largest):
        raise LocalKVError(
            "no token is left to draw", hint="logit_bias or a penalty excludes every one"
        )
    probabilities: Floats = np.exp(logits - largest)
    probabilities /= probabilities.sum()
    return probabilities


def entropy(probabilities: Floats) -> float:
    p = probabilities[probabilities > 0]
    return float(-(p * np.log(p)).sum())


def largest(keys: Floats, k: int) -> Ints:
    """Indices, ascending, of the k largest keys [n]; of equal keys those with the lowest index."""
    n = len(keys)
    if k >= n:
        return np.arange(n)
    columns = n // 64
    kth = -np.inf
    if k <= columns // 4:
        # The maxima of k columns are at least this large, so the k-th largest key is, too.
        maxima = keys[: 64 * columns].reshape(64, columns).max(axis=0)
        kth = np.partition(maxima, columns - k)[columns - k]
    above = np.flatnonzero(keys > kth)
    if len(above) < k:
        equal = np.flatnonzero(keys == kth)
    else:
        values = keys[above]
        kth = np.partition(values, len(values) - k)[len(values) - k]
        above, equal = above[values > kth], above[values == kth]
    return np.sort(np.concatenate([above, equal[: k - len(above)]]))


def fewest(
    keys: Floats,
    probabilities: Floats,
    mass: float,
    side: Literal["left", "right"],
    min_keep: int,
) -> Ints:
    """Indices, ascending, of the fewest candidates with the largest keys that hold `mass`.

    The one that reaches it (side "left") or exceeds it (side "right") is among them.
    """
    for k in (256, 4096, len(keys)):  # mostly few tokens hold the mass: sort no more of them
        best = largest(keys, k)
        best = best[np.argsort(-keys[best], kind="stable")]
        cumulative = np.cumsum(probabilities[best])
        count = max(int(np.searchsorted(cumulative, mass, side)) + 1, min_keep)
        if count <= len(best):
            break
    return np.sort(best[:count])


def find(ids: Ints, tokens: Ints) -> tuple[Ints, npt.NDArray[np.bool_]]:
    """Indices into `ids` of those `tokens` that are in it, and which ones are."""
    at = np.searchsorted(ids, tokens)
    at[at == len(ids)] = 0
    found = ids[at] == tokens
    return at[found], found
