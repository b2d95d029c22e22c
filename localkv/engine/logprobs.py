"""How probable the drawn tokens were, and what else: natural logarithms, as OpenAI and llama.cpp.

They belong to the model's own distribution: before samplers, and before `logit_bias`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localkv.errors import UsageError
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
