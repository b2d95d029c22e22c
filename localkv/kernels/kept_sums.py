"""Sums over rows of logits, where another model's logits of some tokens are known: in NumPy."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Logits = NDArray[np.float32]
Sums = NDArray[np.float64]

_BLOCK_VALUES, _BLOCK_ROWS = 1 << 18, 128
"""Logits, and rows, that are worked on at a time at most: few enough for a core's cache."""


class Kept(NamedTuple):
    """Tokens of each row, and their logits by another model.

    Attributes:
        ids: int32 [n], the rows' tokens one row after the other, ascending in each.
        shifted: float32 [n], their logits less the largest of that model's row.
        starts: int64 [rows + 1], where each row's begin, and the end.
    """

    ids: NDArray[np.int32]
    shifted: Logits
    starts: NDArray[np.int64]


class KeptSums(NamedTuple):
    """Sums of each row, with s a logit less the row's largest and w = exp(s): arrays of [rows].

    Where a logit is infinite or not a number, one of the sums is no number or infinite, too.

    Attributes:
        best: the first token with the largest logit.
        largest: its logit.
        kept: Σ w of the kept tokens.
        kept_apart: Σ w · (s - the other model's s) of these.
        rest: Σ w of all others.
        rest_logs: Σ w · s of these.
    """

    best: NDArray[np.int64]
    largest: Logits
    kept: Sums
    kept_apart: Sums
    rest: Sums
    rest_logs: Sums


def kept_sums(logits: Logits, kept: Kept) -> KeptSums:
    """The sums of float32 [rows, n_vocab], one row at least, whose kept tokens are at least one."""
    n_rows = min(_BLOCK_ROWS, max(1, _BLOCK_VALUES // logits.shape[1]))
    parts = list[KeptSums]()
    with np.errstate(invalid="ignore"):
        for first in range(0, len(logits), n_rows):
            starts = kept.starts[first : first + n_rows + 1]
            of_part = slice(starts[0], starts[-1])
            part = Kept(kept.ids[of_part], kept.shifted[of_part], starts - starts[0])
            parts.append(_sums(logits[first : first + n_rows], part))
    return KeptSums(*map(np.concatenate, zip(*parts, strict=True)))


def _sums(logits: Logits, kept: Kept) -> KeptSums:
    best = logits.argmax(1)
    largest = logits[np.arange(len(logits)), best]
    shifted = logits - largest[:, None]
    weights = np.exp(shifted)
    first, lengths = kept.starts[:-1], np.diff(kept.starts)
    places = kept.ids + np.repeat(np.arange(len(logits)) * logits.shape[1], lengths)
    of_kept = weights.take(places).astype(np.float64)
    weights.put(places, 0)
    apart = of_kept * (shifted.take(places).astype(np.float64) - kept.shifted)
    return KeptSums(
        best,
        largest,
        np.add.reduceat(of_kept, first),
        np.add.reduceat(apart, first),
        weights.sum(1, dtype=np.float64),
        np.vecdot(weights, shifted).astype(np.float64),
    )
