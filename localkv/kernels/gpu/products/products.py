"""Products with packed matrices on the GPU: the kernels' launchers.

Every function takes float32 or float16 activations [tokens, n_in] and returns float32. One token's
products are float32 throughout. With more, activations and weights are rounded to fp16, scaled so
that they can't overflow, and add up in float32; with F32 weights nothing is rounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from localkv.arch.spec import Activation, MlpSpec
from localkv.kernels.activation import activate
from localkv.kernels.bounds import BoundsError
from localkv.kernels.gpu.launch import launch
from localkv.kernels.gpu.launch_bounds import check_products
from localkv.kernels.gpu.norm import norm, norm_packed
from localkv.kernels.gpu.products.activations import Activations, pack_rows
from localkv.kernels.gpu.products.decoded import decoded_product, decodes
from localkv.kernels.gpu.products.epilogues import GATED, PLAIN, activation_numbers
from localkv.kernels.gpu.products.kernels import gate_up_kernel, linear_kernel
from localkv.kernels.gpu.products.plane_tensor import LEAST_COLUMNS, PlaneTensor
from localkv.kernels.gpu.products.tile_sizes import TileSizes, gpu_of, tile_sizes, wants_fence
from localkv.kernels.layer_weights import Linear, MlpWeights, Norm
from localkv.quant_formats.packed_tensor import PackedTensor


def planes_of(weight: PackedTensor) -> PlaneTensor:
    """A weight that was prepared for the GPU."""
    assert isinstance(weight, PlaneTensor), f"{weight.format.name} weight is not prepared"
    return weight


def halves(weights: Sequence[PlaneTensor]) -> bool:
    """Activations are rounded to fp16 as they are (`PackedTensor.halves_activations`)."""
    return any(weight.halves_activations for weight in weights)


def keeps_float32(n_tokens: int, weights: Sequence[PlaneTensor]) -> bool:
    """The products read float32 activations."""
    return n_tokens == 1 or any(weight.layout.is_exact for weight in weights)


def activations(x: Tensor | Activations, weights: Sequence[PlaneTensor]) -> Activations:
    """`x` [tokens, n_in] as products with `weights` want it."""
    if isinstance(x, Activations):
        return x
    x = _with_zeros(x, weights)
    if not keeps_float32(x.shape[0], weights):
        return pack_rows(x, halves=halves(weights))
    if x.shape[0] > 1:
        x = x.float()
        x = x.clamp(-65504.0, 65504.0).half().float() if halves(weights) else x
    return Activations(x.contiguous())


def _with_zeros(x: Tensor, weights: Sequence[PlaneTensor]) -> Tensor:
    """`x`, as wide as the matrices, if those were widened (`plane_tensor.prepare`)."""
    n_missing = weights[0].shape[-1] - x.shape[-1]
    if not 0 < n_missing < LEAST_COLUMNS:
        return x
    return torch.nn.functional.pad(x, (0, n_missing))


def normed(x: Tensor, by: Norm | None, weights: Sequence[Linear]) -> Activations:
    """A norm of `x` [tokens, n_in], as products with `weights` want it, in one launch."""
    matrices = [planes_of(layer.weight) for layer in weights]
    if by is None or keeps_float32(x.shape[0], matrices) or halves(matrices):
        return activations(x if by is None else norm(x, by), matrices)
    return norm_packed(x, by)


def sizes_for(n_tokens: int, n_out: int, weights: Sequence[PlaneTensor]) -> TileSizes:
    """For a launch that makes `n_out` rows of the output with `weights`."""
    return tile_sizes(
        n_tokens,
        n_out,
        weights[0].shape[-1],
        max(weight.layout.unit for weight in weights),
        gpu_of(weights[0].planes[0].device).n_processors,
        exact=any(weight.layout.is_exact for weight in weights),
        alone=len(weights) == 1,
        looks_up=any(weight.layout.table is not None for weight in weights),
    )


def launch_constants(sizes: TileSizes, weights: Sequence[PlaneTensor]) -> dict[str, Any]:
    """The compile-time arguments that all product kernels have."""
    gpu = gpu_of(weights[0].planes[0].device)
    return {
        "ROWS": sizes.rows,
        "TOKENS": sizes.tokens,
        "VALUES": sizes.values,
        "EVEN": weights[0].shape[-1] % sizes.values == 0,
        "HALVES": sizes.tokens == 1 and halves(weights),
        "WIDE": any(weight.needs_wide_index for weight in weights),
        "STAGES": sizes.stages,
        "FENCE": wants_fence(gpu),
        "PTX": gpu.ptx,
        "num_warps": sizes.n_warps,
        "num_stages": sizes.stages,
    }


def linears(
    x: Tensor | Activations,
    layers: Sequence[Linear],
    residual: Tensor | None = None,
    block: MlpSpec | None = None,
) -> tuple[Tensor, ...]:
    """Products of `x` with one to three layers of the same n_in, in one launch.

    Args:
        residual: float32 [tokens, n_out], added to the product of a single layer.
        block: whose activation follows the product of a single layer, which has no residual.

    Returns:
        float32 [tokens, n_out] each.
    """
    weights = [planes_of(layer.weight) for layer in layers]
    packed = activations(x, weights)
    check_products(packed.values, weights, layers, residual)
    n_tokens, n_in = packed.values.shape
    n_out = [weight.shape[0] for weight in weights]
    if decodes(n_tokens, weights):
        return tuple(
            decoded_product(
                packed,
                (weight,),
                (layer.bias,),
                residual=residual,
                activation=PLAIN[block.activation] if block else None,
                numbers=activation_numbers(block) if block else (),
            )
            for weight, layer in zip(weights, layers, strict=True)
        )
    sizes = sizes_for(n_tokens, sum(n_out), weights)
    out = packed.values.new_empty(sizes.n_splits, n_tokens * sum(n_out), dtype=torch.float32)
    matrices: dict[str, Any] = {}
    for i, name in enumerate("abc"):
        present = i < len(layers)
        matrices |= {
            f"{name}_planes": weights[i].operands if present else None,
            f"{name}_scale": weights[i].scale if present else None,
            f"{name}_bias_ptr": layers[i].bias if present else None,
            f"{name}_rows": n_out[i] if present else None,
            name.upper(): weights[i].layout.read if present else None,
            f"{name.upper()}_UNIT": weights[i].layout.unit if present else None,
        }
    grid = (
        sum(triton.cdiv(n, sizes.rows) for n in n_out),
        triton.cdiv(n_tokens, sizes.tokens),
        sizes.n_splits,
    )
    launch(
        linear_kernel,
        grid,
        packed.values,
        packed.restore,
        out,
        residual,
        () if block is None else activation_numbers(block),
        n_tokens,
        n_in,
        out.shape[1],
        **matrices,
        ACTIVATION=PLAIN[block.activation] if block and sizes.n_splits == 1 else None,
        **launch_constants(sizes, weights),
    )
    whole = out[0] if sizes.n_splits == 1 else out.sum(0)
    if block is not None and sizes.n_splits > 1:
        whole = activate(whole, None, block)
    parts = whole.split([n_tokens * n for n in n_out])
    return tuple(part.view(n_tokens, n) for part, n in zip(parts, n_out, strict=True))


def linear(x: Tensor, layer: Linear) -> Tensor:
    """As `kernels.linear`."""
    return linears(x, (layer,))[0]


def gate_up(
    x: Tensor | Activations, gate: Linear, up: Linear, activation: Activation = "silu"
) -> Tensor:
    """activation(gate(x), up(x)), float32 [tokens, n_ff]; see `epilogues.GATED`."""
    weights = [planes_of(gate.weight), planes_of(up.weight)]
    packed = activations(x, weights)
    check_products(packed.values, weights, (gate, up))
    n_tokens, n_in = packed.values.shape
    n_out = weights[0].shape[0]
    if weights[1].shape[0] != n_out:
        raise BoundsError(f"{n_out} rows of gate and {weights[1].shape[0]} of up")
    if decodes(n_tokens, weights):
        return decoded_product(packed, weights, (gate.bias, up.bias), gated=GATED[activation])
    sizes = sizes_for(n_tokens, n_out, weights)
    shape = (n_tokens, n_out) if sizes.n_splits == 1 else (sizes.n_splits, 2, n_tokens, n_out)
    out = packed.values.new_empty(shape, dtype=torch.float32)
    grid = (triton.cdiv(n_out, sizes.rows), triton.cdiv(n_tokens, sizes.tokens), sizes.n_splits)
    launch(
        gate_up_kernel,
        grid,
        packed.values,
        packed.restore,
        out,
        n_tokens,
        n_in,
        n_out,
        2 * n_tokens * n_out,
        weights[0].operands,
        weights[0].scale,
        gate.bias,
        weights[1].operands,
        weights[1].scale,
        up.bias,
        GATE=weights[0].layout.read,
        GATE_UNIT=weights[0].layout.unit,
        UP=weights[1].layout.read,
        UP_UNIT=weights[1].layout.unit,
        SPLIT=sizes.n_splits > 1,
        ACTIVATION=GATED[activation],
        **launch_constants(sizes, weights),
    )
    if sizes.n_splits == 1:
        return out
    gate_sum, up_sum = out.sum(0).unbind(0)
    hidden: Tensor = activate(gate_sum, up_sum, MlpSpec(n_out, activation))
    return hidden


def why_not(spec: MlpSpec) -> str:
    """What a block has that no kernel does, in words; empty if there is nothing."""
    if spec.activation not in (GATED if spec.gated else PLAIN):
        return f"{spec.activation} {'with' if spec.gated else 'without'} a gate"
    return ""


def hidden_rows(source: Tensor, by: Norm | None, weights: MlpWeights, spec: MlpSpec) -> Tensor:
    """What a dense block's last matrix reads: two launches, unless few of the gate's values are
    kept, which torch does."""
    if weights.ffn_gate is None:
        h = normed(source, by, (weights.ffn_up,))
        return linears(h, (weights.ffn_up,), block=spec)[0]
    pair = (weights.ffn_gate, weights.ffn_up)
    h = normed(source, by, pair)
    if not spec.sparsity:
        return gate_up(h, *pair, spec.activation)
    gate, up = linears(h, pair)
    hidden: Tensor = activate(gate, up, spec)
    return hidden
