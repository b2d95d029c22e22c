"""The plan of generated tokens, moved on to those that follow.

From batch to batch a sequence's context grows by some rows, and mostly its pages stay the same.
Then so do the parts into which it is cut and the jobs of its workers; only the rows that tokens see
differ. To make a plan anew takes longer than to write these: each batch reads all weights, so
that nothing of Python is left in the caches.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Sequence as Seq

from localkv.arch.spec import AttentionParams
from localkv.cache.arrays import Batch, Segment, SegmentBatch
from localkv.cache.layout import PAGE_TOKENS, pages_for
from localkv.kernels.cpu.attention.job import Sequence
from localkv.kernels.cpu.attention.packed_attention import PackedAttention
from localkv.kernels.cpu.attention.plan import Launch, Plan

TEMPLATE = "attention/rows"
"""The worker for generated tokens."""
NOTHING = Launch("", array("q"), 1, 0)
"""In place of a call, for a token that sees no row."""
_TOKEN, _LENGTH = (Sequence._fields.index(name) for name in ("token", "length"))


class TokenAttention:
    """The call for a few generated tokens, of one sequence or of several, in layers that see as
    far back.

    Args:
        attention: plans the work.
        shape: of the queries, [tokens, n_heads, head_dim].
        segment, part: one of the layers', and its number among those of a batch.
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
        """The one call of the batch, `NOTHING` if it sees no row, None if there are several, or
        others; and its plan, which has to be kept until the call has ended, and may be the next
        tokens' afterwards.

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
        """Whether the call is now that of tokens at other positions than those of a batch, whose
        rows go to the same pages. The batch was the last that this was called with.

        Args:
            more: how far each token is behind the one in its place.
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
        """Addresses of the items that are one more for a token behind the one that the call is of,
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
        """As `visible_rows`, of a token, without NumPy."""
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
        """Have the tokens at some positions see what they see of a segment with so many rows of
        each sequence, if these are in the pages of those that the ones before saw."""
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
