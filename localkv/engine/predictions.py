"""What is kept of each prediction that tokens were drawn from, for an audit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from localkv.sampling.candidates import largest

LEAST_KEPT = math.exp(-16)
"""A token that is less probable is not kept: llama-perplexity leaves those out of a divergence."""
MOST_KEPT = 1024
"""Tokens that are kept of a prediction at most: 8 KiB."""

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]


class Prediction(NamedTuple):
    """What is kept of one prediction. All logarithms are natural logarithms of probabilities.

    Arrays are float32: float16 would round a divergence by 1e-4, more than a q8_0 cache causes.

    Attributes:
        token: the token that came.
        drawn: the logarithm of `token`.
        best: the most probable token.
        ids: int32 [n], the most probable tokens, ascending.
        shifted, log_total: `shifted` is float32 [n]. The logarithms of `ids` are `shifted` less
            `log_total`; the logarithm of `best` is `-log_total`.
        tail: the logarithm of the probability of all other tokens together; -inf for none.
        least: the smallest logarithm of any token.
    """

    token: int
    drawn: float
    best: int
    ids: Ints
    shifted: Floats
    log_total: float
    tail: float
    least: float


class Predictions:
    """Takes note of what a model predicts, token by token: its own distribution, before samplers.

    Args:
        most: tokens that are kept of a prediction at most.

    Attributes:
        entropies: of each prediction, in nats.
    """

    def __init__(self, most: int = MOST_KEPT) -> None:
        self.entropies = list[float]()
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
        best = int(logits.argmax())
        shifted = logits - logits[best]
        weights = np.exp(shifted)
        total = float(weights.sum(dtype=np.float64))
        log_total = math.log(total)
        self.entropies.append(log_total - float(weights @ shifted) / total)
        ids = np.flatnonzero(weights >= LEAST_KEPT * total)
        if len(ids) > self._most:
            ids = ids[largest(weights[ids], self._most)]
        kept = float(weights[ids].sum(dtype=np.float64))
        tail = total - kept if len(ids) < len(logits) else 0.0
        self._kept.append(
            Prediction(
                token,
                float(shifted[token]) - log_total,
                best,
                ids.astype(np.int32),
                shifted[ids],
                log_total,
                math.log(tail / total) if tail > 0 else -math.inf,
                float(shifted.min()) - log_total,
            )
        )
