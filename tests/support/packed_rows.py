"""Planes of packed rows, as the bytes of a file."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def join_planes(planes: Sequence[Tensor]) -> Tensor:
    """The inverse of `split_blocks`, as a new tensor: uint8 [..., n * block_bytes]."""
    return torch.cat(tuple(planes), dim=-1).flatten(-2)
