"""Which experts see a token, and lists of tokens by expert, without asking the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from localkv.arch.spec import MoeSpec
from localkv.kernels.bounds import check_array
from localkv.kernels.gpu.launch import launch
from localkv.kernels.moe import MIN_WEIGHT_SUM

LEAST_WEIGHT_SUM = tl.constexpr(MIN_WEIGHT_SUM)


@triton.jit
def _softplus(x):
    """log(1 + exp(x)), exact for small results, too (`log1p` as of Kahan); x itself from 20 on."""
    e = tl.exp(tl.minimum(x, 20.0))
    sum = 1.0 + e
    below = tl.where(sum == 1.0, e, tl.log(sum) * (e / tl.where(sum == 1.0, 1.0, sum - 1.0)))
    return tl.where(x > 20.0, x, below)


@triton.jit
def _shares(logits, GATING: tl.constexpr):
    if GATING == "softmax":
        p = tl.exp(logits - tl.max(logits, 0))
        return p / tl.sum(p, 0)
    elif GATING == "sigmoid":
        return 1.0 / (1.0 + tl.exp(-logits))
    elif GATING == "sqrt_softplus":
        return tl.sqrt(_softplus(logits))
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
    """As `kernels.moe.route`, for float32 logits; experts are int32."""
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
