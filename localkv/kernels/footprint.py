"""The memory of a backend, counted from sizes alone: the questions that each one answers.

Each backend has a module of these functions beside it (`cpu/footprint.py`, `gpu/footprint.py`),
which imports neither torch nor a compiler: a plan is made, and refused, before anything is loaded.
The reference's are here: it decodes a tile of a weight, and a whole cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from localkv.quant_formats.base import TILE_VALUES, QuantFormat

FLOAT = 4
"""Bytes of a float32."""
ALLOCATOR = 2.0
"""Bytes that a process grows by for each byte of tensors in use at the peak.

Tensors come and go in several sizes, and malloc keeps freed memory: up to twice as much, measured
with glibc.
"""
MOST_LOGITS = 1 << 20
"""Logits of all heads that attention to both sides has in memory at a time, unless one query has
more."""
DECODED_BYTES = 12
"""Per value of a decoded tile: codes, float32, and one step between."""


@dataclass(frozen=True)
class Matrix:
    """A weight of the model: its format and its shape [..., n_out, n_in]."""

    format: QuantFormat
    shape: tuple[int, ...]

    @property
    def n_out(self) -> int:
        return self.shape[-2]

    @property
    def n_in(self) -> int:
        return self.shape[-1]


@dataclass(frozen=True)
class HeadSizes:
    """Heads of one attention layer.

    Attributes:
        rope_dim: of `head_dim`, the rotated channels beside a latent; 0 without latents.
    """

    n_heads: int
    n_kv_heads: int
    head_dim: int
    rope_dim: int = 0


class Footprint(Protocol):
    """A module that counts the bytes of one backend."""

    def is_of_host(self) -> bool:
        """They are the machine's, not a GPU's."""

    def rounds_activations(self, fmt: QuantFormat) -> bool:
        """Whether products with matrices of a format round the float32 that these meet."""

    def copied_bytes(self, fmt: QuantFormat, shape: Sequence[int], *, is_looked_up: bool) -> int:
        """Bytes that loading a tensor allocates; 0 for one that is read where the file is mapped.

        Args:
            is_looked_up: only single rows are read, as of an embedding that is not the output
                matrix, too.
        """

    def product_bytes(
        self, matrices: Iterable[Matrix], *, n_tokens: int, widest: int, n_threads: int
    ) -> float:
        """Bytes in use by the product that needs the most, without its operands and its result.

        Args:
            n_tokens: of a batch.
            widest: values per token of the widest operand.
        """

    def attention_bytes(
        self, heads: HeadSizes, *, n_ctx: int, n_tokens: int, n_threads: int
    ) -> int:
        """Bytes that the process grows by for attention of one layer, without q and its output.

        Args:
            n_ctx: tokens of context.
            n_tokens: of a batch.
        """


def copied_vector_bytes(fmt: QuantFormat, shape: Sequence[int]) -> int:
    """Bytes of a vector as float32, which it is converted to where the file has another type."""
    return 0 if fmt.name == "f32" else FLOAT * shape[0]


def decoded_bytes(n_values: int, *, n_tokens: int, widest: int) -> int:
    """Bytes of a product that decodes a matrix of `n_values` by tiles (`primitives.py`): the tile
    and its product before it is put in its place; 0 without such a matrix."""
    if n_values == 0:
        return 0
    return DECODED_BYTES * min(TILE_VALUES, n_values) + FLOAT * widest * n_tokens


def is_of_host() -> bool:
    return True


def rounds_activations(fmt: QuantFormat) -> bool:
    return False


def copied_bytes(fmt: QuantFormat, shape: Sequence[int], *, is_looked_up: bool) -> int:
    return copied_vector_bytes(fmt, shape) if len(shape) == 1 else 0


def product_bytes(
    matrices: Iterable[Matrix], *, n_tokens: int, widest: int, n_threads: int
) -> float:
    largest = max((matrix.n_out * matrix.n_in for matrix in matrices), default=0)
    return decoded_bytes(largest, n_tokens=n_tokens, widest=widest)


def attention_bytes(heads: HeadSizes, *, n_ctx: int, n_tokens: int, n_threads: int) -> int:
    """K and V of one layer, one of them in three steps, and the logits, masked and as weights."""
    kv_values = n_ctx * heads.n_kv_heads * heads.head_dim
    logit_values = n_ctx * heads.n_heads * n_tokens
    return int(ALLOCATOR * FLOAT * (4 * kv_values + 3 * logit_values))
