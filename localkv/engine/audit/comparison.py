"""How far predictions are from those of a base, where only the most probable tokens are known."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from localkv.engine.audit.predictions import Distribution, Prediction
from localkv.engine.token_scores import NOT_FINITE, Array, Logits, log_softmax, score
from localkv.errors import LocalKVError


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

    Raises:
        LocalKVError: a logit is infinite or not a number.
    """
    if not np.isfinite(base_logits).all():
        raise LocalKVError(NOT_FINITE)
    figures = np.empty((6, len(kept)))
    best_base = np.empty(len(kept), np.int64)
    for at, (logits, one) in enumerate(zip(base_logits, kept, strict=True)):
        base = Distribution.of(logits)
        best_base[at] = base.best
        of_drawn = base.log_total - float(base.shifted[one.token])
        of_best = math.exp(-one.log_total), math.exp(-base.log_total)
        figures[:, at] = -one.drawn, of_drawn, *_divergence(base, one), *of_best
    nll, nll_base, kld, kld_most, p_best, p_best_base = figures
    best = np.array([one.best for one in kept])
    return Compared(nll, nll_base, kld, kld_most, best, best_base, p_best, p_best_base)


def _divergence(base: Distribution, kept: Prediction) -> tuple[float, float]:
    """The least and the most that the divergence of one token can be.

    Of the tokens that were not kept only their probability together is known, and the least of any.
    Taking them as one gives the least divergence (the log sum inequality; Cover and Thomas,
    Elements of Information Theory, 2.7), giving each the least probability the most.

    Overwrites `base.weights`.
    """
    weights, total = base.weights, base.total
    shifted = base.shifted[kept.ids].astype(np.float64)
    logs = (shifted - base.log_total) - (kept.shifted.astype(np.float64) - kept.log_total)
    of_kept = float(weights[kept.ids] @ logs) / total
    weights[kept.ids] = 0
    mass = float(weights.sum(dtype=np.float64)) / total
    if mass == 0:
        return max(0.0, of_kept), max(0.0, of_kept)
    least = of_kept + mass * (math.log(mass) - max(kept.tail, kept.least))
    each = float(weights @ base.shifted) / total - mass * base.log_total
    most = of_kept + each - mass * kept.least
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
