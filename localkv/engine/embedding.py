"""Embeddings: what a model makes of a text before it predicts tokens, as a vector.

They are hidden states after the last norm (llama.cpp's `result_norm`), of one token or the mean of
all. In a causal model only the last token has seen the whole text, in an encoder each has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from localkv.errors import UsageError
from localkv.option_checks import unknown_name

Pooling: TypeAlias = Literal["mean", "cls", "last", "none"]

POOLINGS: tuple[Pooling, ...] = ("mean", "cls", "last", "none")
"""From the hidden states of a text's tokens to its embedding; "none" keeps each token's."""

IN_FILE = ("none", "mean", "cls", "last", "rank")
"""What the numbers of `<architecture>.pooling_type` in a file mean (`llama_pooling_type`)."""

Floats: TypeAlias = NDArray[np.float32]

Vectors: TypeAlias = np.ndarray[tuple[int, int], np.dtype[np.float32]]
"""[texts or tokens, n_embd]"""


def check_pooling(pooling: str) -> Pooling:
    """Refuse a pooling that there is not.

    Raises:
        UsageError: names those that there are.
    """
    for known in POOLINGS:
        if pooling == known:
            return known
    raise unknown_name("unknown pooling", pooling, POOLINGS)


def pooling_of_file(number: int | None) -> Pooling:
    """The pooling that a model was trained for; "mean" for one that was trained for none.

    Args:
        number: the file's `pooling_type`, or None.

    Raises:
        UsageError: it is one that needs another kind of model.
    """
    name = IN_FILE[number] if number is not None and 0 <= number < len(IN_FILE) else str(number)
    if number is None or name == "none":
        return "mean"
    if name in POOLINGS:
        return check_pooling(name)
    if name == "rank":
        raise UsageError(
            "the model was trained to score texts, not for embeddings (pooling rank)",
            hint="localkv rerank (LLM.rerank in Python) scores them; --pooling makes vectors",
        )
    raise UsageError(
        f"the model was trained for embeddings with pooling {name}, which is not supported",
        hint=f"ask for one of {', '.join(POOLINGS)}, for other embeddings",
    )


class Pool:
    """The hidden states of a text's tokens, of which its embedding is made.

    Args:
        pooling: what is kept of them.
    """

    def __init__(self, pooling: Pooling) -> None:
        self._pooling = pooling
        self._parts = list[Floats]()
        self._total: NDArray[np.float64] | None = None
        self._n_tokens = 0

    def add(self, part: Floats) -> None:
        """Take the states of the next tokens, [some, n_embd]."""
        self._n_tokens += len(part)
        if self._pooling == "mean":
            total = part.sum(axis=0, dtype=np.float64)
            self._total = total if self._total is None else self._total + total
        elif self._pooling == "cls":
            self._parts = self._parts or [part[:1].copy()]
        elif self._pooling == "last":
            self._parts = [part[-1:].copy()]
        else:
            self._parts.append(part)

    def vector(self) -> Floats:
        """The embedding: [n_embd], or [tokens, n_embd] for "none"."""
        if self._total is not None:
            return np.asarray(self._total / self._n_tokens, np.float32)
        return np.concatenate(self._parts) if self._pooling == "none" else self._parts[0][0]


def pooled(states: Floats, pooling: Pooling) -> Floats:
    """The embedding (`Pool.vector`) of a text whose tokens have these states [tokens, n_embd]."""
    pool = Pool(pooling)
    pool.add(states)
    return pool.vector()


def packed(texts: Sequence[Sequence[int]], n_batch: int) -> Iterator[list[Sequence[int]]]:
    """Texts in batches of at most `n_batch` tokens, or one longer text alone, in order."""
    batch, n_tokens = list[Sequence[int]](), 0
    for ids in texts:
        if batch and n_tokens + len(ids) > n_batch:
            yield batch
            batch, n_tokens = [], 0
        batch.append(ids)
        n_tokens += len(ids)
    if batch:
        yield batch


def normalised(vectors: Floats, norm: int = 2) -> Floats:
    """Vectors along the last axis divided by their norm; a vector of zeros stays one.

    Args:
        vectors: [..., n_embd].
        norm: llama.cpp's `--embd-normalize`: -1 leaves them alone, 0 makes the largest magnitude
            32760, 1 is taxicab, 2 Euclidean, p any p-norm.
    """
    if norm < 0:
        return vectors
    x = np.abs(vectors, dtype=np.float64)
    if norm == 0:
        length = x.max(-1, keepdims=True) / 32760
    else:
        most = x.max(-1, keepdims=True)
        scaled = np.divide(x, most, out=np.zeros_like(x), where=most > 0)  # no power overflows
        length = most * (scaled**norm).sum(-1, keepdims=True) ** (1 / norm)
    out: Floats = np.divide(vectors, length, out=np.zeros_like(x), where=length > 0).astype("f4")
    return out


def similarities(vectors: list[list[float]]) -> list[list[float]]:
    """The cosine of the angle between each two vectors, of any lengths: [n][n]."""
    rows = normalised(np.asarray(vectors, np.float32)).astype(np.float64)
    cosines: list[list[float]] = (rows @ rows.T).tolist()
    return cosines
