"""What is kept of each prediction that tokens were drawn from, for an audit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from localkv.sampling.candidates import largest

LEAST_KEPT = -16.0
"""Logarithm of the probability below which a token is not kept: llama-perplexity leaves those out
of a divergence."""
MOST_KEPT = 1024
"""Tokens that are kept of a prediction at most: 8 KiB."""

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]


class Prediction(NamedTuple):
    """What is kept of one prediction. All logarithms are natural ones of probabilities.

    They are float32: float16 would round a divergence by 1e-4, more than that of a q8_0 cache.

    Attributes:
        token: the one that came.
        drawn: its logarithm.
        ids: int32 [n], the most probable tokens, the first of them the most probable.
        top: float32 [n], their logarithms.
        tail: the logarithm of what all others have together; -inf for none.
        least: the smallest logarithm of any token.
    """

    token: int
    drawn: float
    ids: Ints
    top: Floats
    tail: float
    least: float


class Predictions:
    """Takes note of what a model predicts, token by token: its own distribution, before samplers.

    Args:
        most: tokens that are kept of a prediction at most.
    """

    def __init__(self, most: int = MOST_KEPT) -> None:
        self._most = most
        self._kept = list[Prediction]()

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, places: slice) -> Sequence[Prediction]:
        return self._kept[places]

    def add(self, logits: Floats, token: int) -> None:
        """Keep a prediction and the token that came.

        Args:
            logits: [n_vocab], without NaN, the largest of them finite; left as they are.
        """
        shifted = logits - logits.max()
        weights = np.exp(shifted)
        total = weights.sum(dtype=np.float64)
        log_total = float(np.log(total))
        best = np.flatnonzero(shifted >= LEAST_KEPT + log_total)
        if len(best) > self._most:
            best = best[largest(shifted[best], self._most)]
        best = best[np.argsort(-shifted[best], kind="stable")]
        tail = 0.0
        if len(best) < len(logits):
            weights[best] = 0
            tail = float(weights.sum(dtype=np.float64) / total)
        self._kept.append(
            Prediction(
                token,
                float(shifted[token]) - log_total,
                best.astype(np.int32),
                shifted[best] - np.float32(log_total),
                float(np.log(tail)) if tail > 0 else float("-inf"),
                float(shifted.min()) - log_total,
            )
        )
