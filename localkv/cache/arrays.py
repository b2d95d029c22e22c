"""What the cache and a backend's kernels share: arrays, a layer's planes and a batch's rows.

`Arrays` is what the cache and the engine ask of a backend, so that they name no array library. A
`LayerCache` has a layer's planes of packed rows, segment by segment; a `Batch` says which tokens a
forward pass evaluates, and where their rows are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

from localkv.cache.layout import Tail
from localkv.quant_formats.base import QuantFormat

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


Array: TypeAlias = Any
"""An array of the backend's: NumPy's on a CPU, a torch tensor elsewhere."""


Step: TypeAlias = Callable[[], Array]
"""Runs on buffers that stay where they are; its result is valid until the next step."""


Draw: TypeAlias = Callable[[Array, Array], Array]
"""(logits float32 [1, n_vocab], int64 [2]: seed and number of the draw) -> token ids int64 [1], or
NO_TOKEN; on the device, without asking the host. Of two that are equal one may serve for both."""

NO_TOKEN = -1
"""Drawn where logits are not numbers."""


class Readback(Protocol):
    """A number on its way to the host."""

    def value(self) -> int:
        """Wait for it."""
        ...


class Recorder(Protocol):
    """Records steps. Steps of one recorder share memory, so only one of them runs at a time."""

    def record(self, step: Step, state: Sequence[Array]) -> Step:
        """What repeats `step`; it may be `step` itself.

        Args:
            state: buffers that `step` changes; they are as before when this returns.
        """
        ...


class Arrays(Protocol):
    """Makes arrays where a backend's kernels read them."""

    def bytes(self, shape: tuple[int, ...]) -> Array:
        """uint8, of any contents."""
        ...

    def strided(self, array: Array, first: int, shape: tuple[int, ...], page: int) -> Array:
        """A view of bytes as pages: uint8 [pages, ...] of this shape. The first page begins at byte
        `first`, and each next one `page` bytes later. Pages may overlap."""
        ...

    def zeros(self, n_rows: int, n: int) -> Array:
        """float32 [n_rows, n]; on a CPU its memory begins at a cache line."""
        ...

    def floats(self, values: Sequence[float]) -> Array:
        """float32 [n]."""
        ...

    def int64(self, values: Sequence[int] | Sequence[Sequence[int]]) -> Array:
        """[n], or [rows, n]."""
        ...

    def int32(self, values: Sequence[int]) -> Array:
        """[n]."""
        ...

    def from_numpy(self, array: NDArray[Any]) -> Array:
        """An array with equal values and type, where the backend's kernels read it."""
        ...

    def to_numpy(self, array: Array) -> NDArray[Any]:
        """The values, on the host."""
        ...

    def arrived(self, array: Array, source: Arrays) -> Array:
        """The values of an array that another backend made with `source`, where this one's kernels
        read it; it may be the same memory."""
        ...

    def rows_of_pages(
        self, fmt: QuantFormat, side: str, plane: int, pages: Array
    ) -> NDArray[np.uint8]:
        """Pages of a plane of K ("k") or of V ("v") on the host, with rows as the format's
        reference has them: [n_pages, n_kv_heads, PAGE_TOKENS, blocks, plane bytes].
        """
        ...

    def pages_of_rows(
        self, fmt: QuantFormat, side: str, plane: int, rows: NDArray[np.uint8]
    ) -> Array:
        """The inverse of `rows_of_pages`."""
        ...

    def repack_page(self, source: Segment, target: Segment, page: int) -> None:
        """Pack a page of a segment as the page of that number of another one, whose bytes may be
        the same. Of rows that were never stored nothing is known."""
        ...

    def memory_piece(self, n_columns: int) -> int:
        """The columns of a recurrent memory that lie together, each row of them after the other; a
        divisor of `n_columns`, or all of them."""
        ...

    def floating(self, array: Array) -> Array:
        """The values in the type of activations."""
        ...

    def host_floats(self, n_rows: int, n: int) -> Array:
        """float32 [n_rows, n] that the caller fills, on the host."""
        ...

    def write(self, array: Array, values: Sequence[int]) -> None:
        """Put integers into the first items of a vector; the host does not wait."""
        ...

    def place_row(self, batch: SegmentBatch, position: Array) -> None:
        """Set lengths and slots so that each sequence's new row is at `position` (int64 [n]).

        Nothing asks the host, so that it can be recorded.
        """
        ...

    def place_group(self, batch: SegmentBatch, tail: SegmentBatch, position: Array) -> None:
        """Set the group of each sequence to the one that the token at `position` (int64 [n])
        completes, or to none. Set its length to the number of rows that are then in groups.

        Nothing asks the host, so that it can be recorded.
        """
        ...

    def recorder(self) -> Recorder:
        """What repeats steps with one launch, where launches can be recorded."""
        ...

    def read_back(self, number: Array) -> Readback:
        """Start to bring int64 [1] to the host."""
        ...

    def inference(self) -> AbstractContextManager[Any]:
        """A context for operations: nothing is kept for gradients, and NaN is no complaint."""
        ...

    def use_threads(self, n: int) -> None:
        """Let operations that this thread calls run on `n` threads."""
        ...


