"""Statistics of the scores of many tokens, each with its standard error.

The statistics are those of llama.cpp's `llama-perplexity` (`tools/perplexity/perplexity.cpp`), so
that figures can be compared.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from localkv.engine.token_scores import Array, TokenScores

KLD_PERCENTILES = (100, 99.9, 99, 95, 90, 50, 10, 5, 1, 0.1, 0)
DELTA_P_PERCENTILES = (100, 99.9, 99, 95, 90, 75, 50, 25, 10, 5, 1, 0.1, 0)
"""Those that llama-perplexity prints; 100 is the maximum, 50 the median, 0 the minimum."""


@dataclass(frozen=True)
class Estimate:
    """A value and its standard error."""

    value: float
    error: float


@dataclass(frozen=True)
class Divergence:
    """How far a cache's predictions are from the base's.

    Δp is the change of the probability of the token that came: p - p_base, between -1 and 1.

    Attributes:
        ppl_base: perplexity with the base cache.
        log_ppl_ratio, ppl_ratio, ppl_difference: of the perplexity to the base's.
        correlation: of the two ln(perplexity) over tokens.
        kld, kld_percentiles: mean, and percentile -> value (`KLD_PERCENTILES`), in nats.
        delta_p, delta_p_percentiles, rms_delta_p: mean, percentiles and root mean square of Δp.
        same_top: share of tokens with the same most likely token.
    """

    ppl_base: Estimate
    log_ppl_ratio: Estimate
    ppl_ratio: Estimate
    ppl_difference: Estimate
    correlation: float
    kld: Estimate
    kld_percentiles: dict[float, float]
    delta_p: Estimate
    delta_p_percentiles: dict[float, float]
    rms_delta_p: Estimate
    same_top: Estimate


def mean(values: Array) -> Estimate:
    """The mean and its standard error, sqrt((E[x^2] - E[x]^2) / (n - 1))."""
    return Estimate(float(values.mean()), float(values.std() / math.sqrt(len(values) - 1)))


def perplexity(nll: Array) -> Estimate:
    """exp of the mean negative log-likelihood; the error by Gauss, as llama-perplexity has it."""
    log_ppl = mean(nll)
    ppl = math.exp(log_ppl.value)
    return Estimate(ppl, ppl * log_ppl.error)


def divergence(scores: TokenScores) -> Divergence:
    """The statistics of scores that have a base."""
    ppl, ppl_base = perplexity(scores.nll), perplexity(scores.nll_base)
    log_ratio = mean(scores.nll - scores.nll_base)
    ratio = math.exp(log_ratio.value)
    delta_p = np.exp(-scores.nll) - np.exp(-scores.nll_base)
    mean_square = mean(delta_p**2)
    rms = math.sqrt(mean_square.value)
    same = float(scores.same_top.mean())
    return Divergence(
        ppl_base=ppl_base,
        log_ppl_ratio=log_ratio,
        ppl_ratio=Estimate(ratio, ratio * log_ratio.error),
        ppl_difference=Estimate(
            ppl.value - ppl_base.value,
            mean(ppl.value * scores.nll - ppl_base.value * scores.nll_base).error,
        ),
        correlation=_correlation(scores.nll, scores.nll_base),
        kld=mean(scores.kld),
        kld_percentiles=_percentiles(scores.kld, KLD_PERCENTILES),
        delta_p=mean(delta_p),
        delta_p_percentiles=_percentiles(delta_p, DELTA_P_PERCENTILES),
        rms_delta_p=Estimate(rms, mean_square.error / (2 * rms) if rms else 0.0),
        same_top=Estimate(same, math.sqrt(same * (1 - same) / (len(scores.nll) - 1))),
    )


def _percentiles(values: Array, percentiles: Sequence[float]) -> dict[float, float]:
    found = np.percentile(values, percentiles)
    return {at: float(value) for at, value in zip(percentiles, found, strict=True)}


def _correlation(a: Array, b: Array) -> float:
    deviation = float(a.std() * b.std())
    covariance = float(((a - a.mean()) * (b - b.mean())).mean())
    return covariance / deviation if deviation else 0.0
