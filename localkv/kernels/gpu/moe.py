"""Routed experts on the GPU: what `kernels.moe` computes, without a word to the host.

Few pairs of token and expert are multiplied one by one. Many are sorted by expert on the device,
and a tile takes pairs of one expert; the grid has room for the worst distribution.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from localkv.arch.spec import MoeSpec
from localkv.kernels.backend import scaled
from localkv.kernels.bounds import BoundsError, check_array
from localkv.kernels.gpu.launch import launch
from localkv.kernels.gpu.launch_bounds import check_experts, check_planes
from localkv.kernels.gpu.products.activations import Activations, row_warps
from localkv.kernels.gpu.products.epilogues import activation_numbers, epilogue, softplus
from localkv.kernels.gpu.products.plane_tensor import PlaneTensor
from localkv.kernels.gpu.products.products import (
    activations,
    hidden_rows,
    launch_constants,
    linear,
    planes_of,
)
from localkv.kernels.gpu.products.tile import product
from localkv.kernels.gpu.products.tile_sizes import TileSizes, gpu_of, tile_sizes
from localkv.kernels.layer_weights import MoeWeights
from localkv.kernels.moe import MIN_WEIGHT_SUM
from localkv.quant_formats.packed_tensor import PackedTensor


@triton.jit
def _pairs(expert_ptr, first_ptr, end_ptr, order_ptr, TOKENS: tl.constexpr):
    """The tile's expert, its pairs [TOKENS] and which of them exist. Without `order_ptr` each tile
    is the pair of its own number."""
    tile = tl.program_id(1)
    expert = tl.load(expert_ptr + tile)
    slot = tl.arange(0, TOKENS)
    if order_ptr is None:
        return expert, tile + slot, slot == 0
    else:
        at = tl.load(first_ptr + tile) + slot
        end = tl.load(end_ptr + tile)
        # a tile that has nothing to do is left before it reads anything
        pair = tl.load(order_ptr + tl.minimum(at, tl.maximum(end - 1, 0)))
        return expert, pair, at < end


@triton.jit
def _expert_rows(expert, n_rows, stack_rows, start, ROWS: tl.constexpr, WIDE: tl.constexpr):
    """Rows of the output, and those to read of the stack, where an expert has `stack_rows` and
    these begin at `start`."""
    out_row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row = start + tl.minimum(out_row, n_rows - 1)
    if WIDE:
        return out_row, expert.to(tl.int64) * stack_rows + row
    else:
        return out_row, expert * stack_rows + row


@triton.jit
def experts_gate_up_kernel(
    x_ptr, restore_ptr, weights_ptr, out_ptr, expert_ptr, first_ptr, end_ptr, order_ptr, numbers,
    n_experts, n_in, n_rows, stack_rows, up_start,
    gate_planes, gate_scale, gate_bias_ptr, up_planes, up_scale, up_bias_ptr,
    N_USED: tl.constexpr, ACTIVATION: tl.constexpr,
    GATE: tl.constexpr, GATE_UNIT: tl.constexpr, UP: tl.constexpr, UP_UNIT: tl.constexpr,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, VALUES: tl.constexpr, EVEN: tl.constexpr,
    HALVES: tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr, FENCE: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """ACTIVATION(gate, up, `numbers`) of each pair's token and expert: [pairs, n_rows].
    Grid: (tiles of rows, tiles of pairs).

    Without a GATE up takes its place, and 1 its own. Biases, of `stack_rows` each, may be None.
    With `weights_ptr` what an expert reads is multiplied by the pair's weight.
    """
    expert, pair, ok = _pairs(expert_ptr, first_ptr, end_ptr, order_ptr, TOKENS)
    if expert < n_experts:
        x_row = pair // N_USED
        if GATE is not None:
            out_row, row = _expert_rows(expert, n_rows, stack_rows, 0, ROWS, WIDE)
            gate = product(
                x_ptr, x_row, restore_ptr, gate_planes, row, 0, n_in, n_in, gate_scale,
                GATE, GATE_UNIT, ROWS, TOKENS, VALUES, EVEN, HALVES, STAGES, FENCE, PTX,
            )  # fmt: skip
            if weights_ptr is not None:
                gate *= tl.load(weights_ptr + pair)[None, :]
            if gate_bias_ptr is not None:
                gate += tl.load(gate_bias_ptr + row)[:, None]
        out_row, row = _expert_rows(expert, n_rows, stack_rows, up_start, ROWS, WIDE)
        up = product(
            x_ptr, x_row, restore_ptr, up_planes, row, 0, n_in, n_in, up_scale,
            UP, UP_UNIT, ROWS, TOKENS, VALUES, EVEN, HALVES, STAGES, FENCE, PTX,
        )  # fmt: skip
        if weights_ptr is not None:
            up *= tl.load(weights_ptr + pair)[None, :]
        if up_bias_ptr is not None:
            up += tl.load(up_bias_ptr + row)[:, None]
        if GATE is not None:
            y = ACTIVATION(gate, up, numbers)
        else:
            y = ACTIVATION(up, 1.0, numbers)
        at = pair.to(tl.int64)[None, :] * n_rows + out_row[:, None]
        tl.store(out_ptr + at, y, mask=(out_row < n_rows)[:, None] & ok[None, :])


@triton.jit
def experts_down_kernel(
    x_ptr, restore_ptr, weights_ptr, out_ptr, expert_ptr, first_ptr, end_ptr, order_ptr,
    n_experts, n_in, n_rows, planes, w_scale, expert_scale_ptr, bias_ptr,
    DOWN: tl.constexpr, DOWN_UNIT: tl.constexpr,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, VALUES: tl.constexpr, EVEN: tl.constexpr,
    HALVES: tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr, FENCE: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """Each pair's row of x through its expert, times its weight: [pairs, n_rows].
    Grid: (tiles of rows, tiles of pairs).

    The experts' factors and biases may be None, as the weights.
    """
    expert, pair, ok = _pairs(expert_ptr, first_ptr, end_ptr, order_ptr, TOKENS)
    if expert < n_experts:
        out_row, row = _expert_rows(expert, n_rows, n_rows, 0, ROWS, WIDE)
        y = product(
            x_ptr, pair, restore_ptr, planes, row, 0, n_in, n_in, w_scale,
            DOWN, DOWN_UNIT, ROWS, TOKENS, VALUES, EVEN, HALVES, STAGES, FENCE, PTX,
        )  # fmt: skip
        if expert_scale_ptr is not None:
            y *= tl.load(expert_scale_ptr + expert)
        if bias_ptr is not None:
            y += tl.load(bias_ptr + row)[:, None]
        if weights_ptr is not None:
            y *= tl.load(weights_ptr + pair)[None, :]
        at = pair.to(tl.int64)[None, :] * n_rows + out_row[:, None]
        tl.store(out_ptr + at, y, mask=(out_row < n_rows)[:, None] & ok[None, :])


@triton.jit
def combine_kernel(
    pairs_ptr, residual_ptr, shared_ptr, x_ptr, gate_ptr, out_ptr, n,
    N_USED: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """The sum of a token's pairs, of the residual and of the shared expert's output.

    That one is multiplied with sigmoid(x . gate), unless `gate_ptr` is None. Grid: (tokens,).
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, N)
    ok = column < n
    y = tl.zeros((N,), tl.float32)
    for i in tl.static_range(N_USED):
        y += tl.load(pairs_ptr + (token * N_USED + i) * n + column, mask=ok, other=0.0)
    if shared_ptr is not None:
        shared = tl.load(shared_ptr + token * n + column, mask=ok, other=0.0)
        if gate_ptr is not None:
            x = tl.load(x_ptr + token * n + column, mask=ok, other=0.0).to(tl.float32)
            gate = tl.load(gate_ptr + column, mask=ok, other=0.0)
            shared = shared * tl.sigmoid(tl.sum(x * gate, 0))
        y += shared
    if residual_ptr is not None:
        y += tl.load(residual_ptr + token * n + column, mask=ok, other=0.0)
    tl.store(out_ptr + token * n + column, y, mask=ok)


