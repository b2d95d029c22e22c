"""The memory of the reference backend: it decodes a tile of a weight, and a whole cache."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from localkv.kernels.footprint import (
    ALLOCATOR,
    FLOAT,
    HeadSizes,
    Matrix,
    copied_vector_bytes,
    decoded_bytes,
)
from localkv.quant_formats.base import QuantFormat


def is_of_host() -> bool:
    return True


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
