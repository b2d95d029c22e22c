"""Checks of kernels' arguments before they run: kernels follow addresses and check nothing.

Each kernel says in its own file which shapes it takes. Its launcher checks them in one place, with
the functions here, where it costs nothing. That is as a plan, a table or a chain is made, which
serve many calls. With each call only the sizes are checked. On a GPU only facts that the host knows
are checked, as it would have to wait for the rest.
"""

from __future__ import annotations

from localkv.cache.arrays import Array, Batch, Segment, SegmentBatch, row_fields
from localkv.cache.layout import PAGE_TOKENS
from localkv.kernels.namespace import dtype_name, is_contiguous

FEW_IDS = 64
"""Up to this many, a list is faster than a reduction."""


class BoundsError(ValueError):
    """A kernel was about to touch memory that isn't its own: a bug, found before it did harm."""


def check_array(name: str, x: Array, dtype: str, *shape: int) -> None:
    """A contiguous array of this type and shape."""
    if dtype_name(x) != dtype or x.shape != shape or not is_contiguous(x):
        layout = "" if is_contiguous(x) else ", not contiguous"
        found = f"{dtype_name(x)} {list(x.shape)}{layout}"
        raise BoundsError(f"{name}: {found} instead of {dtype} {list(shape)}")


def check_ids(name: str, ids: Array, end: int) -> None:
    """A contiguous int64 array on the host, of numbers from 0 to `end` - 1."""
    check_array(name, ids, "int64", *ids.shape)
    values = ids.reshape(-1)
    if len(values) <= FEW_IDS:
        numbers = values.tolist()
        least, most = min(numbers, default=0), max(numbers, default=0)
    else:
        least, most = int(values.min()), int(values.max())
    if (least < 0 or most >= end) and len(values):
        raise BoundsError(f"{name}: {least} to {most}, of {end}")


def check_segment(
    segment: Segment, key_dim: int, value_dim: int | None = None, *, pages_apart: bool = False
) -> None:
    """K and V have the planes of their types, all of as many pages and KV heads.

    Args:
        value_dim: channels of V, if K has another number.
        pages_apart: the kernel takes planes whose pages are not one after the other.
    """
    pages_and_heads = segment.k[0].shape[:2]
    for side, fmt, planes, dim in (
        ("K", segment.format_k, segment.k, key_dim),
        ("V", segment.format_v, segment.v, key_dim if value_dim is None else value_dim),
    ):
        fields = row_fields(fmt, dim)
        if len(fields) != len(planes):
            raise BoundsError(f"{side}: {len(planes)} planes of {fmt.name}")
        for plane, field in zip(planes, fields, strict=True):
            shape = (*pages_and_heads, PAGE_TOKENS, *field)
            name = f"a plane of {side} in {fmt.name}"
            if pages_apart and plane.shape == shape:
                check_array(name, plane[:1], "uint8", min(1, shape[0]), *shape[1:])
            else:
                check_array(name, plane, "uint8", *shape)


def check_tables(rows: SegmentBatch, batch: Batch) -> None:
    """The tables of a batch are of its sequences and tokens."""
    starts, n_tokens = batch.starts, batch.starts[-1]
    n_sequences, width = len(starts) - 1, rows.page_table.shape[-1]
    if starts[0] != 0 or list(starts) != sorted(starts):
        raise BoundsError(f"sequences start at {starts}")
    if len(batch.generated) != n_sequences:
        raise BoundsError(f"{len(batch.generated)} kinds of {n_sequences} sequences")
    check_array("positions", batch.positions, "int64", n_tokens)
    check_array("the page table", rows.page_table, "int64", n_sequences, width)
    if len(rows.lengths) != n_sequences:
        raise BoundsError(f"{len(rows.lengths)} lengths of {n_sequences} sequences")
    for length in rows.lengths:
        if not 0 <= length <= width * PAGE_TOKENS:
            raise BoundsError(f"{length} rows in {width} pages")


def check_slots(rows: SegmentBatch, n_tokens: int, n_pages: int) -> None:
    """The rows that are stored belong to tokens, in pages that there are; on a CPU."""
    check_array("tokens", rows.tokens, "int64", len(rows.slots))
    check_ids("tokens", rows.tokens, n_tokens)
    check_ids("slots", rows.slots, n_pages * PAGE_TOKENS)