Wanted: TypeAlias = Literal["none", "last", "all"]
"""The new tokens of a sequence whose logits are wanted.

An inner part of a prompt wants "none" of them. A prompt's end and a generated token want the "last"
one. Where drafted tokens are verified, "all" are wanted.
"""


@dataclass(frozen=True)
class SegmentBatch:
    """Where the tokens of a batch and their history are, in one segment.

    Attributes:
        page_table: int64 [n_sequences, most pages]; row i lists the pages of sequence i, in order
            of position. Entries are 0 after its last page, and for pages that were given back:
            no token of the batch sees their rows.
        lengths: rows of each sequence that are valid once the batch's own rows are stored.
        length_table: the same, int32 [n_sequences], where the pages are.
        first_position: position of row 0 of the segment.
        first_positions: the same of each sequence, in a segment that is a rung of a ladder, or
            empty. Of rows in full pages it is a position before the batch, not their own.
        first_table: the same, int64 [n_sequences], where the pages are, or None.
        is_empty: no sequence has a row here, and attention leaves the segment out.
        tokens: int64 [n], the batch's tokens whose rows belong to this segment.
        slots: int64 [n], the row of each of them: page * PAGE_TOKENS + offset.
        tail: where tails begin, if a token reads rows of this segment only up to there, or, in the
            segment of the tails themselves (`is_tail`), only from there on.
        exact_from: of each sequence, the position before which no tail begins (see `Sequence`).
        exact_table: the same, int64 [n_sequences], where the pages are.
        groups: int64 [n, 2], the groups of rows that this batch completes and that are packed once
            all of its rows are stored. The first number is the slot of a group's first row in this
            segment. The second is its slot in the segment of the tails, from where the rows are
            read. A negative slot is no group (`Arrays.place_row`). None where rows are packed one
            by one.
    """

    page_table: Array
    lengths: tuple[int, ...]
    length_table: Array
    first_position: int
    tokens: Array
    slots: Array
    tail: Tail | None = None
    is_tail: bool = False
    exact_from: tuple[int, ...] = ()
    exact_table: Array | None = None
    groups: Array | None = None
    first_positions: tuple[int, ...] = ()
    first_table: Array | None = None
    is_empty: bool = False

    def first_of(self, sequence: int) -> int:
        """The position of row 0 of a sequence."""
        if self.first_positions:
            return self.first_positions[sequence]
        return self.first_position


@dataclass(frozen=True)
class Batch:
    """The tokens of one forward pass; one sequence is a batch of one.

    Attributes:
        token_ids: int64 [tokens], the sequences one after the other.
        positions: int64 [tokens].
        starts: n_sequences + 1 offsets into `token_ids`.
        start_table: the same, int32 [n_sequences + 1], where the pages are.
        segments: the same tokens as each segment of each group of the cache has them, the groups
            one after the other (`LayerCache.rows_of`).
        logit_rows: int64 [rows], the tokens whose logits are wanted, if any.
        generated: of each sequence, whether its new tokens were generated, not read in a prompt.
            A backend may have kernels for each kind that round differently, but it never chooses by
            the number of tokens: so a prompt gives the same bits in any chunks.
        slots: int64 [n_sequences], the places of the sequences' states in recurrent layers.
        after: int64 [tokens], the places of the states after each token: the sequence's, but for
            guesses that may be taken back (`RecurrentStates.after`). Backends that record have no
            others.
        scales: of adapters, float32 [tokens, adapters] on the host; None if all are 0.
    """

    token_ids: Array
    positions: Array
    starts: tuple[int, ...]
    start_table: Array
    segments: tuple[SegmentBatch, ...]
    logit_rows: Array
    generated: tuple[bool, ...]
    slots: Array
    after: Array
    scales: NDArray[np.float32] | None = None