LEAST_WEIGHT_SUM = tl.constexpr(MIN_WEIGHT_SUM)


@triton.jit
def _shares(logits, GATING: tl.constexpr):
    if GATING == "softmax":
        p = tl.exp(logits - tl.max(logits, 0))
        return p / tl.sum(p, 0)
    elif GATING == "sigmoid":
        return 1.0 / (1.0 + tl.exp(-logits))
    elif GATING == "sqrt_softplus":
        return tl.sqrt(softplus(logits))
    else:
        return logits


@triton.jit
def _of_best_groups(
    ranks, expert, n_experts, N_GROUPS: tl.constexpr, N_GROUPS_USED: tl.constexpr,
    GROUPS: tl.constexpr,
):  # fmt: skip
    """`ranks`, but minus infinity outside of the groups whose two best are the best together."""
    group = expert // (n_experts // N_GROUPS)
    slot = tl.arange(0, GROUPS)
    scores = tl.full((GROUPS,), -float("inf"), tl.float32)
    for i in tl.static_range(N_GROUPS):
        members = tl.where(group == i, ranks, -float("inf"))
        second = tl.where(expert == tl.argmax(members, 0), -float("inf"), members)
        scores = tl.where(slot == i, tl.max(members, 0) + tl.max(second, 0), scores)
    used = expert < 0
    for _ in tl.static_range(N_GROUPS_USED):
        best = tl.argmax(scores, 0)
        used = used | (group == best)
        scores = tl.where(slot == best, -float("inf"), scores)
    return tl.where(used, ranks, -float("inf"))


