"""Reading the jobs of the CPU's attention workers, in compiled code."""

from __future__ import annotations

from numba import njit

from localkv.kernels.cpu.attention.job import (
    BLOCK_ITEMS,
    CHUNK_ITEMS,
    JOB_ITEMS,
    SEQUENCE_ITEMS,
    Block,
    Chunk,
    Job,
    Sequence,
)
from localkv.simd.kinds import Address, Addresses
from localkv.simd.memory import get_i64, get_i64s

CODEBOOK = 5
"""Where a table of planes has the codebook, the same for all pages."""


@njit
def read_job(address: Address) -> Job:
    return Job(*get_i64s(address, JOB_ITEMS))


@njit
def read_sequence(table: Address, index: int) -> Sequence:
    return Sequence(*get_i64s(table + index * SEQUENCE_ITEMS * 8, SEQUENCE_ITEMS))


@njit
def read_chunk(table: Address, index: int) -> Chunk:
    return Chunk(*get_i64s(table + index * CHUNK_ITEMS * 8, CHUNK_ITEMS))


@njit
def read_block(table: Address, index: int) -> Block:
    return Block(*get_i64s(table + index * BLOCK_ITEMS * 8, BLOCK_ITEMS))


@njit
def first_visible(job: Job, token: int) -> int:
    """The first row of the segment that a token sees."""
    return get_i64(job.visible, token * 2)


@njit
def end_visible(job: Job, token: int) -> int:
    """The row after the last one that a token sees."""
    return get_i64(job.visible, token * 2 + 1)


@njit
def region(planes: Address, plane: int, place: int) -> Address:
    """The address of a page and KV head (`place` counts those) in one plane."""
    return get_i64(planes, plane * 2) + place * get_i64(planes, plane * 2 + 1)


@njit
def regions(planes: Address, place: int) -> Addresses:
    """`region` in each of four planes, and the codebook."""
    return (
        region(planes, 0, place),
        region(planes, 1, place),
        region(planes, 2, place),
        region(planes, 3, place),
        region(planes, CODEBOOK, place),
    )
