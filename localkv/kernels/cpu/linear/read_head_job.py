"""Reading the job of products of each head's matrix, in compiled code, and who takes what of it."""

from __future__ import annotations

from typing import Any

from numba import njit

from localkv.simd.kinds import Count


@njit
def find_piece(job: Any, piece: Count) -> tuple[int, int, int]:
    """The head of a piece, and the first and the end of its panels or rows; -1 if all is done."""
    head, part = piece // job.n_parts, piece % job.n_parts
    if head >= job.n_heads:
        return -1, 0, 0
    return head, part * job.n_items // job.n_parts, (part + 1) * job.n_items // job.n_parts