def wanted_rows(starts: Sequence[int], wanted: Sequence[Wanted]) -> Iterator[int]:
    """The tokens whose logits are wanted, of sequences whose tokens begin at `starts`."""
    for first, end, which in zip(starts[:-1], starts[1:], wanted, strict=True):
        yield from range({"none": end, "last": end - 1, "all": first}[which], end)


@dataclass(frozen=True)
class Segment:
    """One layer's storage of one segment.

    Attributes:
        format_k, format_v: how a row of `head_dim` values is packed.
        rotation_k, rotation_v: channels that are rotated together before a row is packed, or 0.
        k, v: one tensor per plane, uint8 [n_pages, n_kv_heads, PAGE_TOKENS, blocks, plane bytes].
            Rows that were never stored hold arbitrary bytes. A field of a whole row has 1 block.
        scale_k, scale_v: float32 [n_kv_heads], by which rows of each head were divided before they
            were packed; None for types that are not scaled by head.
        is_whole: rows come with whole pages (`Arrays.repack_page`), and none is stored by itself.
        codebook_k, codebook_v: float32 [20], the numbers that codes select from
            (`shared/codebooks.table_of`); None for types without one.
    """

    format_k: QuantFormat
    format_v: QuantFormat
    rotation_k: int
    rotation_v: int
    k: tuple[Array, ...]
    v: tuple[Array, ...]
    scale_k: Array | None = None
    scale_v: Array | None = None
    codebook_k: Array | None = None
    codebook_v: Array | None = None
    is_whole: bool = False

    @property
    def operands_k(self) -> tuple[Array, ...]:
        """What a kernel reads of K: the planes, and the codebook of types with one."""
        return self.k if self.codebook_k is None else (*self.k, self.codebook_k)

    @property
    def operands_v(self) -> tuple[Array, ...]:
        """What a kernel reads of V: the planes, and the codebook of types with one."""
        return self.v if self.codebook_v is None else (*self.v, self.codebook_v)

    @property
    def value_dim(self) -> int:
        """Channels of a row of V."""
        return int(self.v[0].shape[3]) * self.format_v.block_size


@dataclass(frozen=True)
class StateRows:
    """The states of one layer.

    Attributes:
        rows: float32 [n_slots, n_rows, n_channels].
        memory: float32 [n_slots, heads, rows, columns], or None. A backend may keep the values of a
            head in an order of its own.
        data: float32 [n_slots, n], the states of all layers of one place; `rows` and `memory` are
            views of it.
        rows_at, memory_at: where in a slot of `data` they begin.
        n_slots: places of sequences; the others are for states between guesses.
        first: where `data` begins in a checkpoint, which has the states of all places.
    """

    rows: Array
    memory: Array | None
    data: Array
    rows_at: int
    memory_at: int
    n_slots: int
    first: int = 0


@dataclass(frozen=True)
class LayerCache:
    """One layer's segments, in order of position.

    Attributes:
        part: index of the first one's part in `Batch.segments`.
        state: of all sequences, in a recurrent layer.
    """

    segments: tuple[Segment, ...]
    part: int = 0
    state: StateRows | None = None

    @property
    def types(self) -> tuple[tuple[str, str], ...]:
        """The types of K and of V in each segment."""
        return tuple((part.format_k.name, part.format_v.name) for part in self.segments)

    def rows_of(self, batch: Batch) -> tuple[SegmentBatch, ...]:
        """Where a batch's tokens are in this layer's segments."""
        return batch.segments[self.part : self.part + len(self.segments)]


def row_fields(fmt: QuantFormat, head_dim: int) -> list[tuple[int, int]]:
    """Blocks of a row and bytes of a block in each plane of a type; of a row's field 1 block."""
    fmt.row_bytes(head_dim)  # a row must be a whole number of blocks
    n_blocks = head_dim // fmt.block_size
    fields = [(n_blocks, plane.n_bytes) for plane in fmt.planes]
    return fields + [(1, plane.n_bytes) for plane in fmt.row_planes]
