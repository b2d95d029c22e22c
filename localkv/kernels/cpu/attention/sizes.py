"""How the CPU's attention cuts its work and lays out its scratch memory, without torch or Numba.

Each layout says where arrays start, for the kernels that use them, and ends where the memory ends
that is taken for them.
"""

from __future__ import annotations

from typing import NamedTuple

from localkv.cache.layout import PAGE_TOKENS

FEW_ROWS = 16
"""Rows (new tokens * query heads of a KV head) that the decode kernels take at once. The rows of
one token are taken at once even if they are more."""
TILE = 64
"""Tokens of K and V that the prefill kernels decode at a time; divides a page."""
BLOCK_ROWS = 96
"""Rows (new token, query head of a KV head) that share a decoded tile."""
PIECES_PER_THREAD = 16
LEAST_PARTS = 64
"""A generated token's context is cut into this many parts (of all KV heads), or into pages: enough
for many threads to be busy to the end, few enough to be cheap to merge."""
MOST_TILE_ROWS = 12
"""Rows whose products prefill kernels hold in registers at once, where there are most."""
LANES = 16
"""Floats of a vector and of a cache line."""
CHUNK = 4 * LANES
"""Tokens whose weights become digits at once."""
MOST_CHANNELS = 512
"""Channels of a head, at most, in types with scales by channel."""
CHANNEL_ROW = MOST_CHANNELS + 2 * LANES
"""Words of a row of factors of such types (`attention/readers.py`)."""


PAIR = 64
"""Values among which types with outliers keep one on its own (`quant_formats/nuq`)."""
OUTLIER_ROOM = (PAIR + LANES) * LANES
"""Floats of scratch memory that adding V's outliers takes."""


class BlockScratch(NamedTuple):
    """Scratch memory of a thread of the prefill kernels: where each array starts, in floats.

    Attributes:
        q, out: [BLOCK_ROWS, head_dim], the queries and the sums of weighted values.
        k: [head_dim, TILE], decoded and transposed.
        v: [TILE, head_dim].
        logits: [tile_rows, TILE], then what they become as weights.
        totals: [BLOCK_ROWS, LANES], sums of exponentials.
        scales: [2, LANES], of those who decode.
        references: [BLOCK_ROWS], see `attention/softmax.py`.
        end: where the next thread's may start, a cache line further.
    """

    q: int
    out: int
    k: int
    v: int
    logits: int
    totals: int
    scales: int
    references: int
    end: int


def block_scratch(tile_rows: int, head_dim: int) -> BlockScratch:
    """For tiles of `tile_rows` rows. Compiled kernels call this, too."""
    out = BLOCK_ROWS * head_dim
    k = out + BLOCK_ROWS * head_dim
    v = k + TILE * head_dim
    logits = v + TILE * head_dim
    totals = logits + tile_rows * TILE
    scales = totals + BLOCK_ROWS * LANES
    references = scales + 2 * LANES
    end = references + BLOCK_ROWS + LANES
    return BlockScratch(0, out, k, v, logits, totals, scales, references, end)


class RowScratch(NamedTuple):
    """Scratch memory of a thread of the decode kernels: where each array starts, in floats.

    Attributes:
        q: [n_rows, head_dim], as floats or as digit blocks.
        sums: [n_rows, head_dim / values of a block], of the blocks of q. Types with outliers have
            [n_rows, head_dim], q as floats. Types with scales by channel have [rows of a tile,
            CHANNEL_ROW].
        logits: [n_rows, PAGE_TOKENS], then what they become as weights.
        totals: [n_rows, LANES], sums of exponentials.
        scaled: [rows of a tile + 1, PAGE_TOKENS], weights times V's scales, or as digit rows and
            then the scales; afterwards [OUTLIER_ROOM]; or [rows of a tile, CHANNEL_ROW].
        end: where the next thread's may start, a cache line further, against false sharing.
    """

    q: int
    sums: int
    logits: int
    totals: int
    scaled: int
    end: int


