"""The CPU's operations on tensors, as tests compare them with the reference."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

from localkv.arch.spec import MoeSpec
from localkv.kernels import moe
from localkv.kernels.activation import activate
from localkv.kernels.cpu.attention.packed_attention import PackedAttention
from localkv.kernels.cpu.layers import chains
from localkv.kernels.cpu.linear.products import CpuProducts
from localkv.kernels.cpu.store import store_kv
from localkv.kernels.layer_weights import Linear, MoeWeights
from localkv.kernels.reference.backend import linear, matmul
from localkv.quant_formats.packed_tensor import PackedTensor
from support.torch_edge import numpy_of, torch_of, with_tensors

rotate_cpu = with_tensors(store_kv.rotate_cpu)
store_kv_cpu = with_tensors(store_kv.store_kv_cpu)
norm_cpu = with_tensors(chains.norm_cpu)
activate_cpu = with_tensors(chains.activate_cpu)
apply_rope_cpu = with_tensors(chains.apply_rope_cpu)


def cpu_attention() -> Callable[..., tuple[Tensor, Tensor]]:
    """`PackedAttention`."""
    return with_tensors(PackedAttention().__call__)


class TensorProducts(CpuProducts):
    """`CpuProducts`."""

    def matmul(self, x: Tensor, weight: PackedTensor) -> Tensor:  # type: ignore[override]
        return torch_of(super().matmul(numpy_of(x), weight))

    def linear(self, x: Tensor, layer: Linear) -> Tensor:  # type: ignore[override]
        return torch_of(super().linear(numpy_of(x), numpy_of(layer)))


def moe_mlp(x: Tensor, layer: MoeWeights, spec: MoeSpec, routed: Tensor | None = None) -> Tensor:
    """`moe_mlp` with the reference's primitives."""

    def product(x: Tensor, stack: PackedTensor, expert: int) -> Tensor:
        return matmul(x, stack[expert])

    y: Tensor = moe.moe_mlp(
        x, layer, spec, routed, product=product, linear=linear, activate=activate
    )
    return y


def moe_mlp_cpu(x: Tensor, layer: MoeWeights, spec: MoeSpec, products: CpuProducts) -> Tensor:
    """`moe_mlp` with the CPU's primitives."""
    run = partial(
        moe.moe_mlp,
        product=lambda x, stack, expert: numpy_of(products.matmul(x, stack[expert])),
        linear=lambda x, layer: numpy_of(products.linear(x, layer)),
        activate=chains.activate_cpu,
    )
    return torch_of(run(numpy_of(x), numpy_of(layer), spec))
