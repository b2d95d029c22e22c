"""Common parts of f32, f16 and bf16: a plane of plain numbers, read in runs of 16 bytes."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_floats(
    plane, row, first, n_values, RUN: tl.constexpr, VALUES: tl.constexpr, EVEN: tl.constexpr
):
    """[rows, VALUES / RUN, RUN] from value `first` of each row on; 0 beyond its end."""
    at = first // RUN + tl.arange(0, VALUES // RUN)
    run = row[:, None] * (n_values // RUN) + at[None, :]
    pointers = plane + run[:, :, None] * RUN + tl.arange(0, RUN)[None, None, :]
    if EVEN:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=(at < n_values // RUN)[None, :, None], other=0)
