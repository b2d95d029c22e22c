"""How probable the drawn tokens were, and what else: for users, for an audit, and as scores.

Logprobs are natural logarithms, as OpenAI and llama.cpp have them. They belong to the model's own
distribution: before samplers, and before `logit_bias`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from localkv.errors import LocalKVError, UsageError
from localkv.sampling.candidates import largest

LEAST = -9999.0
"""What OpenAI prints for a probability that is next to nothing; JSON has no -inf."""


@dataclass(frozen=True)
class RankedToken:
    """A drawn token among all.

    Attributes:
        token: its id.
        logprob: the logarithm of its probability.
        top: ids and logarithms of the most probable tokens, the first of them the most probable.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class TopLogprob:
    """A token that could have been drawn.

    Attributes:
        id: in the vocabulary.
        token: its text; a part of a character shows as U+FFFD.
        bytes: exactly what it stands for.
        logprob: the natural logarithm of its probability, at most 0.
    """

    id: int
    token: str
    bytes: bytes
    logprob: float


@dataclass(frozen=True)
class TokenLogprob(TopLogprob):
    """A token that was drawn.

    Attributes:
        top_logprobs: the most probable tokens at its place, best first, as many as were asked for;
            the drawn one may not be among them.
    """

    top_logprobs: tuple[TopLogprob, ...]


def check_logprobs(n: int | None, n_vocab: int) -> None:
    """Refuse a number of alternatives that there can't be; None asks for no logprobs at all.

    Raises:
        UsageError: says which numbers there can be.
    """
    is_number = isinstance(n, Integral) and not isinstance(n, bool)
    if n is not None and not (is_number and 0 <= n <= n_vocab):
        raise UsageError(
            f"logprobs must be a whole number from 0 to {n_vocab}, the vocabulary, not {n!r}",
            hint="it is the number of alternatives for each token",
        )


def ranked(logits: NDArray[np.float32], token: int, n: int) -> RankedToken:
    """The place of a token, and the `n` most probable ones.

    Args:
        logits: [n_vocab], without NaN, the largest of them finite.
        token: the drawn one.
        n: of equal ones that with the lowest id comes first.
    """
    shifted = logits - logits.max()
    log_sum = np.log(np.exp(shifted).sum(dtype=np.float64))

    def logprob(at: int) -> float:
        return float(shifted[at] - log_sum)

    best = largest(shifted, n) if n else np.empty(0, np.int64)
    best = best[np.argsort(-shifted[best], kind="stable")]
    top = tuple((int(at), logprob(int(at))) for at in best)
    return RankedToken(token, logprob(token), top)


def ranked_among(
    ids: NDArray[np.int64], probabilities: NDArray[np.float64], token: int, n: int
) -> RankedToken:
    """The place of a token among those that samplers have left, and the `n` most probable ones.

    Args:
        ids: tokens, [m].
        probabilities: with which they are drawn, [m]; 0 is left out.
        token: the drawn one.
        n: of equal ones that with the lowest id comes first.
    """
    order = np.lexsort((ids, -probabilities))[:n]
    best = ((int(ids[at]), float(probabilities[at])) for at in order if probabilities[at])
    top = tuple((at, math.log(probability)) for at, probability in best)
    return RankedToken(token, math.log(probabilities[ids == token].sum()), top)


def named(one: RankedToken, token_bytes: Callable[[int], bytes]) -> TokenLogprob:
    """A token's logprobs with the tokens' texts."""

    def fields(token: int, logprob: float) -> tuple[int, str, bytes, float]:
        data = token_bytes(token)
        return token, data.decode("utf-8", errors="replace"), data, logprob

    top = tuple(TopLogprob(*fields(*pair)) for pair in one.top)
    return TokenLogprob(*fields(one.token, one.logprob), top)


def as_openai(tokens: tuple[TokenLogprob, ...]) -> dict[str, Any]:
    """The object `logprobs` of a choice in OpenAI's chat API, with llama.cpp's `id` as well."""

    def item(one: TopLogprob) -> dict[str, Any]:
        logprob = one.logprob if one.logprob > LEAST else LEAST
        return {"id": one.id, "token": one.token, "bytes": list(one.bytes), "logprob": logprob}

    return {
        "content": [
            {**item(one), "top_logprobs": [item(other) for other in one.top_logprobs]}
            for one in tokens
        ]
    }


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
