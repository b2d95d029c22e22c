"""Into which tiles the decode kernels cut rows of queries, without Numba."""

from __future__ import annotations

from localkv.simd.cpu_features import HAS_AVX512

MAX_ROWS = 8 if HAS_AVX512 else 4
"""Rows that decode kernels hold in registers at once."""


def rows_per_tile(group: int) -> int:
    """Rows in each of equal tiles, as few as can be, that hold a token's `group` rows.

    Several new tokens run with the kernels of one where those for other sizes of tiles add up in
    another order (`tile_of`).
    """
    return -(-group // -(-group // MAX_ROWS))


def tile_of(n_rows: int, group: int, *, adds_alike: bool) -> int:
    """Rows of the tiles that `n_rows` whole tiles of some tokens are cut into.

    Args:
        adds_alike: kernels for tiles of all sizes add up in one order, so the largest will do.
    """
    return MAX_ROWS if adds_alike and n_rows % MAX_ROWS == 0 else rows_per_tile(group)


def whole_tiles(n_rows: int, group: int) -> int:
    """The rows of as many tiles as `n_rows` take."""
    tile = rows_per_tile(group)
    return -(-n_rows // tile) * tile
