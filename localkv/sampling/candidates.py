"""The tokens that can still be drawn, and the arithmetic that samplers share.

A vocabulary has 128,000 tokens and more, and a token should be drawn in less time than a step of
the model varies by. So nothing sorts the whole vocabulary, long sums are made in blocks, and arrays
of its length stay where they are (`scratch`). What rounding could decide is decided as if the sums
had been made one by one: within the bound of their error, they are.
"""

from __future__ import annotations

import functools
import itertools
import math
import threading
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from localkv.errors import UsageError

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_EPS = 2.0**-53
_BINS = 4096
_SPAN = 48.0
"""Keys that lie so far below the largest share a bin: as logits they are worth nothing."""


class Candidates(NamedTuple):
    """The tokens that can still be drawn.

    Attributes:
        ids: ascending token ids, int64 [n], n >= 1.
        logits: theirs, float64 [n]; -inf for one that cannot be drawn but that llama.cpp counts.

    A sampler may write to the logits, and what `only` and `without` return is theirs until the
    second next call of either in this thread.
    """

    ids: Ints
    logits: Floats


_local = threading.local()


def scratch(name: str, n: int) -> Floats:
    """A thread's array of that name, float64 [n]: asking for it again overwrites it.

    Memory of a megabyte costs more to get from the system than most of the arithmetic here.
    """
    arrays: dict[str, Floats] = _local.__dict__
    if name not in arrays or len(arrays[name]) < n:
        arrays[name] = np.empty(n)
    return arrays[name][:n]


@functools.lru_cache(4)
def all_ids(n_vocab: int) -> Ints:
    """Every token, int64 [n_vocab], read only."""
    ids = np.arange(n_vocab)
    ids.flags.writeable = False
    return ids


def softmax(logits: Floats) -> Floats:
    """Probabilities of the candidates, float64 [n], until the next call in this thread."""
    largest = logits.max()
    if not np.isfinite(largest):
        raise UsageError(
            "no token is left to draw", hint="logit_bias or a penalty excludes every one"
        )
    probabilities = scratch("softmax", len(logits))
    np.subtract(logits, largest, out=probabilities)
    np.exp(probabilities, out=probabilities)
    probabilities /= probabilities.sum()
    return probabilities


def entropy(probabilities: Floats, logarithms: Floats | None = None) -> float:
    """The entropy of probabilities, in nats; `logarithms` are theirs, if they are known."""
    p = probabilities
    if p.all():
        terms = np.log(p, out=scratch("terms", len(p))) if logarithms is None else logarithms
        return float(-np.multiply(p, terms, out=scratch("terms", len(p))).sum())
    p = p[p > 0]
    return float(-(p * np.log(p)).sum())


def deviation(x: Floats) -> float:
    """The standard deviation, as `std` computes it, which makes arrays of its own."""
    spread = np.subtract(x, x.mean(), out=scratch("spread", len(x)))
    np.multiply(spread, spread, out=spread)
    return math.sqrt(spread.mean())


def starting(ids: Ints, logits: npt.NDArray[np.float32]) -> Candidates:
    """All tokens, ascending, with a copy of their logits."""
    start = scratch("first logits", len(logits))
    start[:] = logits
    return Candidates(ids, start)


def only(candidates: Candidates, kept: Ints) -> Candidates:
    """The candidates with these indices, ascending."""
    if len(kept) == len(candidates.ids):
        return candidates
    left = _room(candidates, len(kept))
    for source, target in zip(candidates, left, strict=True):
        np.take(source, kept, out=target, mode="clip")
    return left


def without(candidates: Candidates, dropped: Ints) -> Candidates:
    """The candidates but for those with these indices, ascending."""
    if len(dropped) > 64:
        kept = np.ones(len(candidates.ids), np.bool_)
        kept[dropped] = False
        return only(candidates, np.flatnonzero(kept))
    left = _room(candidates, len(candidates.ids) - len(dropped))
    bounds = [-1, *dropped.tolist(), len(candidates.ids)]
    for source, target in zip(candidates, left, strict=True):
        parts = [source[start + 1 : end] for start, end in itertools.pairwise(bounds)]
        np.concatenate(parts, out=target)
    return left


