"""REFERENCE: plain torch, slow and easy to trust; every test compares with it."""

from __future__ import annotations

import torch

from localkv.kernels.backend import Backend, Primitives, compose
from localkv.kernels.method import Method, Methods

METHODS = Methods(
    attention=Method("all of K and V decoded, softmax in torch"),
    tiles=lambda fmt, side: Method("the backend's float type"),
    store=lambda fmt: Method("torch"),
    product=lambda weight: Method("decoded tile by tile in torch"),
    experts=Method("torch, one expert after the other"),
)
"""The reference is plain torch throughout, so nothing in it is slow for want of a kernel."""


def reference_backend(dtype: torch.dtype = torch.float32) -> Backend:
    """The reference in float32, or in float64 as an exact evaluation."""
    return compose(
        "reference",
        Primitives(),
        dtype=dtype,
        methods=METHODS,
    )
