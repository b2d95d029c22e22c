"""Attention of one generated token, or of a few, in many layers, as steps of a chain.

A layer's job lies in an array that stays where it is. Before the chain runs, it is filled with what
the tokens' plan says, which is the same for all layers that see as far back. A plan is moved on to
the tokens that follow:

From batch to batch a sequence's context grows by some rows, and mostly its pages stay the same.
Then so do the parts into which it is cut and the jobs of its workers; only the rows that tokens see
differ. To make a plan again takes longer than to write these: each batch reads all weights, so
that nothing of Python is left in the caches.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Sequence
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from localkv.arch.spec import AttentionParams
from localkv.cache.arrays import Batch, LayerCache, Segment, SegmentBatch
from localkv.cache.layout import PAGE_TOKENS, pages_for
from localkv.kernels.bounds import BoundsError
from localkv.kernels.cpu.arrays import Floats, address
from localkv.kernels.cpu.attention.jobs import Job, LatentJob
from localkv.kernels.cpu.attention.jobs import Sequence as SequenceJob
from localkv.kernels.cpu.attention.kernels import worker_of
from localkv.kernels.cpu.attention.latent_attention import LatentAttention, latents_worker
from localkv.kernels.cpu.attention.packed_attention import PackedAttention
from localkv.kernels.cpu.attention.plan import Launch, Plan, Table
from localkv.kernels.cpu.runtime.chain import Chain

TEMPLATE = "attention/decode"
"""The worker for generated tokens."""
NOTHING = Launch("", array("q"), 1, 0)
"""In place of a call, for a token that sees no row."""
_TOKEN, _LENGTH = (SequenceJob._fields.index(name) for name in ("token", "length"))


class TokenAttention:
    """The call for a few generated tokens, of one sequence or of several, in layers that see as
    far back.

    Args:
        attention: plans the work.
        shape: of the queries, [tokens, n_heads, head_dim].
        segment, part: one of the layers', and its number among a batch's.
    """

    def __init__(
        self,
        attention: PackedAttention,
        shape: tuple[int, ...],
        segment: Segment,
        part: int,
        params: AttentionParams,
    ) -> None:
        self.attention, self.shape, self.params = attention, shape, params
        self.segment, self.part = segment, part
        self.plan: Plan | None = None
        self.launch: Launch | None = None
        self._is_own = False
        self._sees_all = not params.window and not params.chunk
        self._pages = b""
        self._starts: tuple[int, ...] = (0,)
        self._grows = list[bool]()
        self._owners = list[int]()

    def __call__(self, batch: Batch) -> tuple[Launch | None, Plan | None]:
        """The one call of the batch, and its plan.

        The call is `NOTHING` if the batch sees no row, None if there are several, or others. The
        plan has to be kept until the call has ended, and may be the next tokens' afterwards.

        Raises:
            BoundsError: the batch is not of such a cache.
        """
        rows = batch.segments[self.part]
        stored = rows.tokens.tolist()
        self._grows = [first in stored for first in batch.starts[:-1]]
        if not self._moved_on(rows, batch):
            self._make(rows, batch)
        return self.launch, self.plan

    def _make(self, rows: SegmentBatch, batch: Batch) -> None:
        params, self.launch, self._is_own = self.params, None, False
        plan, _, launches = self.attention.prepared(self.shape, self.segment, rows, batch, params)
        self.plan = plan
        if not launches:
            self.launch = NOTHING
        elif plan.complete and len(launches) == 1 and launches[0].template == TEMPLATE:
            self.attention.give_away(plan, params)
            self.launch, self._is_own = launches[0], True
            self._pages, self._starts = rows.page_table.tobytes(), batch.starts
            tokens = plan.decodes[0].sequences.items[:, _TOKEN].tolist()
            self._owners = [bisect_right(batch.starts, token) - 1 for token in tokens]

    def move(self, batch: Batch, positions: Seq[int], more: Seq[int]) -> bool:
        """Whether the call now serves tokens at other positions than a batch's, whose rows go to
        the same pages. The batch was the last that this was called with.

        Args:
            more: how far each token comes after the one in its place.
        """
        rows = batch.segments[self.part]
        if self.launch is NOTHING:
            return not any(rows.lengths)
        lengths = [
            length + more[first] if grows else length
            for length, first, grows in zip(rows.lengths, batch.starts, self._grows, strict=False)
        ]
        return self._is_own and self._see(rows, positions, lengths)

    def growing(self, batch: Batch) -> list[int] | None:
        """Addresses of the items that are one more for the token after the one that the call is of,
        in the same page; None if the call differs in more."""
        if not self._is_own or not self._sees_all or batch.segments[self.part].tail is not None:
            return None
        assert self.plan is not None
        if not any(self._grows):
            return []
        width = self.plan.visible.items.shape[1]
        ends = [self.plan.visible.address + 8 * (width * i + 1) for i in range(self._starts[-1])]
        sequences = self.plan.decodes[0].sequences
        width = sequences.items.shape[1]
        rows = range(len(self._owners))
        return [*ends, *(sequences.address + 8 * (width * row + _LENGTH) for row in rows)]

    def _visible(
        self, rows: SegmentBatch, sequence: int, position: int, length: int
    ) -> tuple[int, int]:
        """What `visible_rows` gives for a token, without NumPy."""
        first, end = 0 if self._sees_all else int(self.params.first_visible(position)), position + 1
        if rows.tail is not None:
            begin = max(rows.tail.begin(position), rows.exact_from[sequence])
            if rows.is_tail:
                first = max(first, begin)
            else:
                end = min(end, begin)
        begin = rows.first_of(sequence)
        return min(max(0, first - begin), length), min(max(0, end - begin), length)

    def _moved_on(self, rows: SegmentBatch, batch: Batch) -> bool:
        """Make the plan these tokens', if they see the pages that those before saw."""
        plan = self.plan
        if (
            plan is None
            or not self._is_own
            or batch.generated != plan.generated
            or batch.starts != self._starts
            or rows.first_position != plan.batch.first_position
            or rows.first_positions != plan.batch.first_positions
            or rows.page_table.tobytes() != self._pages
        ):
            return False
        return self._see(rows, batch.positions.tolist(), rows.lengths)

    def _see(self, rows: SegmentBatch, positions: Seq[int], lengths: Seq[int]) -> bool:
        """Have the tokens at some positions see what they see of a segment with these numbers of
        rows, if the rows are in the pages that the tokens before saw."""
        assert self.plan is not None
        visible, seen = self.plan.visible.items, list[tuple[int, int]]()
        for i, length in enumerate(lengths):
            for token in range(self._starts[i], self._starts[i + 1]):
                first, end = self._visible(rows, i, positions[token], length)
                before, end_before = int(visible[token, 0]), int(visible[token, 1])
                if (
                    first >= end
                    or first // PAGE_TOKENS != before // PAGE_TOKENS
                    or pages_for(end) != pages_for(end_before)
                ):
                    return False
                seen.append((first, end))
        for token, (first, end) in enumerate(seen):
            visible[token, 0], visible[token, 1] = first, end
        sequences = self.plan.decodes[0].sequences.items
        for row, i in enumerate(self._owners):
            sequences[row, _LENGTH] = lengths[i]
        return True


