"""What f32, f16 and bf16 share: a plane of plain numbers, read in runs of eight."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_floats(plane, row, first, n_values, VALUES: tl.constexpr, EVEN: tl.constexpr):
    """[rows, VALUES / 8, 8] from value `first` of each row on; 0 beyond its end."""
    at = first // 8 + tl.arange(0, VALUES // 8)
    run = row[:, None] * (n_values // 8) + at[None, :]
    pointers = plane + run[:, :, None] * 8 + tl.arange(0, 8)[None, None, :]
    if EVEN:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=(at < n_values // 8)[None, :, None], other=0)
