"""The memory of the GPU backend: its weights are copies, and no product decodes any."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from localkv.kernels.footprint import FLOAT, HeadSizes, Matrix
from localkv.kernels.gpu.attention.sizes import FEW_TOKENS, MOST_SPLITS
from localkv.quant_formats.base import QuantFormat


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
    return 0


def attention_bytes(heads: HeadSizes, *, n_ctx: int, n_tokens: int, n_threads: int) -> int:
    """Outputs and sums that the splits of a context leave to be merged."""
    return FLOAT * FEW_TOKENS * heads.n_heads * MOST_SPLITS * (heads.head_dim + 1)