_MOVING = "scratch", "partial", "done"
"""Items of a job whose memory may move."""


def _places(job: type[Job] | type[LatentJob], *names: str) -> list[int]:
    """Where items of a job are."""
    return [job._fields.index(name) for name in (*names, *_MOVING)]


_ROWS = _places(Job, "q", "out", "lse", "k_planes", "v_planes")
_LATENTS = _places(LatentJob, "q", "q_rotated", "out", "lse", "latent_planes", "rope_planes")
"""Items of a job in which layers differ."""

Prepare = Callable[[Batch], tuple[Launch | None, object]]
"""The one call of a batch in such layers, and what has to be kept until it has run.

The call is `NOTHING` if the batch sees no row there, None if there are several, or others. What has
to be kept is its plan, whose tables it reads.
"""

Move = Callable[[Batch, Sequence[int], Sequence[int]], bool]
"""Whether such a call, as it is now, also serves tokens at other positions, each so far after."""


@dataclass
class _Alike:
    """Layers whose jobs differ in addresses only.

    Attributes:
        prepare: for the first layer.
        worker: of all.
        places: items in which they differ.
        jobs: int64 [layers at most, items of a job].
        own: the same of the items in `places`.
        sums: where layers' sums and their log-sum-exp go, each place once.
        steps: chains and numbers of their steps.
        threads: that these run on.
        done: int64 [layers, items], cleared for each batch.
        filled: what the jobs were written from; None for jobs without work.
        move: what `prepare` does, for tokens after a batch's; None if it can't.
        growing: what is one more in the jobs of the token after; None where `move` is.
    """

    prepare: Prepare
    worker: int
    places: list[int]
    jobs: NDArray[np.int64]
    own: NDArray[np.int64]
    sums: list[tuple[Floats, Floats]] = field(default_factory=list)
    steps: list[tuple[Chain, int]] = field(default_factory=list)
    threads: int = 0
    done: NDArray[np.int64] = field(default_factory=lambda: np.zeros((0, 0), np.int64))
    filled: tuple[Launch, int] | None = None
    move: Move | None = None
    growing: Callable[[Batch], list[int] | None] | None = None

    def add(self, chain: Chain, arrays: Sequence[Floats], tables: Sequence[Table]) -> None:
        """A layer with these arrays and tables, in the order of its items."""
        index = len(self.steps)
        addresses = [*map(address, arrays), *(table.address for table in tables)]
        self.own[index, : len(addresses)] = addresses
        chain.kept += [*arrays, *(table.items for table in tables)]
        self.steps.append((chain, chain.add_kept(self.worker, self.jobs[index], 1)))

    def add_sums(self, out: Floats, lse: Floats) -> None:
        if all(lse is not other for _, other in self.sums):
            self.sums.append((out, lse))

    def clear(self) -> None:
        """Write jobs without work, and what attention yields where nothing is seen."""
        self.jobs[: len(self.steps)] = 0
        self.filled = None
        for out, lse in self.sums:
            out.fill(0.0)
            lse.fill(-np.inf)

    def fill(self, launch: Launch, scratch: int) -> None:
        """Write the jobs of a batch."""
        n = len(self.steps)
        if self.done.shape != (n, launch.done_items):
            self.done = np.zeros((n, launch.done_items), np.int64)
            first = int(self.done.ctypes.data)
            self.own[:n, -1] = first + 8 * launch.done_items * np.arange(n)
        self.done.fill(0)
        if self.filled is not None and self.filled[0] is launch and self.filled[1] == scratch:
            return
        self.filled = launch, scratch
        self.own[:n, -3] = scratch
        self.own[:n, -2] = scratch + 4 * launch.scratch_floats
        self.jobs[:n] = np.frombuffer(launch.job, np.int64)
        self.jobs[:n, self.places] = self.own[:n]
        if self.threads != launch.threads:
            self.threads = launch.threads
            for chain, step in self.steps:
                chain.use_threads(step, launch.threads)