def _room(candidates: Candidates, n: int) -> Candidates:
    """Arrays for n of the candidates, not those that these are in."""
    first = scratch("first logits", len(candidates.logits))
    name = "second" if np.may_share_memory(first, candidates.logits) else "first"
    return Candidates(scratch(f"{name} ids", n).view(np.int64), scratch(f"{name} logits", n))


def starting_with(logits: npt.NDArray[np.float32], k: int) -> Candidates:
    """The k most likely tokens, as `top_k` keeps them, without a copy of the others' logits."""
    kept = largest(logits, k)
    return Candidates(kept, logits[kept].astype(np.float64))


def largest(keys: Floats | npt.NDArray[np.float32], k: int) -> Ints:
    """Indices, ascending, of the k largest keys [n]; of equal keys those with the lowest index."""
    n = len(keys)
    if k >= n:
        return np.arange(n)
    columns = n // 64
    if k > columns // 4:
        return _largest_of(keys, k)
    # The maxima of k columns are at least this large, so the k largest keys are, too.
    maxima = keys[: 64 * columns].reshape(64, columns).max(axis=0)
    found = np.flatnonzero(maxima >= np.partition(maxima, columns - k)[columns - k])
    in_columns = np.add.outer(np.arange(0, 64 * columns, columns), found).ravel()
    places = np.concatenate([in_columns, np.arange(64 * columns, n)])
    return places[_largest_of(keys[places], k)]


def _largest_of(keys: Floats | npt.NDArray[np.float32], k: int) -> Ints:
    kth = np.partition(keys, len(keys) - k)[len(keys) - k]
    above = np.flatnonzero(keys > kth)
    equal = np.flatnonzero(keys == kth)[: k - len(above)]
    return np.sort(np.concatenate([above, equal]))


def fewest(
    keys: Floats,
    probabilities: Floats,
    mass: float,
    side: Literal["left", "right"],
    min_keep: int,
    *,
    in_order: bool = False,
) -> Ints:
    """Indices, ascending, of the fewest candidates with the largest keys that hold `mass`.

    The one that reaches it (side "left") or exceeds it (side "right") is among them.

    Args:
        in_order: no candidate with a larger key is less probable.
    """
    # Mostly few tokens hold the mass; else bins say which ones are to be sorted.
    kept = _fewest_of(largest(keys, max(256, min_keep)), keys, probabilities, mass, side, min_keep)
    if kept is None:  # the mass takes more than `min_keep`
        likely = _likely(probabilities, mass) if in_order else None
        if likely is not None:
            kept = _fewest_by_bins(keys[likely], probabilities[likely], mass, side)
            kept = None if kept is None else likely[kept]
        if kept is None:
            kept = _fewest_by_bins(keys, probabilities, mass, side)
    if kept is None:
        kept = _fewest_of(all_ids(len(keys)), keys, probabilities, mass, side, min_keep)
        assert kept is not None
    return kept


def _fewest_of(
    best: Ints,
    keys: Floats,
    probabilities: Floats,
    mass: float,
    side: Literal["left", "right"],
    min_keep: int,
) -> Ints | None:
    """Find what `fewest` finds among the indices `best`; None if these hold too little.

    Probabilities are summed from the largest key on.
    """
    best = best[np.argsort(-keys[best], kind="stable")]
    cumulative = np.cumsum(probabilities[best])
    count = max(int(np.searchsorted(cumulative, mass, side)) + 1, min_keep)
    if count > len(best) and len(best) < len(keys):
        return None
    return np.sort(best[:count])


