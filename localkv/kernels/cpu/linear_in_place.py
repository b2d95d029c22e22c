"""Panels of matrices that stay in the file: made when they are multiplied, one at a time.

Q8_0's rows are laid out in registers as fast as memory delivers them, so its matrices are not
copied when a model is loaded: a thread makes a panel (see `linear_panels`) in its cache and
multiplies that with all tokens.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit
from numba.core import types
from numba.extending import intrinsic

from localkv.kernels.cpu.panel_bytes import LANES
from localkv.simd.memory import get_u8, put_u8
from localkv.simd.vector import call, constant, i8, i16, i32, i64, lanes_of

BLOCK_BYTES = 34
RECORD_BYTES = 2 * BLOCK_BYTES
"""Of a row: two blocks of a half and 32 codes."""
PANEL_RECORD_BYTES = LANES * RECORD_BYTES
AHEAD = 8 * RECORD_BYTES
"""How far ahead rows are fetched; the hardware does not follow 16 of them."""


def _interleaved(b: Any, x: list[Any], distance: int) -> list[Any]:
    """One step of a transposition: words `distance` apart change places between two vectors."""
    out = list(x)
    for i in range(LANES):
        if i & distance:
            continue
        low, high = x[i], x[i + distance]
        first = [j if not j & distance else LANES + j - distance for j in range(LANES)]
        second = [j + distance if not j & distance else LANES + j for j in range(LANES)]
        for to, mask in ((i, first), (i + distance, second)):
            indices = ir.Constant(lanes_of(i32), mask)
            out[to] = b.shuffle_vector(low, high, indices)
    return out


@intrinsic
def lay_out_record(typing: Any, rows: Any, row_bytes: Any, ahead: Any, out: Any) -> Any:
    """A record of 16 rows, at addresses `rows` + i `row_bytes`, goes to `out`.

    What is at `ahead` + i `row_bytes` is asked for.
    """

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        rows, row_bytes, ahead, out = args

        def at(address: Any, offset: int, target: ir.Type) -> Any:
            where = b.add(address, ir.Constant(i64, offset))
            return b.inttoptr(where, target.as_pointer())

        half = lanes_of(i32, 8)
        both = ir.Constant(lanes_of(i32), list(range(LANES)))
        words, scales = [], [ir.Constant(lanes_of(i16), [0] * LANES) for _ in range(2)]
        for lane in range(LANES):
            row = b.add(rows, b.mul(row_bytes, ir.Constant(i64, lane)))
            parts = [b.load(at(row, BLOCK_BYTES * i + 2, half), align=1) for i in range(2)]
            words.append(b.shuffle_vector(*parts, both))
            for i in range(2):
                scale = b.load(at(row, BLOCK_BYTES * i, i16), align=1)
                scales[i] = b.insert_element(scales[i], scale, ir.Constant(i32, lane))
            fetched = b.add(ahead, b.mul(row_bytes, ir.Constant(i64, lane)))
            read, keep, data = (ir.Constant(i32, x) for x in (0, 3, 1))
            arguments = [b.inttoptr(fetched, i8.as_pointer()), read, keep, data]
            call(b, "llvm.prefetch.p0", ir.VoidType(), arguments)
        for distance in (8, 4, 2, 1):
            words = _interleaved(b, words, distance)
        signs = constant(i32, -0x7F7F7F80)
        for i, vector in enumerate(words):
            b.store(b.xor(vector, signs), at(out, 64 * i, vector.type), align=1)
        for i, vector in enumerate(scales):
            b.store(vector, at(out, 64 * LANES + 32 * i, vector.type), align=1)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 4), generate


@njit
def lay_out_panel(rows: Any, row_bytes: Any, n_rows: Any, next_rows: Any, out: Any) -> None:
    """16 rows, of which `n_rows` exist, become a panel at `out`.

    Args:
        rows: address of the first; they lie one after the other.
        next_rows: address of those that come next, or of these again.
    """
    n_records = row_bytes // RECORD_BYTES
    if n_rows < LANES:
        for lane in range(n_rows):
            lay_out_row(rows + lane * row_bytes, row_bytes, lane, out)
        return
    for record in range(n_records):
        offset = record * RECORD_BYTES
        ahead = rows + offset + AHEAD
        if offset + AHEAD >= row_bytes:
            ahead = next_rows + offset + AHEAD - row_bytes
        lay_out_record(rows + offset, row_bytes, ahead, out + record * PANEL_RECORD_BYTES)
    if n_records * RECORD_BYTES < row_bytes:
        for lane in range(LANES):
            lay_out_block(rows + lane * row_bytes, row_bytes // BLOCK_BYTES - 1, lane, out)
            clear_block(row_bytes // BLOCK_BYTES, lane, out)


@njit
def lay_out_row(row: Any, row_bytes: Any, lane: Any, out: Any) -> None:
    """The same for one row."""
    n_blocks = row_bytes // BLOCK_BYTES
    for block in range(n_blocks):
        lay_out_block(row, block, lane, out)
    if n_blocks % 2:
        clear_block(n_blocks, lane, out)


@njit
def lay_out_block(row: Any, block: Any, lane: Any, out: Any) -> None:
    """The same for one block of a row."""
    record, half = out + block // 2 * PANEL_RECORD_BYTES, block % 2
    at = row + block * BLOCK_BYTES
    for i in range(32):
        code = get_u8(at, 2 + i) ^ 128
        put_u8(record, (half * 8 + i // 4) * 64 + 4 * lane + i % 4, code)
    for i in range(2):
        put_u8(record, 64 * LANES + half * 32 + 2 * lane + i, get_u8(at, i))


@njit
def clear_block(block: Any, lane: Any, out: Any) -> None:
    """What completes a record is multiplied with zeros, so its scale must be a number."""
    record, half = out + block // 2 * PANEL_RECORD_BYTES, block % 2
    for i in range(2):
        put_u8(record, 64 * LANES + half * 32 + 2 * lane + i, 0)
