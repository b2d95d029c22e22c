"""Which experts a chain's tokens see: the steps that find out, and the tables that they write."""

from __future__ import annotations

from dataclasses import dataclass

from localkv.arch.spec import MoeSpec
from localkv.kernels.cpu.addresses import Floats
from localkv.kernels.cpu.jit.kernel_source import KernelSource
from localkv.kernels.cpu.jit.specialize import specialized
from localkv.kernels.cpu.moe.job import GROUP_ITEMS, GroupJob, RouteJob, route_bytes
from localkv.kernels.cpu.runtime.chain import Chain, Memory, Where
from localkv.system.threads import n_threads

GROUPING, ROWS = KernelSource("moe/grouping"), KernelSource("moe/rows")
FEW_TOKENS = 4
"""Up to this many are routed sooner by one thread than others start."""


def route_source(moe: MoeSpec) -> KernelSource:
    """The kernel that chooses experts."""
    return KernelSource("moe/route", {"GATING": moe.gating})


@dataclass(frozen=True)
class Routing:
    """Tables in scratch memory; see `GroupJob`.

    Attributes:
        n_tokens, n_experts, n_used: sizes.
        weights: float32 by pair.
    """

    n_tokens: int
    n_experts: int
    n_used: int
    experts: Memory
    weights: Memory
    rows: Memory
    pairs: Memory
    groups: Memory
    group_of: Memory

    @property
    def n_pairs(self) -> int:
        return self.n_tokens * self.n_used

    @property
    def most_groups(self) -> int:
        return min(self.n_experts, self.n_pairs)


def taken(chain: Chain, n_bytes: int) -> Memory:
    """All of a new part of the scratch memory."""
    return Memory(chain.take(n_bytes), n_bytes)


def add_routing(
    chain: Chain, logits: Where, n_tokens: int, moe: MoeSpec, bias: Floats | None, scale: Memory
) -> Routing:
    """The steps from the router's logits, float32 [n_tokens, n_experts], to the tables.

    Args:
        bias: [n_experts], added for the choice.
        scale: one float32, `MoeSpec.weights_scale`.
    """
    n_experts, n_pairs = moe.n_experts, n_tokens * moe.n_experts_used
    by_pair = 8 * n_pairs
    routing = Routing(
        n_tokens,
        n_experts,
        moe.n_experts_used,
        experts=taken(chain, by_pair),
        weights=taken(chain, 4 * n_pairs),
        rows=taken(chain, by_pair),
        pairs=taken(chain, by_pair),
        groups=taken(chain, 8 * (1 + GROUP_ITEMS * min(n_experts, n_pairs))),
        group_of=taken(chain, by_pair),
    )
    threads = n_threads() if n_tokens > FEW_TOKENS else 1
    thread_bytes = route_bytes(n_experts, moe.n_groups)
    job = RouteJob(
        next_token=0,
        n_tokens=n_tokens,
        n_experts=n_experts,
        n_used=moe.n_experts_used,
        n_groups=moe.n_groups,
        n_groups_used=moe.n_groups_used,
        renormalise=int(moe.renormalise),
        ranks_logits=int(moe.gating == "sigmoid" and bias is None and moe.n_groups == 1),
        scale=scale,
        logits=Memory(logits, 4 * n_tokens * n_experts),
        bias=0 if bias is None else Memory(bias, 4 * n_experts),
        scratch=taken(chain, threads * thread_bytes),
        thread_bytes=thread_bytes,
        experts=routing.experts,
        weights=routing.weights,
    )
    chain.add(specialized(route_source(moe))["route"], job, threads)
    tables = GroupJob(
        next=0,
        n_pairs=n_pairs,
        n_experts=n_experts,
        experts=routing.experts,
        next_rows=taken(chain, 8 * n_experts),
        rows=routing.rows,
        pairs=routing.pairs,
        groups=routing.groups,
        group_of=routing.group_of,
    )
    chain.add(specialized(GROUPING)["group"], tables, 1)
    return routing