def _likely(probabilities: Floats, mass: float) -> Ints | None:
    """Indices, ascending, of the most probable candidates, more than hold `mass`; None where a
    sample doesn't tell how probable those are."""
    sample = np.sort(probabilities[::64])[::-1]
    shares = np.cumsum(sample)
    least = sample[int(np.searchsorted(shares, (1 + mass) / 2 * shares[-1]))]
    found = np.flatnonzero(probabilities >= least)
    is_enough = probabilities[found].sum() > mass + 4 * len(probabilities) * _EPS
    return found if is_enough else None


def _fewest_by_bins(
    keys: Floats, probabilities: Floats, mass: float, side: Literal["left", "right"]
) -> Ints | None:
    """Find what `fewest` finds among many candidates, for a mass that takes more than `min_keep`.

    Keys are counted in bins. Only the keys of the bin that reaches the mass are sorted.

    Returns:
        None where a sum of all probabilities, one by one, might be rounded to the other side of the
        mass. None, too, where a bin holds too many to be worth it.
    """
    n = len(keys)
    distance = np.subtract(keys.max(), keys, out=scratch("distance", n))
    furthest = float(distance.max())
    span = min(_SPAN, furthest)
    if not span > 0:
        return None
    np.multiply(distance, (_BINS - 1) / span, out=distance)
    if furthest > span:
        np.minimum(distance, _BINS - 1, out=distance)
    bins = scratch("bins", n).view(np.int64)
    np.copyto(bins, distance, casting="unsafe")
    below = np.cumsum(np.bincount(bins, probabilities, _BINS))
    reached = int(np.searchsorted(below, mass, side))
    if reached == _BINS:
        return None
    within = np.flatnonzero(bins == reached)
    if len(within) > n // 16 + 256:
        return None
    within = within[np.argsort(-keys[within], kind="stable")]
    start = below[reached - 1] if reached else 0.0
    cumulative = start + np.cumsum(probabilities[within])
    error = 2 * n * _EPS  # of either sum, n numbers that add up to 1
    count = int(np.searchsorted(cumulative, mass - error, side))
    unsure = count != int(np.searchsorted(cumulative, mass + error, side))
    if unsure or count == len(within) or start > mass - error:
        return None
    kept = bins < reached
    kept[within[: count + 1]] = True
    return np.flatnonzero(kept)


def drawn(probabilities: Floats, number: float) -> int:
    """The index that a number in [0, 1) draws: where the cumulative distribution exceeds it.

    Args:
        probabilities: [n], which add up to about 1.
    """
    n = len(probabilities)
    width = 512
    if n <= 4 * width:
        return _drawn_one_by_one(probabilities, number)
    blocks = n // width
    sums = probabilities[: blocks * width].reshape(blocks, width).sum(axis=1)
    ends = np.cumsum(np.append(sums, probabilities[blocks * width :].sum()))
    target = number * ends[-1]
    block = int(np.searchsorted(ends, target, "right"))
    cumulative = np.cumsum(probabilities[block * width : (block + 1) * width])
    if block:
        cumulative += ends[block - 1]
    error = 4 * n * _EPS
    least = int(np.searchsorted(cumulative, target - error, "right"))
    most = int(np.searchsorted(cumulative, target + error, "right"))
    near_start = block > 0 and target - error < ends[block - 1]
    if least != most or near_start or most == len(cumulative):
        return _drawn_one_by_one(probabilities, number)
    return block * width + least


def _drawn_one_by_one(probabilities: Floats, number: float) -> int:
    cumulative = np.cumsum(probabilities)
    return int(np.searchsorted(cumulative, number * cumulative[-1], "right"))


def find(ids: Ints, tokens: Ints) -> tuple[Ints, npt.NDArray[np.bool_]]:
    """Indices into `ids` of those `tokens` that are in it, and which ones are."""
    at = np.searchsorted(ids, tokens)
    at[at == len(ids)] = 0
    found = ids[at] == tokens
    return at[found], found
