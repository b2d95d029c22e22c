"""How far predictions are from those of a base, where only the most probable tokens are known."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from localkv.engine.audit.predictions import Prediction
from localkv.engine.token_scores import Array, Logits, log_softmax, score


@dataclass(frozen=True)
class Compared:
    """Each token's prediction by two caches: arrays of [tokens]; logarithms are natural.

    The divergence is that of the base's distribution, Σ p_base · ln(p_base / p), in nats.

    Attributes:
        nll, nll_base: -ln of the probability of the token that came.
        kld: the divergence, or the least that it can be.
        kld_most: the most that it can be; the same where both distributions are known.
        best, best_base: ids of the most probable tokens.
        p_best, p_best_base: their probabilities, each by its own cache.
    """

    nll: Array
    nll_base: Array
    kld: Array
    kld_most: Array
    best: NDArray[np.int64]
    best_base: NDArray[np.int64]
    p_best: Array
    p_best_base: Array


def compare_kept(base_logits: Logits, kept: Sequence[Prediction]) -> Compared:
    """Compare with what was kept of predictions.

    Args:
        base_logits: float32 [tokens, n_vocab].
        kept: of the same tokens.
    """
    log_p = log_softmax(base_logits)
    each = np.arange(len(log_p))
    bounds = np.array([_divergence(row, one) for row, one in zip(log_p, kept, strict=True)])
    best_base = log_p.argmax(1)
    return Compared(
        nll=np.array([-one.drawn for one in kept]),
        nll_base=-log_p[each, [one.token for one in kept]],
        kld=bounds[:, 0],
        kld_most=bounds[:, 1],
        best=np.array([int(one.ids[0]) for one in kept]),
        best_base=best_base,
        p_best=np.exp([float(one.top[0]) for one in kept]),
        p_best_base=np.exp(log_p[each, best_base]),
    )


def _divergence(log_p: Array, kept: Prediction) -> tuple[float, float]:
    """The least and the most that the divergence of one token can be.

    Of the tokens that were not kept only their probability together is known, and the least of any.
    Taking them as one gives the least divergence (the log sum inequality; Cover and Thomas,
    Elements of Information Theory, 2.7), giving each the least probability the most.

    Args:
        log_p: float64 [n_vocab], the base's logarithms.
    """
    p = np.exp(log_p)
    of_kept = float((p[kept.ids] * (log_p[kept.ids] - kept.top)).sum())
    p[kept.ids] = 0
    mass = float(p.sum())
    if mass == 0:
        return max(0.0, of_kept), max(0.0, of_kept)
    least = of_kept + mass * (math.log(mass) - max(kept.tail, kept.least))
    most = of_kept + float((p * log_p).sum()) - mass * kept.least
    return max(0.0, least), max(0.0, least, most)


def compare_logits(base_logits: Logits, logits: Logits, tokens: Sequence[int]) -> Compared:
    """Compare predictions that are known in full.

    Args:
        base_logits, logits: float32 [tokens, n_vocab].
        tokens: those that came.
    """
    scores = score(logits, np.array(tokens), base_logits)
    best, best_base = logits.argmax(1), base_logits.argmax(1)
    each = np.arange(len(best))
    return Compared(
        nll=scores.nll,
        nll_base=scores.nll_base,
        kld=scores.kld,
        kld_most=scores.kld,
        best=best,
        best_base=best_base,
        p_best=np.exp(log_softmax(logits)[each, best]),
        p_best_base=np.exp(log_softmax(base_logits)[each, best_base]),
    )


def joined(parts: Sequence[Compared]) -> Compared:
    """Several stretches of tokens as one."""
    arrays = zip(*(vars(part).values() for part in parts), strict=True)
    return Compared(*map(np.concatenate, arrays))
