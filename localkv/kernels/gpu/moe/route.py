"""Which experts see a token, and lists of tokens by expert, without asking the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from localkv.arch.ffn_spec import MoeSpec
from localkv.kernels.gpu.launch import launch
from localkv.kernels.moe import MIN_WEIGHT_SUM

LEAST_WEIGHT_SUM = tl.constexpr(MIN_WEIGHT_SUM)


@triton.jit
def route_kernel(
    logits_ptr, experts_ptr, weights_ptr, n_experts,
    N: tl.constexpr, N_USED: tl.constexpr, USED: tl.constexpr, RENORMALISE: tl.constexpr,
):  # fmt: skip
    """Grid: (tokens,). USED is the power of two that N_USED, the experts of a token, fits in."""
    token = tl.program_id(0)
    expert = tl.arange(0, N)
    logits = tl.load(
        logits_ptr + token * n_experts + expert, mask=expert < n_experts, other=-float("inf")
    )
    p = tl.exp(logits - tl.max(logits, 0))
    p = p / tl.sum(p, 0)
    slot = tl.arange(0, USED)
    chosen = tl.zeros((USED,), tl.int32)
    weights = tl.zeros((USED,), tl.float32)
    # where p is NaN, all are: the first experts are taken, and their weights are NaN
    left = tl.where(expert < n_experts, tl.where(p == p, p, 0.0), -1.0)
    for i in tl.static_range(N_USED):
        best = tl.argmax(left, 0)
        chosen = tl.where(slot == i, best, chosen)
        weights = tl.where(slot == i, tl.sum(tl.where(expert == best, p, 0.0), 0), weights)
        left = tl.where(expert == best, -1.0, left)
    if RENORMALISE:
        weights = weights / tl.maximum(tl.sum(weights, 0), LEAST_WEIGHT_SUM)
    tl.store(experts_ptr + token * N_USED + slot, chosen, mask=slot < N_USED)
    tl.store(weights_ptr + token * N_USED + slot, weights, mask=slot < N_USED)


def route(router_logits: Tensor, moe: MoeSpec) -> tuple[Tensor, Tensor]:
    """As `kernels.moe.route`, for float32 logits; experts are int32."""
    n_tokens, n_experts = router_logits.shape
    shape = n_tokens, moe.n_experts_used
    experts = torch.empty(shape, dtype=torch.int32, device=router_logits.device)
    weights = torch.empty(shape, dtype=torch.float32, device=router_logits.device)
    launch(
        route_kernel,
        (n_tokens,),
        router_logits,
        experts,
        weights,
        n_experts,
        N=triton.next_power_of_2(n_experts),
        N_USED=moe.n_experts_used,
        USED=triton.next_power_of_2(moe.n_experts_used),
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
