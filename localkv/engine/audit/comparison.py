"""How far predictions are from those of a base, where only the most probable tokens are known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from localkv.engine.audit.predictions import Prediction
from localkv.engine.token_scores import NOT_FINITE, Array, Logits, log_softmax, score
from localkv.errors import LocalKVError

_BLOCK_VALUES, _BLOCK_ROWS = 1 << 18, 128
"""Logits, and tokens, that are compared at a time at most: few enough for a core's cache."""


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
        kept: of the same tokens, one at least.

    Raises:
        LocalKVError: a logit is infinite or not a number.
    """
    n_rows = min(_BLOCK_ROWS, max(1, _BLOCK_VALUES // base_logits.shape[1]))
    blocks = range(0, len(kept), n_rows)
    with np.errstate(invalid="ignore"):
        parts = [_compare(base_logits[i : i + n_rows], kept[i : i + n_rows]) for i in blocks]
    return joined(parts)


def _compare(base_logits: Logits, kept: Sequence[Prediction]) -> Compared:
    """The same for a few tokens, whose arrays stay in the processor's cache.

    Of the tokens that were not kept only their probability together is known, and the least of any.
    Taking them as one gives the least divergence (the log sum inequality; Cover and Thomas,
    Elements of Information Theory, 2.7), giving each the least probability the most.
    """
    each, n_vocab = np.arange(len(kept)), base_logits.shape[1]
    shifted = base_logits - base_logits.max(1, keepdims=True)
    weights = np.exp(shifted)

    lengths = [len(one.ids) for one in kept]
    starts = np.cumsum([0, *lengths[:-1]])
    places = np.concatenate([one.ids for one in kept]) + np.repeat(each * n_vocab, lengths)
    of_kept = weights.take(places).astype(np.float64)
    weights.put(places, 0)
    total_rest = weights.sum(1, dtype=np.float64)
    total = np.add.reduceat(of_kept, starts) + total_rest
    log_total, mass = np.log(total), total_rest / total

    logs = shifted.take(places).astype(np.float64)
    logs -= np.concatenate([one.shifted for one in kept])
    logs -= np.repeat(log_total - [one.log_total for one in kept], lengths)
    sum_kept = np.add.reduceat(of_kept * logs, starts) / total
    least_of_any = np.array([one.least for one in kept])
    together = np.maximum([one.tail for one in kept], least_of_any)
    log_mass = np.log(mass, out=np.zeros_like(mass), where=mass > 0)
    least = sum_kept + mass * (log_mass - together)
    of_rest = np.vecdot(weights, shifted) / total
    most = sum_kept + of_rest - mass * (log_total + least_of_any)
    if not np.isfinite(most).all():  # 0 times an infinite logit is no number, either
        raise LocalKVError(NOT_FINITE)
    return Compared(
        nll=np.array([-one.drawn for one in kept]),
        nll_base=log_total - shifted[each, [one.token for one in kept]],
        kld=least.clip(0),
        kld_most=np.maximum(least, most).clip(0),
        best=np.array([one.best for one in kept]),
        best_base=shifted.argmax(1),
        p_best=np.exp([-one.log_total for one in kept]),
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
