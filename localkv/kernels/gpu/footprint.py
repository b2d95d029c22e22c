"""The memory of the GPU backend: its weights are copies, and products of prompts decode one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from localkv.kernels.footprint import FLOAT, HeadSizes, Matrix
from localkv.kernels.gpu.attention.sizes import FEW_TOKENS, MOST_SPLITS
from localkv.kernels.gpu.products.sizes import DECODED_BYTES, MANY_TOKENS
from localkv.quant_formats.base import QuantFormat

WORKSPACE_BYTES = 32 << 20
"""cuBLAS takes as much on a Hopper GPU when torch calls it (`CUBLAS_WORKSPACE_CONFIG`)."""


def is_of_host() -> bool:
    return False


def copied_bytes(fmt: QuantFormat, shape: Sequence[int], *, is_looked_up: bool) -> int:
    """Vectors become float32; matrices keep their type."""
    if len(shape) == 1:
        return FLOAT * shape[0]
    return math.prod(shape[:-1]) * fmt.row_bytes(shape[-1])


def product_bytes(
    matrices: Iterable[Matrix], *, n_tokens: int, widest: int, n_threads: int
) -> float:
    """A decoded matrix, the sums of two, and what cuBLAS takes for itself."""
    if n_tokens < MANY_TOKENS:
        return 0
    most = 0
    for matrix in matrices:
        rows = min(matrix.n_out, DECODED_BYTES // (2 * matrix.n_in))
        most = max(most, rows * (2 * matrix.n_in + 2 * FLOAT * n_tokens))
    return most + WORKSPACE_BYTES


def attention_bytes(heads: HeadSizes, *, n_ctx: int, n_tokens: int, n_threads: int) -> int:
    """Outputs and sums that the splits of a context leave to be merged."""
    return FLOAT * FEW_TOKENS * heads.n_heads * MOST_SPLITS * (heads.head_dim + 1)
