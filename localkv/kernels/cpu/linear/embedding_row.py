"""The worker that decodes one row of a matrix, compiled for each format with panels.

A record at a time becomes one of a panel whose other rows are empty, so what a format's codes and
scales are is said once, for products. Values are its reference's, bit for bit.
"""

from __future__ import annotations

from llvmlite import ir
from numba import cfunc
from numba.core import types
from numba.extending import intrinsic

from localkv.kernels.cpu.jit.parameters import parameter
from localkv.kernels.cpu.linear.jobs import EmbeddingJob, RecordJob
from localkv.kernels.cpu.linear.panels import F32X16, I32X16, as_address, lay_panel, store_at
from localkv.kernels.cpu.linear.tiles import opaque
from localkv.quant_formats.shared.cpu.panel_codes import BLOCK_VECTORS, Record, panel_format
from localkv.quant_formats.shared.cpu.panel_layout import BLOCK, LANES
from localkv.simd.kinds import (
    Address,
    Args,
    Builder,
    Count,
    Intrinsic,
    Kind,
    Signature,
    Target,
    Typing,
    Value,
)
from localkv.simd.memory import get_f32, put_f32, reader
from localkv.simd.vector import constant, i32, lanes_of, splat

KIND = parameter("FORMAT", "q4_0")

read_embedding_job = reader(EmbeddingJob)


def _first_lane(b: Builder, x: Value) -> Value:
    return b.extract_element(x, ir.Constant(i32, 0))


@intrinsic
def decode_record(typing: Typing, record: Kind, out: Kind) -> Intrinsic:
    """The first row of a record -> float32."""
    fmt = panel_format(KIND)
    order = fmt.columns or tuple(range(BLOCK))
    codes_in_order = [order.index(column) for column in range(BLOCK)]

    def generate(context: Target, b: Builder, signature: Signature, args: Args) -> Value:
        at, out = (as_address(b, x) for x in args)
        for block in range(fmt.record_blocks):
            record = Record(b, fmt.layout, opaque(b, at))
            words = ir.Constant(lanes_of(i32, BLOCK_VECTORS), ir.Undefined)
            for j, vector in enumerate(fmt.codes(record, block)):
                words = b.insert_element(words, _first_lane(b, vector), ir.Constant(i32, j))
            codes = b.bitcast(words, lanes_of(ir.IntType(8), BLOCK))
            scales, minima = fmt.scales(record, block), fmt.minima(record, block)
            for half in range(2):
                columns = codes_in_order[LANES * half : LANES * (half + 1)]
                mask = ir.Constant(I32X16, columns)
                part = b.zext(b.shuffle_vector(codes, codes, mask), I32X16)
                value = b.sitofp(b.sub(part, constant(i32, fmt.zero)), F32X16)
                value = b.fmul(value, splat(b, _first_lane(b, scales[half * len(scales) // 2])))
                if minima:
                    minimum = _first_lane(b, minima[half * len(minima) // 2])
                    value = b.fadd(value, splat(b, minimum))
                store_at(b, value, out, 4 * (BLOCK * block + LANES * half))
        return context.get_dummy_value()

    return types.void(types.intp, types.intp), generate


@cfunc("void(int64, int64)", error_model="numpy")
def worker(address: Address, thread: Count) -> None:
    """Decode a row (`EmbeddingJob`)."""
    job = read_embedding_job(address)
    factor = get_f32(job.scale, 0)
    record_bytes = job.record_blocks * job.block_bytes
    for first in range(0, job.n_in, job.record_values):
        start = first // job.record_values * record_bytes
        n_bytes = min(record_bytes, job.row_bytes - start)
        part = RecordJob(
            n_bytes, job.block_bytes, job.record_blocks, job.record_bytes, job.n_planes, job.table
        )
        lay_panel(part, job.row + start, 1, 0, job.record)
        decode_record(job.record, job.values)
        to = job.out + 4 * first
        for i in range(min(job.record_values, job.n_in - first)):
            put_f32(to, i, get_f32(job.values, i) * factor)
