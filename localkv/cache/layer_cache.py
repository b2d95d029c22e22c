"""One layer's part of the cache: planes of packed rows of K and V, segment by segment."""

from __future__ import annotations

from dataclasses import dataclass

from localkv.cache.arrays import Array
from localkv.cache.batch import Batch, SegmentBatch
from localkv.cache.recurrent_state import StateRows
from localkv.formats.base import QuantFormat


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
        """The same of V."""
        return self.v if self.codebook_v is None else (*self.v, self.codebook_v)

    @property
    def value_dim(self) -> int:
        """Channels of a row of V."""
        return int(self.v[0].shape[3]) * self.format_v.block_size


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
