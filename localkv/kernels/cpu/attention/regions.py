"""The jobs of the CPU's attention workers, read in compiled code, and where pages lie in planes."""

from __future__ import annotations

from numba import njit

from localkv.cache.layout import PAGE_TOKENS
from localkv.kernels.cpu.attention.jobs import (
    OF_HEAD,
    OF_PAGE,
    PLANE,
    Block,
    Chunk,
    Job,
    Sequence,
)
from localkv.kernels.cpu.attention.weigh_digits import CHUNK
from localkv.simd.kinds import Address, Addresses
from localkv.simd.memory import get_i64, reader

CODEBOOK = 5
"""Where a table of planes has the codebook, the same for all pages."""


read_sequence, read_chunk, read_block = reader(Sequence), reader(Chunk), reader(Block)


@njit
def first_visible(job: Job, token: int) -> int:
    """The first row of the segment that a token sees."""
    return get_i64(job.visible, token * 2)


@njit
def end_visible(job: Job, token: int) -> int:
    """The row after the last one that a token sees."""
    return get_i64(job.visible, token * 2 + 1)


@njit
def rows_seen(job: Job, sequence: Sequence, page: int) -> tuple[int, int]:
    """The rows of one of its pages that a sequence's new tokens see, from a multiple of CHUNK on.

    What a token sees begins and ends no earlier than what the one before sees.
    """
    row = page * PAGE_TOKENS
    first = first_visible(job, sequence.token) - row
    end = end_visible(job, sequence.token + sequence.n_new - 1)
    end = min(end, sequence.length) - row
    return max(0, first) // CHUNK * CHUNK, min(PAGE_TOKENS, end)


@njit
def region(planes: Address, plane: int, place: tuple[int, int], row: int) -> Address:
    """The address of a page and KV head in one plane, from a row on: a multiple of the tokens that
    lie together."""
    page, head = place
    n_bytes = get_i64(planes, plane * PLANE + OF_HEAD)
    first = get_i64(planes, plane * PLANE) + page * get_i64(planes, plane * PLANE + OF_PAGE)
    return first + head * n_bytes + n_bytes * row // PAGE_TOKENS


@njit
def regions(planes: Address, place: tuple[int, int], row: int) -> Addresses:
    """`region` in each of four planes, and the codebook."""
    return (
        region(planes, 0, place, row),
        region(planes, 1, place, row),
        region(planes, 2, place, row),
        region(planes, 3, place, row),
        region(planes, CODEBOOK, place, row),
    )