def row_scratch(n_rows: int, tile_rows: int, head_dim: int) -> RowScratch:
    """For `n_rows` rows in tiles of `tile_rows`. Compiled kernels call this, too."""
    sums = n_rows * head_dim
    logits = sums + max(n_rows * head_dim, tile_rows * CHANNEL_ROW)
    totals = logits + n_rows * PAGE_TOKENS
    scaled = totals + n_rows * LANES
    room = max((tile_rows + 1) * PAGE_TOKENS, tile_rows * CHANNEL_ROW, OUTLIER_ROOM)
    end = scaled + room + LANES
    return RowScratch(0, sums, logits, totals, scaled, end)


LEAST_RUN_ROWS = 24
"""Rows of `attention/many.py` that are worth a decoded tile."""
MOST_ROW_PARTS = (2 * LEAST_PARTS + 4) * LEAST_RUN_ROWS
"""Results of a row in a part that a thread of it keeps at most: LEAST_RUN_ROWS rows' with all
parts of the longest context."""


class RunBlockScratch(NamedTuple):
    """Scratch memory of a thread of `attention/many.py`: where each array starts, in floats.

    Attributes:
        q: [n_rows, head_dim], the queries.
        k: [head_dim, TILE], decoded and transposed.
        v: [PAGE_TOKENS, head_dim].
        logits: [n_rows, PAGE_TOKENS], then what they become as weights.
        totals: [n_rows, LANES], sums of exponentials.
        scales: [2, LANES], of those who decode.
        parts: [n_parts] of `PartResult`.
        end: where the next thread's may start, a cache line further.
    """

    q: int
    k: int
    v: int
    logits: int
    totals: int
    scales: int
    parts: int
    end: int


def run_block_scratch(n_rows: int, n_parts: int, head_dim: int) -> RunBlockScratch:
    """For `n_rows` rows whose context has `n_parts` parts. Compiled kernels call this, too."""
    k = n_rows * head_dim
    v = k + TILE * head_dim
    logits = v + PAGE_TOKENS * head_dim
    totals = logits + n_rows * PAGE_TOKENS
    scales = totals + n_rows * LANES
    parts = scales + 2 * LANES
    end = parts + n_parts * n_rows * (head_dim + 2) + LANES
    return RunBlockScratch(0, k, v, logits, totals, scales, parts, end)


def most_run_block_floats(head_dim: int) -> int:
    """Scratch memory of a thread of `attention/many.py` at most."""
    others = run_block_scratch(BLOCK_ROWS, 0, head_dim).end
    return others + MOST_ROW_PARTS * (head_dim + 2)


class PartResult(NamedTuple):
    """What the decode kernels leave of a part, to be merged: where each array starts, in floats.

    Attributes:
        out: [n_rows, head_dim], sums of weighted values.
        references: [n_rows].
        totals: [n_rows], sums of exponentials.
        end: where the result of the next part starts.
    """

    out: int
    references: int
    totals: int
    end: int


def part_result(n_rows: int, head_dim: int) -> PartResult:
    """The layout of `n_rows` rows' results. Compiled kernels call this, too."""
    references = n_rows * head_dim
    return PartResult(0, references, references + n_rows, references + 2 * n_rows)


def part_pages(n_pages: int, n_kv_heads: int) -> int:
    """Pages of a part, of the `n_pages` that a generated token sees.

    Nothing else may decide, neither the batch nor the threads: sums are rounded by part.
    """
    return max(1, n_pages * n_kv_heads // LEAST_PARTS)


def most_parts(n_kv_heads: int) -> int:
    """Parts (of all KV heads) that are enough for any token; no launch has more for several."""
    return 2 * LEAST_PARTS + 2 * n_kv_heads


TOGETHER = 4
"""Tokens with long contexts whose parts fit a launch. Where there are more, layers run one by one,
which takes Python a millisecond each."""


def launch_parts(n_kv_heads: int) -> int:
    """Parts (of all KV heads) of a launch for several tokens."""
    return TOGETHER * most_parts(n_kv_heads)
