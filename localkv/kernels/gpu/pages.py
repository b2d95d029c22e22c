"""Pages of planes in memory, and where a row of a page is.

The pages of a plane follow one another, so that rows are numbered as if all were one list
(`shared/gpu`). In a cache whose pages change their types they lie in an arena of bytes, each with
all of its planes. Then pages begin PAGE_BYTES apart, a row has its number within its page, and
planes are moved to the page. PAGE_BYTES is 0 where pages follow one another.
"""

from __future__ import annotations

import triton
import triton.language as tl

from localkv.cache.arrays import Segment
from localkv.cache.layout import PAGE_TOKENS

PAGE = tl.constexpr(PAGE_TOKENS)


@triton.jit
def row_before(page, head, N_KV_HEADS: tl.constexpr, PAGE_BYTES: tl.constexpr):
    """The number of the first row of a page (int64) and KV head."""
    if PAGE_BYTES:
        return head.to(tl.int64) * PAGE
    else:
        return (page * N_KV_HEADS + head) * PAGE


@triton.jit
def in_page(planes, page, PAGE_BYTES: tl.constexpr):
    """Planes moved to a page, or to the pages of rows, int64 [rows, 1]."""
    if PAGE_BYTES:
        return [plane + page * PAGE_BYTES for plane in planes]
    else:
        return planes


def page_bytes(segment: Segment) -> int:
    """PAGE_BYTES of a segment's planes."""
    planes = (*segment.k, *segment.v)
    return 0 if all(plane.is_contiguous() for plane in planes) else int(planes[0].stride(0))
