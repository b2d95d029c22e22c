"""The points of a grid that are nearest to places between them, for encoders of I-quants.

A place is a number whose digits are codes (`Grid.numbers`). Where it is no point of the grid, an
encoder tries the points at the least distances, 1 to 3 of them, nearest first (`iq2xs_init_impl`
and `iq3xs_init_impl` in ggml-quants.c). Their codes are stored so that 16 points are tried at once.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localkv.quant_formats.i_quants import IQ1, IQ2_S, IQ2_XS, IQ2_XXS, IQ3_S, IQ3_XXS, Grid

LANES = 16
HEADER = 4
"""Words before the places: where the numbers of pieces, their points, their codes, and the codes of
all points begin, in bytes."""


def table(grid: Grid, n_distances: int) -> NDArray[np.int32]:
    """What encoders look up: int32 [n].

    After the header, for each place a word: its point, or the negative of its first piece of 16
    neighbours less 1. Then, for each place, the number of pieces; for each piece, 16 points; for
    each piece, as bytes [values of a point, 16], twice the codes plus 1; the points' codes as
    bytes.
    """
    n_levels, n = len(grid.levels), grid.n_values
    points = grid.codes.astype(np.float32)
    places = np.arange(n_levels**n)
    codes = (places[:, None] // n_levels ** np.arange(n) % n_levels).astype(np.float32)
    apart = (codes**2).sum(1)[:, None] + (points**2).sum(1) - 2 * codes @ points.T
    distances = np.rint(apart).astype(np.int32)
    first = np.full(len(places), -1, np.int32)
    first[grid.numbers] = np.arange(len(points))
    n_pieces = np.zeros(len(places), np.int32)
    pieces = list[NDArray[np.int64]]()
    for place in np.flatnonzero(first < 0):
        mine = distances[place]
        bound = np.unique(mine)[:n_distances][-1]
        near = np.flatnonzero(mine <= bound)
        near = near[np.argsort(mine[near], kind="stable")]
        missing = -len(near) % LANES
        near = np.concatenate([near, np.repeat(near[:1], missing)])
        first[place] = -len(pieces) - 1
        n_pieces[place] = len(near) // LANES
        pieces += list(near.reshape(-1, LANES))
    neighbours = np.array(pieces, np.int32)
    near_codes = (2 * grid.codes[neighbours] + 1).transpose(0, 2, 1).astype(np.uint8)
    parts: list[NDArray[Any]] = [
        first,
        n_pieces,
        neighbours,
        near_codes,
        np.ascontiguousarray(grid.codes),
    ]
    begins = np.cumsum([4 * HEADER, *(part.nbytes for part in parts)])
    header = begins[1:5].astype(np.int32)
    data = b"".join(part.tobytes() for part in (header, *parts))
    return np.frombuffer(data.ljust(-(-len(data) // 4) * 4, b"\0"), np.int32).copy()


def _of(grid: Grid, n_distances: int) -> SimpleNamespace:
    return SimpleNamespace(table=partial(table, grid, n_distances))


iq3_s, iq3_xxs = _of(IQ3_S, 3), _of(IQ3_XXS, 2)
iq2_s, iq2_xs, iq2_xxs = _of(IQ2_S, 1), _of(IQ2_XS, 2), _of(IQ2_XXS, 2)
iq1_m = iq1_s = _of(IQ1, 3)
