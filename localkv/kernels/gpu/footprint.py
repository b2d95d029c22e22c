"""The memory of the GPU backend, and the sizes that it depends on, without torch or Triton.

Weights are copies, products of prompts decode one, and attention leaves sums to be merged.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from localkv.kernels.footprint import FLOAT, HeadSizes, Matrix
from localkv.quant_formats.base import QuantFormat

FEW_TOKENS = 8
"""New tokens of a sequence up to which its context is split among programs."""
MOST_SPLITS = 128
"""Among how many programs at most."""
MOST_CHANNELS = 512
"""Channels of a head of K or of V."""
MANY_TOKENS = 65
"""From this number of tokens on, matrices are decoded to fp16 before they are multiplied.

On an H200 that took 0.9 to 1.4 times as long as a packed product with 64 tokens, 0.8 to 1.1 times
with 128 and 0.4 to 0.6 times with 512. For gate and up together it took 0.6 to 1.1, 0.4 to 0.7 and
0.2 to 0.4 times as long. Measured types: f16, q8_0, q4_0 and q4_K.
"""
DECODED_BYTES = 128 << 20
"""Scratch for a decoded matrix; of a larger one, as many rows at a time as fit."""
WORKSPACE_BYTES = 32 << 20
"""cuBLAS takes as much on a Hopper GPU when torch calls it (`CUBLAS_WORKSPACE_CONFIG`)."""


def is_of_host() -> bool:
    return False


def rounds_activations(fmt: QuantFormat) -> bool:
    """To fp16 for tensor cores; F32 matrices are multiplied in fp32."""
    return fmt.name != "f32"


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
