"""The scores of tokens: how probable each was, and how far a prediction is from another one's."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from localkv.errors import LocalKVError

Array = NDArray[np.float64]
Logits = NDArray[np.float32]

NOT_FINITE = "the model's logits are not finite, so nothing can be measured"
"""The error about them."""


@dataclass(frozen=True)
class TokenScores:
    """The scores of each token: float64 [tokens] each.

    Attributes:
        nll: -ln of the probability that the token got.
        nll_base: the same with the base cache.
        kld: Kullback-Leibler divergence of the whole distribution from the base's, in nats.
        same_top: 1 where both have the same most likely token, else 0.

    Without a base the last three are NaN.
    """

    nll: Array
    nll_base: Array
    kld: Array
    same_top: Array


def score(
    logits: Logits, targets: NDArray[np.int64], base_logits: Logits | None = None
) -> TokenScores:
    """Scores of some tokens, in float64.

    Args:
        logits: float32 [tokens, n_vocab], the prediction of each.
        targets: int64 [tokens], the tokens that came.
        base_logits: the base's predictions.

    Raises:
        LocalKVError: a logit is infinite or not a number.
    """
    log_p = log_softmax(logits)
    each = np.arange(len(targets))
    nll = -log_p[each, targets]
    if base_logits is None:
        unknown = np.full_like(nll, np.nan)
        return TokenScores(nll, unknown, unknown, unknown)
    base_log_p = log_softmax(base_logits)
    return TokenScores(
        nll=nll,
        nll_base=-base_log_p[each, targets],
        # never negative but by rounding
        kld=(np.exp(base_log_p) * (base_log_p - log_p)).sum(1).clip(0),
        same_top=(logits.argmax(1) == base_logits.argmax(1)).astype(np.float64),
    )


def log_softmax(logits: Logits) -> Array:
    """Logarithms of probabilities, float64, as `logits` [tokens, n_vocab].

    Raises:
        LocalKVError: a logit is infinite or not a number.
    """
    if not np.isfinite(logits).all():
        raise LocalKVError(NOT_FINITE)
    x: Array = logits.astype(np.float64)
    x -= x.max(1, keepdims=True)
    x -= np.log(np.exp(x).sum(1, keepdims=True))
    return x
