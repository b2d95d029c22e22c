"""How far predictions are from those of a base, where only the most probable tokens are known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from localkv.engine.audit.predictions import Prediction
from localkv.engine.token_scores import NOT_FINITE, Array, Logits, log_softmax, score
from localkv.errors import LocalKVError
from localkv.kernels.kept_sums import Kept, KeptSums, kept_sums


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


def compare_kept(
    base_logits: Logits,
    kept: Sequence[Prediction],
    sums_of: Callable[[Logits, Kept], KeptSums] = kept_sums,
) -> Compared:
    """Compare with what was kept of predictions.

    Of the tokens that were not kept only their probability together is known, and the least of any.
    Taking them as one gives the least divergence (the log sum inequality; Cover and Thomas,
    Elements of Information Theory, 2.7), giving each the least probability the most.

    Args:
        base_logits: float32 [tokens, n_vocab].
        kept: of the same tokens, one at least.
        sums_of: a backend's `kept_sums`.

    Raises:
        LocalKVError: a logit is infinite or not a number.
    """
    tokens, drawn_logs, best, ids, shifted, *logs = zip(*kept, strict=True)
    log_totals, tails, least_logs = (np.array(column) for column in logs)
    starts = np.cumsum([0, *map(len, ids)])
    sums = sums_of(base_logits, Kept(np.concatenate(ids), np.concatenate(shifted), starts))
    with np.errstate(invalid="ignore"):
        total = sums.kept + sums.rest
        log_total, mass = np.log(total), sums.rest / total
        further = log_total - log_totals
        sum_kept = (sums.kept_apart - further * sums.kept) / total
        together = np.maximum(tails, least_logs)
        log_mass = np.log(mass, out=np.zeros_like(mass), where=mass > 0)
        least = sum_kept + mass * (log_mass - together)
        of_rest = sums.rest_logs / total - mass * log_total
        most = sum_kept + of_rest - mass * least_logs
    if not np.isfinite(most).all():  # 0 times an infinite logit is no number, either
        raise LocalKVError(NOT_FINITE)
    drawn = base_logits[np.arange(len(kept)), tokens]
    return Compared(
        nll=-np.array(drawn_logs),
        nll_base=log_total - (drawn - sums.largest),
        kld=least.clip(0),
        kld_most=np.maximum(least, most).clip(0),
        best=np.array(best),
        best_base=sums.best,
        p_best=np.exp(-log_totals),
        p_best_base=1 / total,
    )


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
