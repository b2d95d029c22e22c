"""The jobs of the workers of products, read in compiled code, and who takes what of them.

Some workers write jobs for others.
"""

from __future__ import annotations

from typing import Any

from numba import njit

from localkv.kernels.cpu.linear.jobs import MAX_TILE, MULTIPLY_ITEMS, MatrixJob, PlaneJob
from localkv.simd.kinds import Address, Count
from localkv.simd.memory import put_i64, reader

read_plane = reader(PlaneJob)
_read_matrix = reader(MatrixJob)


@njit
def read_matrix(address: Address, index: int) -> Any:
    """Matrix `index` of the multiplier's job at an address."""
    return _read_matrix(address + 8 * MULTIPLY_ITEMS, index)


@njit
def put_job(address: Address, items: Any) -> Address:
    """Write a named tuple's items; returns the address after them."""
    for i in range(len(items)):
        put_i64(address, i, items[i])
    return address + 8 * len(items)


@njit
def find_chunk(address: Address, job: Any, number: int) -> tuple[int, int, int]:
    """The index of a chunk's matrix, and the first and the end of its panels or rows.

    The index is -1 if all is done.
    """
    for i in range(job.n_matrices):
        n_items = read_matrix(address, i).n_items
        n_chunks = (n_items + job.chunk - 1) // job.chunk
        if number < n_chunks:
            return i, number * job.chunk, min(number * job.chunk + job.chunk, n_items)
        number -= n_chunks
    return -1, 0, 0


@njit
def tile_size(start: Count, n_tokens: Count) -> int:
    """Tokens of the tile of panels that starts at token `start`: large ones first, then 4, then
    all that are left, which read the panels once."""
    left = n_tokens - start
    if left >= MAX_TILE:
        return MAX_TILE
    return min(left, 4)


@njit
def tile_start(token: Count, n_tokens: Count) -> int:
    """First token of the tile of panels that holds `token`."""
    start = n_tokens // MAX_TILE * MAX_TILE
    if token < start:
        return token // MAX_TILE * MAX_TILE
    size = tile_size(start, n_tokens)
    while start + size <= token:
        start += size
        size = tile_size(start, n_tokens)
    return start


@njit
def find_piece(job: Any, piece: Count) -> tuple[int, int, int]:
    """The head of a piece, and the first and the end of its panels or rows; -1 if all is done."""
    head, part = piece // job.n_parts, piece % job.n_parts
    if head >= job.n_heads:
        return -1, 0, 0
    return head, part * job.n_items // job.n_parts, (part + 1) * job.n_items // job.n_parts
