"""Who has which units of an arena: runs of different lengths, moved together where needed."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping
from typing import NamedTuple


class Move(NamedTuple):
    """A run that has to go from one place to another, further to the front; they may overlap."""

    owner: int
    n: int
    first: int
    to: int


class Runs:
    """Runs of units, each of one owner.

    Args:
        n_units: that there are.

    Attributes:
        n_free: units that nobody has.
    """

    def __init__(self, n_units: int) -> None:
        self.n_units = self.n_free = n_units
        self._sizes = dict[int, int]()
        self._firsts = dict[int, int]()
        self._order = list[tuple[int, int]]()  # (first unit, owner)

    def first(self, owner: int) -> int:
        """The first unit of an owner's run."""
        return self._firsts[owner]

    @property
    def owners(self) -> list[int]:
        """All of them, in the order of their runs."""
        return [owner for _, owner in self._order]

    def _gaps(self) -> list[tuple[int, int]]:
        """(first, units) of the gap before each run, and behind the last."""
        found, at = list[tuple[int, int]](), 0
        for first, owner in self._order:
            found.append((at, first - at))
            at = first + self._sizes[owner]
        return [*found, (at, self.n_units - at)]

    def take(self, owner: int, n: int) -> bool:
        """Give an owner the smallest gap of `n` units; False if there is none so long."""
        fitting = [(size, first) for first, size in self._gaps() if size >= n]
        if not fitting:
            return False
        _, first = min(fitting)
        self._sizes[owner], self._firsts[owner] = n, first
        insort(self._order, (first, owner))
        self.n_free -= n
        return True

    def shrink(self, owner: int, n: int) -> None:
        """Leave an owner the first `n` of its units."""
        self.n_free += self._sizes[owner] - n
        self._sizes[owner] = n

    def give_back(self, owner: int) -> None:
        """Take an owner's run away."""
        first = self._firsts.pop(owner)
        self.n_free += self._sizes.pop(owner)
        del self._order[bisect_left(self._order, (first, owner))]

    def keep(self, sizes: Mapping[int, int]) -> None:
        """Leave those of these owners that have a run so many of its first units, and all others
        none, whatever an exception between two instructions has left."""
        self._sizes = {owner: n for owner, n in sizes.items() if owner in self._firsts}
        self._firsts = {owner: self._firsts[owner] for owner in self._sizes}
        self._order = sorted((first, owner) for owner, first in self._firsts.items())
        self.n_free = self.n_units - sum(self._sizes.values())

    def gather(self, n: int) -> list[Move]:
        """Bring `n` free units together, of `n_free` at least: the moves to be made, in order, the
        fewest units that do."""
        gaps = self._gaps()
        sizes = [self._sizes[owner] for _, owner in self._order]
        best, start, free, moved = None, 0, 0, 0
        for end, (_, size) in enumerate(gaps):
            free += size
            moved += sizes[end - 1] if end > start else 0
            while free - gaps[start][1] >= n:
                free -= gaps[start][1]
                moved -= sizes[start]
                start += 1
            if free >= n and (best is None or moved < best[0]):
                best = moved, start, end
        assert best is not None
        _, start, end = best
        at, moves = gaps[start][0], list[Move]()
        for i in range(start, end):
            first, owner = self._order[i]
            moves.append(Move(owner, sizes[i], first, at))
            self._order[i], self._firsts[owner] = (at, owner), at
            at += sizes[i]
        return moves