@triton.jit
def route_kernel(
    logits_ptr, bias_ptr, experts_ptr, weights_ptr, n_experts, weights_scale,
    N: tl.constexpr, N_USED: tl.constexpr, USED: tl.constexpr, GATING: tl.constexpr,
    N_GROUPS: tl.constexpr, N_GROUPS_USED: tl.constexpr, GROUPS: tl.constexpr,
    RENORMALISE: tl.constexpr,
):  # fmt: skip
    """Grid: (tokens,). USED and GROUPS are the powers of two that the experts of a token, N_USED,
    and the groups fit in."""
    token = tl.program_id(0)
    expert = tl.arange(0, N)
    exists = expert < n_experts
    logits = tl.load(logits_ptr + token * n_experts + expert, mask=exists, other=-float("inf"))
    p = _shares(logits, GATING)
    if bias_ptr is not None:
        ranks = p + tl.load(bias_ptr + expert, mask=exists, other=0.0)
    elif GATING == "sigmoid" and N_GROUPS == 1:
        ranks = logits
    else:
        ranks = p
    # a NaN is the last choice; of a softmax all are NaN, so the first experts are taken, whose
    # weights are NaN
    left = tl.where(
        exists, tl.where(ranks == ranks, tl.maximum(ranks, -3e38), -3e38), -float("inf")
    )
    if N_GROUPS > 1:
        left = _of_best_groups(left, expert, n_experts, N_GROUPS, N_GROUPS_USED, GROUPS)
    slot = tl.arange(0, USED)
    chosen = tl.zeros((USED,), tl.int32)
    weights = tl.zeros((USED,), tl.float32)
    for i in tl.static_range(N_USED):
        best = tl.argmax(left, 0)
        chosen = tl.where(slot == i, best, chosen)
        weights = tl.where(slot == i, tl.sum(tl.where(expert == best, p, 0.0), 0), weights)
        left = tl.where(expert == best, -float("inf"), left)
    if GATING == "softmax_of_chosen":
        weights = tl.where(slot < N_USED, weights, -float("inf"))
        weights = tl.exp(weights - tl.max(weights, 0))
        weights = weights / tl.sum(weights, 0)
    if RENORMALISE:
        weights = weights / tl.maximum(tl.sum(weights, 0), LEAST_WEIGHT_SUM)
    weights *= weights_scale
    tl.store(experts_ptr + token * N_USED + slot, chosen, mask=slot < N_USED)
    tl.store(weights_ptr + token * N_USED + slot, weights, mask=slot < N_USED)


