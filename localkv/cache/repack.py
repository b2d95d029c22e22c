"""Packing a page of rows in other types, by the formats' references: the same on every backend."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from localkv.cache.arrays import Array, Arrays, Segment

Floats = NDArray[np.float32]


def hadamard(x: Floats, block: int) -> Floats:
    """x [..., n] times the normalised Hadamard matrix in blocks of the last axis, in the order of
    sums of the backends' kernels; applied twice, it gives x back.

    Args:
        block: a power of two that divides n; 0 leaves `x` as it is.
    """
    if not block:
        return x
    y = x.reshape(*x.shape[:-1], x.shape[-1] // block, block)
    for _ in range(block.bit_length() - 1):
        even, odd = y[..., 0::2], y[..., 1::2]
        y = np.concatenate((even + odd, even - odd), axis=-1)
    out: Floats = (y * np.float32(1 / math.sqrt(block))).reshape(x.shape)
    return out


def repack_page(
    arrays: Arrays, source: Segment, target: Segment, page: int, to: int | None = None
) -> None:
    """Pack page `page` of a segment as page `to` of another one; `to` is `page` if it is None. Both
    pages may have the same bytes. A row that nobody stored becomes a row of arbitrary bytes."""
    to = page if to is None else to
    found, copies = list[tuple[str, Floats]](), copied(arrays, source, target, page)
    for side in ("k", "v"):
        x = unpacked(arrays, source, side, page)
        before, after = (getattr(one, f"rotation_{side}") for one in (source, target))
        if before != after:
            with np.errstate(all="ignore"):
                x = hadamard(hadamard(x, before), after)
        found.append((side, x))
    for side, x in found:
        fmt = getattr(target, f"format_{side}")
        with np.errstate(all="ignore"):
            packed = fmt.codec.encode(np.ascontiguousarray(x))
        for j, (plane, rows) in enumerate(zip(getattr(target, side), packed, strict=True)):
            plane[to : to + 1] = arrays.pages_of_rows(fmt, side, j, rows)
    put_copies(target, copies, to)


Copies = dict[str, list[Array]]


def copied(arrays: Arrays, source: Segment, target: Segment, page: int) -> Copies:
    """The planes of a page of the sides, "k" and "v", whose types stay the same."""
    return {
        side: [
            arrays.from_numpy(arrays.to_numpy(plane[page : page + 1]).copy())
            for plane in getattr(source, side)
        ]
        for side in ("k", "v")
        if stays(source, target, side)
    }


def stays(source: Segment, target: Segment, side: str) -> bool:
    """Whether rows of a side are stored alike in two segments."""
    return all(
        getattr(source, f"{what}_{side}") == getattr(target, f"{what}_{side}")
        for what in ("format", "rotation")
    )


def put_copies(target: Segment, copies: Copies, page: int) -> None:
    """Give a page what was `copied`."""
    for side, found in copies.items():
        for plane, rows in zip(getattr(target, side), found, strict=True):
            plane[page : page + 1] = rows


def unpacked(arrays: Arrays, segment: Segment, side: str, page: int) -> Floats:
    """The rows of a page as they are stored, rotated: float32 [1, heads, tokens, channels]."""
    fmt, planes = getattr(segment, f"format_{side}"), getattr(segment, side)
    rows = [
        arrays.rows_of_pages(fmt, side, j, plane[page : page + 1]) for j, plane in enumerate(planes)
    ]
    with np.errstate(all="ignore"):
        return np.array(fmt.codec.decode(rows), np.float32)