class AttentionSteps:
    """The attention calls of tokens in some layers.

    Args:
        attention, latents: plan the work; the first has the memory for it.
        n_layers: at most.
    """

    def __init__(self, attention: PackedAttention, latents: LatentAttention, n_layers: int) -> None:
        self.attention, self.latents = attention, latents
        self.n_layers = n_layers
        self._groups = dict[tuple[object, ...], _Alike]()
        self._plans = list[object]()
        self._most = 0

    def _group(
        self, key: tuple[object, ...], prepare: Prepare, worker: int, places: list[int], n: int
    ) -> _Alike:
        """Layers of one key, whose jobs have `n` items."""
        if key not in self._groups:
            jobs, own = (np.zeros((self.n_layers, k), np.int64) for k in (n, len(places)))
            self._groups[key] = _Alike(prepare, worker, places, jobs, own)
        return self._groups[key]

    def add(
        self,
        chain: Chain,
        q: Floats,
        out: Floats,
        lse: Floats,
        cache: LayerCache,
        index: int,
        params: AttentionParams,
    ) -> None:
        """A layer's attention over one of its segments: q, out [tokens, n_heads, head_dim] and
        lse [tokens, n_heads] stay in place; all layers alike may share these."""
        segment, attention, shape = cache.segments[index], self.attention, q.shape
        if q.dtype != np.float32 or out.shape != shape or lse.shape != shape[:2]:
            raise BoundsError(f"queries {list(shape)}, sums {list(out.shape)}")

        prepare = TokenAttention(attention, shape, segment, cache.part + index, params)
        key = shape, params, *_kind(cache, index)
        n, worker = len(Job._fields), worker_of(TEMPLATE)
        tables = attention.segment_tables(segment, shape[-1])
        group = self._group(key, prepare, worker, _ROWS, n)
        if group.move is None:
            group.move, group.growing = prepare.move, prepare.growing
        group.add_sums(out, lse)
        group.add(chain, (q, out, lse), (tables.k_planes, tables.v_planes))

    def add_latents(
        self,
        chain: Chain,
        q: Floats,
        rotated: Floats,
        out: Floats,
        lse: Floats,
        cache: LayerCache,
        index: int,
        params: AttentionParams,
    ) -> None:
        """A layer's attention over latents of one of its segments: q, out [tokens, n_heads,
        latent_dim], rotated parts of queries [tokens, n_heads, rope_dim] and lse [tokens, n_heads]
        stay in place."""
        segment, latents = cache.segments[index], self.latents
        shape, rope_dim = q.shape, rotated.shape
        if (
            q.dtype != np.float32
            or rotated.dtype != np.float32
            or out.shape != shape
            or lse.shape != shape[:2]
            or rope_dim[:2] != shape[:2]
        ):
            raise BoundsError(f"queries {list(shape)}, sums {list(out.shape)}")

        def prepare(batch: Batch) -> tuple[Launch | None, object]:
            rows = batch.segments[cache.part + index]
            plan, _, launches = latents.prepared(shape, rope_dim[-1], segment, rows, batch, params)
            if not launches:
                return NOTHING, plan
            return launches[0] if plan.complete and len(launches) == 1 else None, plan

        key = shape, rope_dim, params, *_kind(cache, index)
        n, worker = len(LatentJob._fields), latents_worker(shape[1])
        tables = latents.segment_tables(segment, shape[-1], rope_dim[-1])
        group = self._group(key, prepare, worker, _LATENTS, n)
        planes = tables.latent_planes, tables.rope_planes
        group.add_sums(out, lse)
        group.add(chain, (q, rotated, out, lse), planes)

    def prepare(self, batch: Batch) -> bool:
        """Write the jobs of a batch; False if it takes other calls than one of each layer's."""
        found = list[tuple[_Alike, Launch]]()
        self._plans = list[object]()
        for group in self._groups.values():
            launch, plan = group.prepare(batch)
            if launch is None:
                return False
            self._plans.append(plan)
            found.append((group, launch))
        self._most = most = max(
            (one.scratch_floats + one.partial_floats for _, one in found), default=0
        )
        scratch = self.attention.scratch.take(most)
        for group, launch in found:
            if launch is NOTHING:
                group.clear()
            else:
                group.fill(launch, scratch)
        return True

    def growing(self, batch: Batch) -> tuple[list[int], list[tuple[int, int]]] | None:
        """What differs in the jobs of the token after the one of a batch that was prepared or moved
        last, in the same page.

        That is addresses of items that are one more, and memory that is 0 again, with its words.
        None if it is more than that.
        """
        items, cleared = list[int](), list[tuple[int, int]]()
        for group in self._groups.values():
            found = None if group.growing is None else group.growing(batch)
            if found is None:
                return None
            items += found
            if group.done.size:
                cleared.append((address(group.done), group.done.size))
        return items, cleared

    def move(self, batch: Batch, positions: Sequence[int], more: Sequence[int]) -> bool:
        """Prepare for tokens at other positions than the batch's, each so far after its own and in
        the same pages; the batch was prepared last."""
        for group in self._groups.values():
            if group.move is None or not group.move(batch, positions, more):
                return False
        scratch = self.attention.scratch.take(self._most)
        for group in self._groups.values():
            if group.filled is not None:
                group.fill(group.filled[0], scratch)
        return True


def _kind(cache: LayerCache, index: int) -> tuple[object, ...]:
    """What layers whose jobs are alike share in a segment of their caches."""
    segment = cache.segments[index]
    types = segment.format_k.name, segment.format_v.name
    return cache.part + index, segment.k[0].shape[:2], types
