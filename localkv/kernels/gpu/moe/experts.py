"""Routed experts on the GPU: as `kernels.moe`, without a word to the host.

Few pairs of token and expert are multiplied one by one. Many are sorted by expert on the device,
and a tile takes pairs of one expert; the grid has room for the worst distribution.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from localkv.arch.spec import MoeSpec
from localkv.kernels.backend import scaled
from localkv.kernels.bounds import BoundsError
from localkv.kernels.gpu.launch import launch
from localkv.kernels.gpu.launch_bounds import check_experts, check_planes
from localkv.kernels.gpu.moe.kernels import (
    combine_kernel,
    experts_down_kernel,
    experts_gate_up_kernel,
)
from localkv.kernels.gpu.moe.route import ExpertTiles, expert_tiles, route
from localkv.kernels.gpu.products.activations import Activations, row_warps
from localkv.kernels.gpu.products.epilogues import GATED
from localkv.kernels.gpu.products.plane_tensor import PlaneTensor
from localkv.kernels.gpu.products.products import (
    activations,
    hidden_rows,
    launch_constants,
    linear,
    planes_of,
)
from localkv.kernels.gpu.products.tile_sizes import TileSizes, gpu_of, tile_sizes
from localkv.kernels.layer_weights import MoeWeights
from localkv.quant_formats.packed_tensor import PackedTensor

FEW_PAIRS = 2
"""Pairs an expert, on average, up to which they are multiplied one by one."""


def _sizes(n_pairs: int, weights: list[PlaneTensor]) -> TileSizes:
    """Of pairs an expert has on average; experts' products are never split."""
    n_experts, n_out, n_in = weights[0].shape
    return tile_sizes(
        1 if n_pairs <= FEW_PAIRS * n_experts else triton.cdiv(n_pairs, n_experts),
        n_out,
        n_in,
        max(weight.layout.unit for weight in weights),
        gpu_of(weights[0].planes[0].device).n_processors,
        exact=any(weight.layout.is_exact for weight in weights),
        alone=len(weights) == 1,
        looks_up=any(weight.layout.table is not None for weight in weights),
    )


def _tiles(
    experts: Tensor, n_experts: int, sizes: TileSizes
) -> tuple[int, tuple[Tensor | None, ...]]:
    """How many tiles of pairs there are, and the tables that the kernels read."""
    if sizes.tokens == 1:
        return experts.numel(), (experts, None, None, None)
    tiles: ExpertTiles = expert_tiles(experts, n_experts, sizes.tokens)
    return len(tiles.expert), (tiles.expert, tiles.first, tiles.end, tiles.order)


def _rows(x: Tensor, sizes: TileSizes, weights: list[PlaneTensor]) -> Activations:
    """A tile of one pair reads float32, for any number of pairs."""
    return Activations(x.contiguous()) if sizes.tokens == 1 else activations(x, weights)


class _Stacks(NamedTuple):
    """The stacks of a layer's experts: those of gate and up are one, if the file has it so.

    Biases are float32 [n_experts, rows], as the stacks' rows; `up_start` is the row of an expert
    at which those of up begin.
    """

    gate: PlaneTensor | None
    up: PlaneTensor
    down: PlaneTensor
    up_start: int
    gate_bias: Tensor | None
    up_bias: Tensor | None

    @property
    def gate_and_up(self) -> list[PlaneTensor]:
        return [self.up] if self.gate is None else [self.gate, self.up]


def _stacks(layer: MoeWeights, moe: MoeSpec) -> _Stacks:
    down = planes_of(layer.ffn_down_exps)
    if layer.ffn_gate_up_exps is not None:
        both, bias = planes_of(layer.ffn_gate_up_exps), layer.gate_up_bias
        return _Stacks(both, both, down, moe.n_ff, bias, bias)
    assert layer.ffn_up_exps is not None
    up = planes_of(layer.ffn_up_exps)
    gate = None if layer.ffn_gate_exps is None else planes_of(layer.ffn_gate_exps)
    return _Stacks(gate, up, down, 0, layer.gate_bias, layer.up_bias)


