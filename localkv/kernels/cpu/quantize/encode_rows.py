"""The worker that encodes rows of weights, compiled for each type, with and without importance."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cfunc, njit

from localkv.kernels.cpu.jit.parameters import parameter
from localkv.kernels.cpu.quantize.rows import EncodeJob
from localkv.quant_formats import FORMATS
from localkv.quant_formats.fp4 import quantize as fp4
from localkv.quant_formats.i_quants import quantize as i_quants
from localkv.quant_formats.iq4_nl import quantize as iq4_nl
from localkv.quant_formats.k_quants import quantize as k_quants
from localkv.quant_formats.q4 import quantize as q4
from localkv.quant_formats.q5 import quantize as q5
from localkv.quant_formats.q8_0 import quantize as q8_0
from localkv.quant_formats.shared.cpu.quantizing import sum_of_squares
from localkv.quant_formats.ternary import quantize as ternary
from localkv.simd import LANES
from localkv.simd.arithmetic import div, f32x16, zero_f32
from localkv.simd.kinds import Address, Count, Lanes
from localkv.simd.memory import get_u8, put_u8, reader
from localkv.simd.shuffle import turn_rows
from localkv.simd.vector import zeros_f32

read_job = reader(EncodeJob)

FORMAT = FORMATS[parameter("FORMAT", "q4_K")]
WEIGHTED = parameter("WEIGHTED", 0) != 0
ENCODERS = {
    "fp4": fp4,
    "i_quants": i_quants,
    "iq4_nl": iq4_nl,
    "k_quants": k_quants,
    "q4": q4,
    "q5": q5,
    "q8_0": q8_0,
    "ternary": ternary,
}
_found: Any = ENCODERS[FORMAT.folder or FORMAT.codec_name]
codec: Any = getattr(_found, FORMAT.codec_name) if FORMAT.folder else _found
encode: Any = codec.encode_weighted if WEIGHTED else codec.encode
NEEDS_ROW = WEIGHTED and FORMAT.block_size == 32
BLOCK, BYTES = FORMAT.block_size, FORMAT.block_bytes
COLUMN_BYTES = 4 * LANES


@njit
def turn_block(rows: Address, n_in: int, x: Address) -> None:
    """A block of 16 rows, one vector for each column."""
    for first in range(0, BLOCK, LANES):
        turn_rows(rows + 4 * first, n_in, zeros_f32(LANES), x + COLUMN_BYTES * first)


@njit
def mean_of_rows(rows: Address, n_in: int, x: Address) -> Lanes:
    """The mean square of each row, summed up value by value."""
    total = zero_f32()
    for first in range(0, n_in, BLOCK):
        turn_block(rows + 4 * first, n_in, x)
        total = sum_of_squares(BLOCK, x, total)
    return div(total, f32x16(np.float32(n_in)))


@cfunc("void(int64, int64)", error_model="numpy")
def worker(address: Address, thread: Count) -> None:
    """Encode rows (`EncodeJob`), 16 at a time; the last ones may be encoded twice."""
    job = read_job(address)
    x = job.scratch
    out = x + COLUMN_BYTES * BLOCK
    scratch = out + LANES * BYTES
    for row in range(0, job.n_rows, LANES):
        first = min(row, job.n_rows - LANES)
        rows = job.x + 4 * job.n_in * first
        mean = mean_of_rows(rows, job.n_in, x) if NEEDS_ROW else zero_f32()
        for block in range(job.n_in // BLOCK):
            turn_block(rows + 4 * BLOCK * block, job.n_in, x)
            encode(x, job.importance + 4 * BLOCK * block, mean, out, scratch, job.table)
            for lane in range(LANES):
                goal = job.out + job.row_bytes * (first + lane) + BYTES * block
                for i in range(BYTES):
                    put_u8(goal, i, get_u8(out, LANES * i + lane))
