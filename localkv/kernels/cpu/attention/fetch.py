"""Fetching what decode attention reads next, while it multiplies what it has.

While a page's logits are made, its V comes from memory, and while its V is weighed, the next page's
K. If one type has more bytes than its share of the time, what is left of them is fetched during the
other's: so the memory is as busy all the time. That is two runs of lines to fetch at once.
"""

from __future__ import annotations

from numba import njit

from localkv.simd.kinds import Address, Count
from localkv.simd.memory import prefetch

Ahead = tuple[Address, Address]
"""Where the next lines of two runs are."""
Lines = tuple[Count, Count]
"""How many lines of each to fetch at a time."""


@njit
def fetch_next(ahead: Ahead, lines: Lines) -> Ahead:
    """Ask for the next lines; where those after them are."""
    for line in range(lines[0]):
        prefetch(ahead[0], line * 64)
    for line in range(lines[1]):
        prefetch(ahead[1], line * 64)
    return ahead[0] + lines[0] * 64, ahead[1] + lines[1] * 64


@njit
def share_of(lines: Lines, n: int) -> Lines:
    """One of `n` parts, rounded down."""
    return lines[0] // n, lines[1] // n


@njit
def without(lines: Lines, others: Lines) -> Lines:
    return lines[0] - others[0], lines[1] - others[1]