def route(router_logits: Tensor, moe: MoeSpec, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """See `kernels.moe.route`; for float32 logits; experts are int32."""
    n_tokens, n_experts = router_logits.shape
    shape = n_tokens, moe.n_experts_used
    if bias is not None:
        check_array("the router's bias", bias, "float32", n_experts)
    experts = torch.empty(shape, dtype=torch.int32, device=router_logits.device)
    weights = torch.empty(shape, dtype=torch.float32, device=router_logits.device)
    launch(
        route_kernel,
        (n_tokens,),
        router_logits,
        bias,
        experts,
        weights,
        n_experts,
        moe.weights_scale,
        N=triton.next_power_of_2(n_experts),
        N_USED=moe.n_experts_used,
        USED=triton.next_power_of_2(moe.n_experts_used),
        GATING=moe.gating,
        N_GROUPS=moe.n_groups,
        N_GROUPS_USED=moe.n_groups_used,
        GROUPS=triton.next_power_of_2(moe.n_groups),
        RENORMALISE=moe.renormalise,
        num_warps=1,
    )
    return experts, weights


@dataclass(frozen=True)
class ExpertTiles:
    """(token, expert) pairs in tiles that see the same expert.

    Pair i is token i // n_experts_used with that token's expert i % n_experts_used.

    Attributes:
        expert: int32 [tiles]; n_experts where there is nothing to do.
        first, end: int32 [tiles], the tile's range of `order`.
        order: int32 [pairs], pairs sorted by expert.
    """

    expert: Tensor
    first: Tensor
    end: Tensor
    order: Tensor


def expert_tiles(experts: Tensor, n_experts: int, tile: int) -> ExpertTiles:
    """Pairs of `experts` [tokens, n_experts_used] in tiles of at most `tile`.

    There are as many tiles as there could be at most, so the host need not know how many there are.
    """
    ids, order = experts.flatten().long().sort(stable=True)
    n_pairs = len(ids)
    each = torch.arange(n_experts + 1, device=ids.device)
    starts = torch.searchsorted(ids, each)  # where each expert's pairs begin
    n_tiles = (starts.diff() + tile - 1).div(tile, rounding_mode="floor")
    last_tile = n_tiles.cumsum(0)
    most = min(n_pairs, triton.cdiv(n_pairs, tile) + n_experts)
    index = torch.arange(most, device=ids.device)
    expert = torch.searchsorted(last_tile, index, right=True)
    before = torch.cat([last_tile.new_zeros(1), last_tile, last_tile[-1:]])
    first = starts[expert] + (index - before[expert]) * tile
    end = torch.cat([starts, starts[-1:]])[expert + 1]
    return ExpertTiles(
        expert.int(), first.int(), torch.minimum(first + tile, end).int(), order.int()
    )


FEW_PAIRS = 2
"""Pairs an expert, on average, up to which they are multiplied one by one."""


def _sizes(n_pairs: int, weights: list[PlaneTensor]) -> TileSizes:
    """Tile sizes for the pairs that an expert has on average; experts' products are never split."""
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
    """The stacks of a layer's experts: gate's and up's are one, if the file has it so.

    Biases are float32 [n_experts, rows], as the stacks' rows; `up_start` is the row of an expert
    at which up's begin.
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
        activation_numbers(moe.expert),
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
        ACTIVATION=epilogue(moe.expert),
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


def combined(
    pairs: Tensor,
    n_used: int,
    residual: Tensor | None = None,
    shared: Tensor | None = None,
    gate: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """The sum of each token's rows: float32 [tokens, n].

    Args:
        pairs: float32 [tokens * n_used, n].
        residual, shared: float32 [tokens, n] to be added, or None.
        gate: rows [tokens, n] and float32 [n], the sigmoid of whose products is a factor on
            `shared`, or None.
    """
    n = pairs.shape[1]
    out = pairs.new_empty(len(pairs) // n_used, n)
    width = triton.next_power_of_2(n)
    launch(
        combine_kernel,
        (len(out),),
        pairs,
        residual,
        shared,
        None if gate is None else gate[0],
        None if gate is None else gate[1],
        out,
        n,
        N_USED=n_used,
        N=width,
        num_warps=row_warps(width),
    )
    return out


def moe_mlp(
    x: Tensor,
    layer: MoeWeights,
    moe: MoeSpec,
    routed: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """What `kernels.moe.moe_mlp` gives, and `residual` added: float32 [tokens, n_embd].

    Args:
        x, routed: float32 or float16 [tokens, n_embd].
    """
    logits = linear(x if routed is None else routed, layer.ffn_gate_inp)
    experts, weights = route(logits, moe, layer.exp_probs_b)
    read = x if layer.ffn_latent_down is None else linear(x, layer.ffn_latent_down)
    pairs, n_used = expert_products(read, experts, weights, layer, moe), moe.n_experts_used
    if layer.ffn_latent_up is not None:
        pairs, n_used = linear(combined(pairs, n_used), layer.ffn_latent_up), 1
    shared = None
    if layer.shared is not None:
        hidden = hidden_rows(x, None, layer.shared, moe.shared)
        shared = scaled(linear(hidden, layer.shared.ffn_down), moe.shared_scale)
    gate = None if layer.ffn_gate_inp_shexp is None else (x, layer.ffn_gate_inp_shexp)
    return combined(pairs, n_used, residual, shared, gate)
