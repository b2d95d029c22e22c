"""Adapters of low rank (LoRA): what they add to products, and to which rows.

A product y = W x becomes y + s (alpha / rank) B (A x). A has few rows, and s is the scale that was
asked for. Weights stay as they are. So one batch may have rows of several adapters, each with a
scale of its own. Rows without any have the bits of the model alone.

LoRA: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localkv.cache.arrays import Array
from localkv.errors import LocalKVError
from localkv.kernels.namespace import namespace

LARGEST = 65504.0
"""The largest number of fp16."""
PANEL = 16
"""Rows of B whose columns lie together."""
MOST_SCALE = 1e4
"""The largest scale of an adapter."""
MOST_ROWS = 1 << 17
"""Tokens of a batch at most. Pages of memory that no batch needed are never taken."""

Halves = NDArray[np.float16]


class TokenScales:
    """How much of each adapter each row of the batch at hand gets.

    It is of one model, whose batches run one after the other. Chains know where it lies.

    Args:
        n_adapters: that were loaded.

    Attributes:
        rows: float32 [MOST_ROWS, n_adapters]; the first ones are the batch's, 0 for none.
    """

    def __init__(self, n_adapters: int) -> None:
        self.rows = np.zeros((MOST_ROWS, n_adapters), np.float32)

    def put(self, scales: NDArray[np.float32]) -> None:
        """Begin a batch with scales [tokens, n_adapters].

        Raises:
            LocalKVError: it has more than `MOST_ROWS` tokens.
        """
        if len(scales) > MOST_ROWS:
            raise LocalKVError(
                f"a batch of {len(scales)} tokens is too long for adapters",
                hint=f"use a batch of at most {MOST_ROWS} (-b)",
            )
        self.rows[: len(scales)] = scales

    def keep(self, rows: Any) -> None:
        """Go on with some rows of the batch: their indices, int64 [rows], in ascending order."""
        rows = np.asarray(rows)
        self.rows[: len(rows)] = self.rows[rows]


@dataclass(frozen=True)
class LowRank:
    """What one adapter adds to a product: its scale times factor * B (A x).

    Of a stack of experts' matrices A and B are stacks, too, with `n_experts` before their axes.

    Attributes:
        adapter: its number, a column of `TokenScales.rows`.
        a: float16 [rank, n_in], A divided by a power of two.
        b: float16 [panels, rank, PANEL], B divided by another: the columns of 16 rows together. The
            rows after the last are 0.
        factor: float32 [1], alpha / rank times both powers.
    """

    adapter: int
    a: Halves
    b: Halves
    factor: NDArray[np.float32]

    @classmethod
    def of(
        cls, adapter: int, a: NDArray[np.float32], b: NDArray[np.float32], factor: float
    ) -> LowRank:
        """A part of a [..., rank, n_in] and b [..., n_out, rank] in float32.

        Powers of two keep fp16 from losing small values, so what was fp16 in a file stays the same.
        """
        (a, shift_a), (b, shift_b) = _in_range(a), _in_range(b)
        *stack, n_out, rank = b.shape
        rows = np.zeros((*stack, -(-n_out // PANEL) * PANEL, rank), np.float16)
        rows[..., :n_out, :] = b
        by_panel = rows.reshape(*stack, -1, PANEL, rank)
        panels = np.ascontiguousarray(np.swapaxes(by_panel, -1, -2))
        scale = np.array([np.ldexp(factor, shift_a + shift_b)], np.float32)
        return cls(adapter, np.ascontiguousarray(a, np.float16), panels, scale)

    @property
    def rank(self) -> int:
        return int(self.a.shape[-2])

    def matrices(self, n_out: int, expert: int | None = None) -> tuple[Halves, Halves]:
        """A [rank, n_in] and B [n_out, rank], of an expert if they are stacks."""
        a, b = (self.a, self.b) if expert is None else (self.a[expert], self.b[expert])
        return a, b.transpose(0, 2, 1).reshape(-1, self.rank)[:n_out]


def _in_range(x: NDArray[np.float32]) -> tuple[NDArray[np.float32], int]:
    """Values times a power of two, so that the largest is just within fp16; and the power of two
    that they were divided by, as an exponent."""
    most = float(np.max(np.abs(x), initial=0.0))
    if not most:
        return x, 0
    shift = int(np.frexp(most)[1]) - 16
    shift += bool(np.ldexp(most, -shift) > LARGEST)
    return np.ldexp(x, -shift), shift


def low_rank_bytes(rank: int, n_in: int, n_out: int) -> int:
    """Bytes of a `LowRank`."""
    return 2 * rank * (n_in + -(-n_out // PANEL) * PANEL) + 4


@dataclass(frozen=True)
class Adapters:
    """What all adapters add to a product.

    Attributes:
        parts: of each that changes it, by their numbers.
        scales: the model's.
    """

    parts: tuple[LowRank, ...]
    scales: TokenScales

    def add(
        self, x: Array, y: Array, *, tokens: Array | None = None, expert: int | None = None
    ) -> Array:
        """y [rows, n_out] of x [rows, n_in], with what the adapters add, in its type.

        Args:
            tokens: int64 [rows], whose rows they are; None for the batch's, one after the other.
            expert: whose matrix of a stack it is.
        """
        rows = slice(len(x)) if tokens is None else np.asarray(tokens)
        for part in self.parts:
            factors = self.scales.rows[rows, part.adapter] * part.factor
            if not factors.any():
                continue
            a, b = (_like(x, one.astype(np.float32)) for one in part.matrices(y.shape[-1], expert))
            y = y + ((x @ a.T) * _like(x, factors[:, None])) @ b.T
        return y


def _like(x: Array, values: NDArray[np.float32]) -> Array:
    """Values as an array of the kind, the type and the device of x."""
    return values if isinstance(x, np.ndarray) else namespace(x).from_numpy(values).to(x)
