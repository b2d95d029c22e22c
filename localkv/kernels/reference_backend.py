"""REFERENCE: plain torch, slow and easy to trust; what every test compares with."""

from __future__ import annotations

import torch

from localkv.kernels.backend import Backend, Primitives, compose


def reference_backend(dtype: torch.dtype = torch.float32) -> Backend:
    """The reference in float32, or in float64 as an exact evaluation."""
    return compose(
        "reference",
        Primitives(),
        dtype=dtype,
        kernels={"attention": "decode all, softmax", "linear": "decode by tile, torch"},
    )