def expert_products(
    x: Tensor, experts: Tensor, weights: Tensor, layer: MoeWeights, moe: MoeSpec
) -> Tensor:
    """float32 [pairs, n_embd]: each pair's expert's output, times its weight.

    Args:
        x: float32 or float16 [tokens, n_embd].
        experts, weights: int32 and float32 [tokens, experts of a token].
    """
    n_pairs, n_used, n_ff = experts.numel(), experts.shape[1], moe.n_ff
    stacks = _stacks(layer, moe)
    gate, up, down = stacks.gate, stacks.up, stacks.down
    n_experts, stack_rows, n_embd = up.shape
    biases = (stacks.gate_bias, stacks.up_bias, layer.down_bias, layer.down_scale)
    check_experts(x, experts, weights, (gate, up, down), stacks.up_start + n_ff, n_ff, biases)

    sizes = _sizes(n_pairs, stacks.gate_and_up)
    n_tiles, tables = _tiles(experts, n_experts, sizes)
    rows = _rows(x, sizes, stacks.gate_and_up)
    hidden = x.new_empty(n_pairs, n_ff, dtype=torch.float32)
    launch(
        experts_gate_up_kernel,
        (triton.cdiv(n_ff, sizes.rows), n_tiles),
        rows.values,
        rows.restore,
        weights if moe.weighs_input else None,
        hidden,
        *tables,
        n_experts,
        n_embd,
        n_ff,
        stack_rows,
        stacks.up_start,
        None if gate is None else gate.operands,
        None if gate is None else gate.scale,
        stacks.gate_bias,
        up.operands,
        up.scale,
        stacks.up_bias,
        N_USED=n_used,
        ACTIVATION=GATED[moe.activation],
        GATE=None if gate is None else gate.layout.read,
        GATE_UNIT=None if gate is None else gate.layout.unit,
        UP=up.layout.read,
        UP_UNIT=up.layout.unit,
        **launch_constants(sizes, stacks.gate_and_up),
    )

    down_sizes = _sizes(n_pairs, [down])
    if down_sizes.tokens != sizes.tokens:
        n_tiles, tables = _tiles(experts, n_experts, down_sizes)
    rows = _rows(hidden, down_sizes, [down])
    out = x.new_empty(n_pairs, n_embd, dtype=torch.float32)
    launch(
        experts_down_kernel,
        (triton.cdiv(n_embd, down_sizes.rows), n_tiles),
        rows.values,
        rows.restore,
        None if moe.weighs_input else weights,
        out,
        *tables,
        n_experts,
        n_ff,
        n_embd,
        down.operands,
        down.scale,
        layer.down_scale,
        layer.down_bias,
        DOWN=down.layout.read,
        DOWN_UNIT=down.layout.unit,
        **launch_constants(down_sizes, [down]),
    )
    return out


def stack_products(x: Tensor, experts: Tensor, stack: PackedTensor) -> Tensor:
    """Each row through its own matrix of a stack: float32 [rows, n_out].

    Args:
        x: float32 [rows, n_in].
        experts: int32 [tokens, matrices of a token], which matrix each row's is.
    """
    weight = planes_of(stack)
    n_stack, n_out, n_in = weight.shape
    check_planes(weight, n_in)
    if x.shape != (experts.numel(), n_in):
        raise BoundsError(f"rows {list(x.shape)} for {experts.numel()} matrices of {n_in} columns")
    sizes = _sizes(len(x), [weight])
    n_tiles, tables = _tiles(experts, n_stack, sizes)
    rows = _rows(x, sizes, [weight])
    out = x.new_empty(len(x), n_out, dtype=torch.float32)
    launch(
        experts_down_kernel,
        (triton.cdiv(n_out, sizes.rows), n_tiles),
        rows.values,
        rows.restore,
        None,
        out,
        *tables,
        n_stack,
        n_in,
        n_out,
        weight.operands,
        weight.scale,
        None,
        None,
        DOWN=weight.layout.read,
        DOWN_UNIT=weight.layout.unit,
        **launch_constants(sizes, [weight]),
    )
    return out


def moe_mlp(
    x: Tensor,
    layer: MoeWeights,
    moe: MoeSpec,
    routed: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """As `kernels.moe.moe_mlp`, and `residual` added: float32 [tokens, n_embd].

    Args:
        x, routed: float32 or float16 [tokens, n_embd].
    """
    logits = linear(x if routed is None else routed, layer.ffn_gate_inp)
    experts, weights = route(logits, moe, layer.exp_probs_b)
    pairs = expert_products(x, experts, weights, layer, moe)
    shared = None
    if layer.shared is not None:
        hidden = hidden_rows(x, None, layer.shared, moe.shared)
        shared = scaled(linear(hidden, layer.shared.ffn_down), moe.shared_scale)
    n_tokens, n = x.shape
    out = torch.empty_like(pairs[:n_tokens])
    width = triton.next_power_of_2(n)
    launch(
        combine_kernel,
        (n_tokens,),
        pairs,
        residual,
        shared,
        x,
        layer.ffn_gate_inp_shexp,
        out,
        n,
        N_USED=moe.n_experts_used,
        N=width,
        num_warps=row_warps(width),
    )
    return out
