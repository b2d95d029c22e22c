"""REFERENCE: plain torch, slow and easy to trust; every test compares with it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from localkv.arch.spec import AttentionSpec
from localkv.kernels.activation import activate
from localkv.kernels.attention_mixers import grouped_attention
from localkv.kernels.backend import Backend
from localkv.kernels.compose import compose
from localkv.kernels.method import Method, Methods
from localkv.kernels.primitives import Primitives
from localkv.kernels.reference.attention import (
    attend_before_rope,
    attention_reference,
    lacks_before_rope,
    latents_reference,
)
from localkv.kernels.reference.operations import (
    apply_rope,
    hadamard_transform,
    head_products,
    linear,
    moe_mlp,
    norm,
    pack_groups,
    store_kv,
)
from localkv.kernels.reference.torch_arrays import TorchArrays, decoded

METHODS = Methods(
    attention=Method("all of K and V decoded, softmax in torch"),
    tiles=lambda fmt, side: Method("the backend's float type"),
    store=lambda fmt: Method("torch"),
    product=lambda weight: Method("decoded tile by tile, multiplied in torch"),
    experts=lambda moe: Method("torch, one expert after the other"),
)
"""The reference is plain torch throughout, so nothing in it is slow for want of a kernel."""


def reference_backend(
    dtype: torch.dtype = torch.float32, *, k_before_rope: bool = False
) -> Backend:
    """The reference in float32, or in float64 as an exact evaluation.

    Args:
        k_before_rope: K is in the cache as it is before RoPE.
    """
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
    backend = compose("reference", primitives, arrays=TorchArrays("cpu", dtype), methods=METHODS)
    if not k_before_rope:
        return backend
    mixers = dict(backend.mixers)
    mixers[AttentionSpec] = partial(
        grouped_attention, primitives, attend=attend_before_rope, stores_turned=False
    )
    words = f"{METHODS.attention.words}, K rotated as it is read"
    methods = replace(METHODS, attention=Method(words))
    return replace(backend, mixers=mixers, methods=methods, lacks=lacks_before_rope)
