"""The plan of a generated token, moved on to the next one.

From token to token a sequence's context grows by a row, and mostly its pages stay the same. Then so
do the parts into which it is cut and the jobs of its workers; only the rows that the token sees
differ. To make a plan anew takes longer than to write these: each token reads all weights, so
that nothing of Python is left in the caches.
"""

from __future__ import annotations

from array import array

from localkv.arch.mixer_spec import AttentionParams
from localkv.cache.batch import Batch, SegmentBatch
from localkv.cache.layer_cache import Segment
from localkv.cache.layout import PAGE_TOKENS, pages_for
from localkv.kernels.cpu.attention.job import Sequence
from localkv.kernels.cpu.attention.packed_attention import PackedAttention
from localkv.kernels.cpu.attention.plan import Launch, Plan

TEMPLATE = "attention/rows"
"""The worker for generated tokens."""
NOTHING = Launch("", array("q"), 1, 0)
"""In place of a call, for a token that sees no row."""
_LENGTH = Sequence._fields.index("length")


class TokenAttention:
    """The call for a generated token of one sequence, or for several tokens, in layers that see as
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

    def __call__(self, batch: Batch) -> tuple[Launch | None, Plan | None]:
        """The one call of the batch, `NOTHING` if it sees no row, None if there are several, or
        others; and its plan, which has to be kept until the call has ended, and may be the next
        token's afterwards.

        Raises:
            BoundsError: the batch is not of such a cache.
        """
        rows = batch.segments[self.part]
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
            self._pages = rows.page_table.tobytes()

    def move(self, batch: Batch, more: int) -> bool:
        """Whether the call is that of a token so many positions behind the only one of a batch
        now, whose row goes to the same page. The batch was the last that this was called with.
        """
        rows = batch.segments[self.part]
        length = rows.lengths[0]
        if self.launch is NOTHING:
            return length == 0
        if len(rows.slots):
            length += more
            if self._sees_all and self._is_own:
                assert self.plan is not None
                self.plan.visible.items[0, 1] = length
                self.plan.decodes[0].sequences.items[0, _LENGTH] = length
                return True
        return self._is_own and self._see(rows, int(batch.positions[0]) + more, length)

    def _visible(self, rows: SegmentBatch, position: int, length: int) -> tuple[int, int]:
        """As `visible_rows`, of a token, without NumPy."""
        first, end = int(self.params.first_visible(position)), position + 1
        if rows.tail is not None:
            begin = max(rows.tail.begin(position), *rows.exact_from)
            if rows.is_tail:
                first = max(first, begin)
            else:
                end = min(end, begin)
        begin = rows.first_position
        return min(max(0, first - begin), length), min(max(0, end - begin), length)

    def _moved_on(self, rows: SegmentBatch, batch: Batch) -> bool:
        """Make the plan this token's, if it sees the pages that the one before saw."""
        plan = self.plan
        if (
            plan is None
            or not self._is_own
            or batch.generated != plan.generated
            or batch.starts != (0, 1)
            or rows.first_position != plan.batch.first_position
            or rows.page_table.tobytes() != self._pages
        ):
            return False
        (length,) = rows.lengths
        return self._see(rows, int(batch.positions[0]), length)

    def _see(self, rows: SegmentBatch, position: int, length: int) -> bool:
        """Have the token at a position see what it sees of a segment with `length` rows, if these
        are in the pages of those that the one before saw."""
        plan = self.plan
        assert plan is not None
        first, end = self._visible(rows, position, length)
        visible = plan.visible.items
        before, end_before = int(visible[0, 0]), int(visible[0, 1])
        if (
            first >= end
            or first // PAGE_TOKENS != before // PAGE_TOKENS
            or pages_for(end) != pages_for(end_before)
        ):
            return False
        visible[0, 0], visible[0, 1] = first, end
        plan.decodes[0].sequences.items[0, _LENGTH] = length
        return True
