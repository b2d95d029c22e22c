"""REFERENCE: plain torch, slow and easy to trust; every test compares with it."""

from __future__ import annotations

import torch

from localkv.kernels.activation import activate
from localkv.kernels.backend import Backend
from localkv.kernels.compose import compose
from localkv.kernels.method import Method, Methods
from localkv.kernels.primitives import Primitives
from localkv.kernels.reference.attention import attention_reference
from localkv.kernels.reference.hadamard import hadamard_transform
from localkv.kernels.reference.latent_attention import latents_reference
from localkv.kernels.reference.linear import head_products, linear, moe_mlp
from localkv.kernels.reference.norm import norm
from localkv.kernels.reference.rope import apply_rope
from localkv.kernels.reference.store_kv import pack_groups, store_kv
from localkv.kernels.reference.torch_arrays import TorchArrays
from localkv.kernels.reference.torch_codec import decoded

METHODS = Methods(
    attention=Method("all of K and V decoded, softmax in torch"),
    tiles=lambda fmt, side: Method("the backend's float type"),
    store=lambda fmt: Method("torch"),
    product=lambda weight: Method("decoded tile by tile, multiplied in torch"),
    experts=lambda moe: Method("torch, one expert after the other"),
)
"""The reference is plain torch throughout, so nothing in it is slow for want of a kernel."""


def reference_backend(dtype: torch.dtype = torch.float32) -> Backend:
    """The reference in float32, or in float64 as an exact evaluation."""
    primitives = Primitives(
        decode=lambda weight: decoded(weight, dtype),
        norm=norm,
        linear=linear,
        apply_rope=apply_rope,
        store_kv=store_kv,
        pack_groups=pack_groups,
        attention=attention_reference,
        rotate=hadamard_transform,
        activate=activate,
        moe_mlp=moe_mlp,
        latents=latents_reference,
        head_products=head_products,
    )
    return compose("reference", primitives, arrays=TorchArrays("cpu", dtype), methods=METHODS)
