"""Attention of one generated token in many layers, as steps of a chain.

A layer's job lies in an array that stays where it is. Before the chain runs, it is filled with what
the token's plan says, which is the same for all layers that see as far back.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from localkv.arch.mixer_spec import AttentionParams
from localkv.cache.batch import Batch
from localkv.cache.layer_cache import LayerCache, Segment
from localkv.kernels.bounds import BoundsError
from localkv.kernels.cpu.arrays import Floats, address
from localkv.kernels.cpu.attention.job import Job
from localkv.kernels.cpu.attention.kernels import worker_of
from localkv.kernels.cpu.attention.packed_attention import PackedAttention
from localkv.kernels.cpu.attention.plan import Launch
from localkv.kernels.cpu.runtime.chain import Chain

TEMPLATE = "attention/rows"
"""The worker for generated tokens."""
_OWN = [
    Job._fields.index(name)
    for name in ("q", "out", "lse", "k_planes", "v_planes", "scratch", "partial", "done")
]
"""Items of a job in which layers differ."""


@dataclass
class _Alike:
    """Layers whose jobs differ in addresses only.

    Attributes:
        shape: of queries.
        segment, pool: of the first layer, and where its part of a batch is.
        jobs: int64 [layers at most, items of a job].
        own: the same of the items in `_OWN`, of which the last three depend on memory that may
            move.
        steps: chains and numbers of their steps.
        threads: that these run on.
        done: int64 [layers, items], cleared for each token.
    """

    shape: tuple[int, ...]
    params: AttentionParams
    segment: Segment
    pool: int
    jobs: NDArray[np.int64]
    own: NDArray[np.int64]
    steps: list[tuple[Chain, int]] = field(default_factory=list)
    threads: int = 0
    done: NDArray[np.int64] = field(default_factory=lambda: np.zeros((0, 0), np.int64))

    def fill(self, launch: Launch, scratch: int) -> None:
        """Write the jobs of a token."""
        n = len(self.steps)
        if self.done.shape != (n, launch.done_items):
            self.done = np.zeros((n, launch.done_items), np.int64)
            first = int(self.done.ctypes.data)
            self.own[:n, -1] = first + 8 * launch.done_items * np.arange(n)
        self.done.fill(0)
        self.own[:n, -3] = scratch
        self.own[:n, -2] = scratch + 4 * launch.scratch_floats
        self.jobs[:n] = np.frombuffer(launch.job, np.int64)
        self.jobs[:n, _OWN] = self.own[:n]
        if self.threads != launch.threads:
            self.threads = launch.threads
            for chain, step in self.steps:
                chain.use_threads(step, launch.threads)


class AttentionSteps:
    """Those of a token in some layers.

    Args:
        attention: plans the work, and has the memory for it.
        n_layers: at most.
    """

    def __init__(self, attention: PackedAttention, n_layers: int) -> None:
        self.attention = attention
        self.n_layers = n_layers
        self._groups = dict[tuple[object, ...], _Alike]()

    def add(
        self,
        chain: Chain,
        q: Floats,
        out: Floats,
        lse: Floats,
        cache: LayerCache,
        params: AttentionParams,
    ) -> None:
        """A layer's attention: q, out [1, n_heads, head_dim] and lse [1, n_heads] stay in place."""
        (segment,) = cache.segments
        if q.dtype != np.float32 or out.shape != q.shape or lse.shape != q.shape[:2]:
            raise BoundsError(f"queries {list(q.shape)}, sums {list(out.shape)}")
        n_kv_heads = segment.k[0].shape[1]
        types = segment.format_k.name, segment.format_v.name
        key = q.shape, n_kv_heads, len(segment.k[0]), params, cache.pool, types
        if key not in self._groups:
            n_items = len(Job._fields)
            jobs, own = (np.zeros((self.n_layers, n), np.int64) for n in (n_items, len(_OWN)))
            self._groups[key] = _Alike(q.shape, params, segment, cache.pool, jobs, own)
        group = self._groups[key]
        index = len(group.steps)
        tables = self.attention.segment_tables(segment, q.shape[-1])
        planes = tables.k_planes, tables.v_planes
        group.own[index, :5] = [address(x) for x in (q, out, lse)] + [t.address for t in planes]
        chain.kept += [q, out, lse, *(table.items for table in planes)]
        step = chain.add_kept(worker_of(TEMPLATE), group.jobs[index], 1)
        group.steps.append((chain, step))

    def prepare(self, batch: Batch) -> bool:
        """Write the jobs of a token; False if it takes other calls than one of each layer's."""
        found = list[tuple[_Alike, Launch]]()
        for group in self._groups.values():
            rows = batch.segments[group.pool]
            plan, _, launches = self.attention.prepared(
                group.shape, group.segment, rows, batch, group.params
            )
            if not plan.complete or len(launches) != 1 or launches[0].template != TEMPLATE:
                return False
            found.append((group, launches[0]))
        most = max((one.scratch_floats + one.partial_floats for _, one in found), default=0)
        scratch = self.attention.scratch.take(most)
        for group, launch in found:
            group.fill(launch, scratch)
        return True
