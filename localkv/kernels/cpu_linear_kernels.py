"""The CPU's products with panels: activations packed once, then tiles of 16 rows x 1 to 8 tokens.

With AVX512-VNNI activations are rounded to 8 bits, 32 values to a scale, as ggml does for
quantised weights, and codes are multiplied as integers; otherwise codes become float32 and meet
float32 activations. Both read a panel's codes once per tile of tokens and keep the sums in
registers. A token's result does not depend on the other tokens of the batch: every tile adds up
the same numbers in the same order.

Activations are packed for a tile of T tokens, block after block of 32 columns:

    8 bits   T x 4 int8 for each 4 columns, then T each of: scale (float32), -zero * sum of the
             codes of the first and the second half (int32; whole and 0 where a block has one
             scale), scale * sum of the codes (float32)
    float32  T floats for each column, then T sums
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path
from typing import Any

from llvmlite import ir
from numba import cfunc, njit, prange
from numba.core import cgutils, types
from numba.extending import intrinsic

from localkv.kernels.cpu_linear_blocks import (
    BLOCK,
    BLOCK_VECTORS,
    PANEL_FORMATS,
    PanelFormat,
    Record,
)
from localkv.kernels.cpu_panel_bytes import LANES
from localkv.simd.compile_cache import CAN_CACHE
from localkv.simd.cpu_features import HAS_VNNI
from localkv.simd.memory import call_address, get_i64, put_i64, take_next
from localkv.simd.vector import call, constant, f32, i8, i32, i64, lanes_of, multiply_add, splat

PREFETCH_BYTES = 6144
"""How far ahead a product with few tokens asks for panels, which is memory's delay."""

PREFETCH_TOKENS = 4
"""The most tokens of a tile for which memory, not arithmetic, is the limit."""

SERIAL_TOKENS = 4
"""The most tokens whose activations are packed sooner by one thread than others start."""

MAX_TILE = 8 if HAS_VNNI else 4
"""Tokens of the largest tile: as many as there are registers for."""

ACTIVATION_BLOCK_BYTES = BLOCK + 16 if HAS_VNNI else 4 * (BLOCK + 1)
"""Bytes of a token's packed activations for `BLOCK` columns."""

F32X16, I32X16 = lanes_of(f32), lanes_of(i32)


def _index(value: int) -> Any:
    return ir.Constant(i64, value)


def _at(builder: Any, address: Any, offset: Any, target: ir.Type) -> Any:
    """i8* plus an offset in bytes, as a pointer to `target`."""
    if isinstance(offset, int):
        offset = _index(offset)
    return builder.bitcast(builder.gep(address, [offset]), target.as_pointer())


def _load(builder: Any, address: Any, offset: Any, target: ir.Type) -> Any:
    return builder.load(_at(builder, address, offset, target), align=1)


def _store(builder: Any, value: Any, address: Any, offset: Any) -> None:
    builder.store(value, _at(builder, address, offset, value.type), align=1)


def _address(builder: Any, value: Any) -> Any:
    return builder.inttoptr(value, i8.as_pointer())


def _forget(builder: Any, address: Any) -> Any:
    """The same address, of which LLVM does not know that it is the same.

    Otherwise it keeps words that hold bits of several blocks in registers until these run out.
    """
    kind = ir.FunctionType(address.type, [address.type])
    return builder.asm(kind, "", "=r,0", [address], side_effect=True)


def _prefetch(builder: Any, address: Any, offset: int) -> None:
    where = builder.gep(address, [_index(offset)])
    read, level_2, data = (ir.Constant(i32, x) for x in (0, 2, 1))
    call(builder, "llvm.prefetch.p0", ir.VoidType(), [where, read, level_2, data])


class _Sums:
    """Vectors in stack slots, which LLVM turns into registers."""

    def __init__(self, builder: Any, n: int, item: ir.Type = F32X16) -> None:
        self.builder = builder
        self.slots = [cgutils.alloca_once(builder, item) for _ in range(n)]

    def clear(self) -> None:
        for slot in self.slots:
            self.builder.store(constant(f32, 0.0), slot)

    def add_product(self, i: int, x: Any, y: Any) -> None:
        total = multiply_add(self.builder, x, y, self.builder.load(self.slots[i]))
        self.builder.store(total, self.slots[i])

    def add(self, i: int, x: Any) -> None:
        self.builder.store(self.builder.fadd(self.builder.load(self.slots[i]), x), self.slots[i])

    def __getitem__(self, i: int) -> Any:
        return self.builder.load(self.slots[i])


def _integer_block(
    b: Any, fmt: PanelFormat, record: Record, block: int, tokens: int, act: Any, sums: _Sums
) -> None:
    """sums += a block of panels x activations in 8 bits, at `act`."""
    codes = fmt.codes(record, block)
    scales = [fmt.scale(record, block, half) for half in range(1 + fmt.halves)]
    minimum = None if fmt.minimum is None else fmt.minimum(record, block)
    facts = tokens * BLOCK  # where scales and sums start
    bytes64 = lanes_of(i8, 64)
    for first in range(0, tokens, 4):  # few tokens at a time, so that all stays in registers
        group = range(first, min(tokens, first + 4))
        totals = {}
        for half, scale in enumerate(scales):
            for t in group:
                if fmt.zero:
                    start = _load(b, act, facts + 4 * ((1 + half) * tokens + t), i32)
                    totals[t] = splat(b, start)
                else:
                    totals[t] = constant(i32, 0)
            n = BLOCK_VECTORS // len(scales)
            for j in range(half * n, half * n + n):
                for t in group:
                    x = splat(b, _load(b, act, 4 * (j * tokens + t), i32))
                    operands = [b.bitcast(v, bytes64) for v in (codes[j], x)]
                    totals[t] = call(
                        b, "llvm.x86.avx512.vpdpbusd.512", I32X16, [totals[t], *operands]
                    )
            for t in group:
                d = splat(b, _load(b, act, facts + 4 * t, f32))
                sums.add_product(t, b.sitofp(totals[t], F32X16), b.fmul(scale, d))
        if minimum is not None:
            for t in group:
                x = splat(b, _load(b, act, facts + 4 * (3 * tokens + t), f32))
                sums.add_product(t, minimum, x)


def _float_block(
    b: Any, fmt: PanelFormat, record: Record, block: int, tokens: int, act: Any, sums: _Sums
) -> None:
    """The same with activations in float32."""
    codes = fmt.codes(record, block)
    scales = [fmt.scale(record, block, half) for half in range(1 + fmt.halves)]
    for j, vector in enumerate(codes):
        scale = scales[j * len(scales) // BLOCK_VECTORS]
        for byte in range(4):
            code = b.and_(b.lshr(vector, constant(i32, 8 * byte)), constant(i32, 255))
            code = b.sub(code, constant(i32, fmt.zero))
            value = b.fmul(b.sitofp(code, F32X16), scale)
            for t in range(tokens):
                x = _load(b, act, 4 * ((4 * j + byte) * tokens + t), f32)
                sums.add_product(t, value, splat(b, x))
    if fmt.minimum is not None:
        minimum = fmt.minimum(record, block)
        for t in range(tokens):
            x = _load(b, act, 4 * (BLOCK * tokens + t), f32)
            sums.add_product(t, minimum, splat(b, x))


def _kind(literal: Any) -> PanelFormat:
    name: str = literal.literal_value.split()[0]
    return PANEL_FORMATS[name]


@lru_cache
def source_hash() -> str:
    """Of the code that kernels are made of: Numba's cache looks at the kernels' own file only."""
    digest = hashlib.sha256()
    here = Path(__file__).parent
    for path in (
        here / "cpu_linear_blocks.py",
        here / "cpu_linear_panels.py",
        here / "cpu_panel_bytes.py",
        *sorted((here.parent / "simd").glob("*.py")),
    ):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


@intrinsic(prefer_literal=True)
def multiply_tile(
    typing: Any,
    kind: Any,
    tokens: Any,
    panel: Any,
    n_records: Any,
    activations: Any,
    out: Any,
    out_stride: Any,
    n_rows: Any,
) -> Any:
    """A panel times a tile of tokens.

    Args:
        kind, tokens: a format's name and the tokens of the tile; known when compiling.
        panel, activations, out: addresses; `out` is that of float32 [tokens, n_rows].
        out_stride: bytes from token to token in `out`.
        n_rows: rows of the panel that exist.
    """
    fmt = _kind(kind)
    n = tokens.literal_value

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        panel, n_records, activations, out, out_stride, n_rows = args[2:]
        panel, activations, out = (_address(b, x) for x in (panel, activations, out))
        sums = _Sums(b, n)
        sums.clear()
        part = _Sums(b, n)
        record_bytes = fmt.layout.record_bytes
        block_bytes = ACTIVATION_BLOCK_BYTES * n
        multiply = _integer_block if HAS_VNNI else _float_block
        with cgutils.for_range(b, n_records) as loop:
            at = b.gep(panel, [b.mul(loop.index, _index(record_bytes))])
            act_offset = b.mul(loop.index, _index(block_bytes * fmt.record_blocks))
            act = b.gep(activations, [act_offset])
            n_lines = record_bytes // 64
            if not HAS_VNNI:
                part.clear()  # shorter sums are rounded less
            for block in range(fmt.record_blocks):
                if n <= PREFETCH_TOKENS:
                    for line in range(
                        block * n_lines // fmt.record_blocks,
                        (block + 1) * n_lines // fmt.record_blocks,
                    ):
                        _prefetch(b, at, PREFETCH_BYTES + 64 * line)
                record = Record(b, fmt.layout, _forget(b, at))
                block_act = b.gep(act, [_index(block * block_bytes)])
                multiply(b, fmt, record, block, n, block_act, sums if HAS_VNNI else part)
            if not HAS_VNNI:
                for t in range(n):
                    sums.add(t, part[t])
        lanes = ir.Constant(I32X16, list(range(LANES)))
        mask = b.icmp_signed("<", lanes, splat(b, b.trunc(n_rows, i32)))
        for t in range(n):
            pointer = _at(b, out, b.mul(out_stride, _index(t)), F32X16)
            align = ir.Constant(i32, 4)
            call(b, "llvm.masked.store.v16f32.p0", ir.VoidType(), [sums[t], pointer, align, mask])
        return context.get_dummy_value()

    address = types.intp
    return types.void(kind, tokens, address, address, address, address, address, address), generate


def _total(b: Any, x: Any, operation: str, item: ir.Type) -> Any:
    suffix = "f32" if item is f32 else "i32"
    if operation == "fadd":
        return call(b, "llvm.vector.reduce.fadd.v16f32", f32, [ir.Constant(f32, 0.0), x])
    return call(b, f"llvm.vector.reduce.{operation}.v16{suffix}", item, [x])


def _pack_integers(
    b: Any, fmt: PanelFormat, x: list[Any], act: Any, tokens: Any, token: Any
) -> None:
    """Two vectors of 16 columns of a token -> their place in a block of packed activations."""
    tops = [_total(b, call(b, "llvm.fabs.v16f32", F32X16, [v]), "fmax", f32) for v in x]
    top = b.select(b.fcmp_ordered(">", tops[0], tops[1]), tops[0], tops[1])
    scale = b.fdiv(top, ir.Constant(f32, 127.0))
    is_zero = b.fcmp_ordered("==", top, ir.Constant(f32, 0.0))
    inverse = b.fdiv(ir.Constant(f32, 127.0), top)
    inverse = splat(b, b.select(is_zero, ir.Constant(f32, 0.0), inverse))
    facts = b.gep(act, [b.mul(tokens, _index(BLOCK))])
    totals = []
    for half, values in enumerate(x):
        rounded = call(b, "llvm.rint.v16f32", F32X16, [b.fmul(values, inverse)])
        codes = b.fptosi(rounded, I32X16)
        totals.append(_total(b, codes, "add", i32))
        words = b.bitcast(b.trunc(codes, lanes_of(i8)), lanes_of(i32, 4))
        for j in range(4):
            slot = b.add(b.mul(_index(4 * half + j), tokens), token)
            word = b.extract_element(words, ir.Constant(i32, j))
            _store(b, word, act, b.mul(slot, _index(4)))
    both = b.add(*totals)
    zero = ir.Constant(i32, -fmt.zero)
    starts = totals if fmt.halves else [both, ir.Constant(i32, 0)]
    values = [scale, *(b.mul(zero, t) for t in starts), b.fmul(scale, b.sitofp(both, f32))]
    for i, value in enumerate(values):
        slot = b.add(b.mul(_index(i), tokens), token)
        _store(b, value, facts, b.mul(slot, _index(4)))


def _pack_floats(b: Any, fmt: PanelFormat, x: list[Any], act: Any, tokens: Any, token: Any) -> None:
    for i in range(BLOCK):
        value = b.extract_element(x[i // LANES], ir.Constant(i32, i % LANES))
        slot = b.add(b.mul(_index(i), tokens), token)
        _store(b, value, act, b.mul(slot, _index(4)))
    total = _total(b, b.fadd(*x), "fadd", f32)
    slot = b.add(b.mul(_index(BLOCK), tokens), token)
    _store(b, total, act, b.mul(slot, _index(4)))


@intrinsic(prefer_literal=True)
def pack_row(
    typing: Any,
    kind: Any,
    x: Any,
    n_in: Any,
    n_blocks: Any,
    activations: Any,
    tokens: Any,
    token: Any,
) -> Any:
    """Pack the activations of one token.

    Args:
        x: address of float32 [n_in].
        n_blocks: blocks to write; columns from `n_in` on are zero.
        activations: address of the token's tile.
        tokens, token: how many tokens the tile has, and which one of them this is.
    """
    fmt = _kind(kind)

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        x, n_in, n_blocks, activations, tokens, token = args[1:]
        x, activations = _address(b, x), _address(b, activations)
        pack = _pack_integers if HAS_VNNI else _pack_floats
        n_full = b.sdiv(n_in, _index(BLOCK))
        block_bytes = b.mul(tokens, _index(ACTIVATION_BLOCK_BYTES))
        with cgutils.for_range(b, n_blocks) as loop:
            act = b.gep(activations, [b.mul(loop.index, block_bytes)])
            exists = b.icmp_signed("<", loop.index, n_full)
            mask = splat(b, exists)
            halves = []
            for half in range(2):
                offset = b.add(b.mul(loop.index, _index(4 * BLOCK)), _index(4 * LANES * half))
                pointer = _at(b, x, offset, F32X16)
                align = ir.Constant(i32, 4)
                arguments = [pointer, align, mask, constant(f32, 0.0)]
                halves.append(call(b, "llvm.masked.load.v16f32.p0", F32X16, arguments))
            pack(b, fmt, halves, act, tokens, token)
        return context.get_dummy_value()

    address = types.intp
    return types.void(kind, *[address] * 6), generate


@njit
def tile_start(token: Any, n_tokens: Any) -> Any:
    """First token of the tile that holds `token`: large tiles first, then 4, 2, 1 as needed."""
    start = n_tokens // MAX_TILE * MAX_TILE
    if token < start:
        return token // MAX_TILE * MAX_TILE
    size = tile_size(start, n_tokens)
    while start + size <= token:
        start += size
        size = tile_size(start, n_tokens)
    return start


@njit
def tile_size(start: Any, n_tokens: Any) -> Any:
    """Tokens of the tile that starts at `start`."""
    left = n_tokens - start
    if left >= MAX_TILE:
        return MAX_TILE
    if left >= 4:
        return 4
    return 2 if left >= 2 else 1


# What workers read from a job, an array of int64; the first two are counters that start at 0.
NEXT_TOKEN, NEXT_CHUNK = 0, 1
X, N_TOKENS, N_IN, N_BLOCKS, ACTIVATIONS = 2, 3, 4, 5, 6
PANELS, PANEL_BYTES, N_RECORDS, N_OUT, CHUNK_PANELS, OUT = 7, 8, 9, 10, 11, 12
JOB_SIZE = 13

WORKER = types.void(types.int64, types.int64)


def _packer(kind: str) -> Any:
    """The worker that packs activations. Numba's cache tells closures apart by `kind`."""

    @cfunc(WORKER, cache=CAN_CACHE)
    def pack(job: Any, thread: Any) -> None:
        n_tokens, n_in, n_blocks = (
            get_i64(job, N_TOKENS),
            get_i64(job, N_IN),
            get_i64(job, N_BLOCKS),
        )
        while True:
            token = take_next(job + 8 * NEXT_TOKEN)
            if token >= n_tokens:
                break
            start = tile_start(token, n_tokens)
            size = tile_size(start, n_tokens)
            x = get_i64(job, X) + 4 * token * n_in
            to = get_i64(job, ACTIVATIONS) + start * n_blocks * ACTIVATION_BLOCK_BYTES
            pack_row(kind, x, n_in, n_blocks, to, size, token - start)

    return pack


def _multiplier(kind: str) -> Any:
    """The worker that multiplies panels with packed activations."""

    @cfunc(WORKER, cache=CAN_CACHE)
    def multiply(job: Any, thread: Any) -> None:
        n_tokens, n_out = get_i64(job, N_TOKENS), get_i64(job, N_OUT)
        n_records, panel_bytes = get_i64(job, N_RECORDS), get_i64(job, PANEL_BYTES)
        token_bytes = get_i64(job, N_BLOCKS) * ACTIVATION_BLOCK_BYTES
        chunk, n_panels = get_i64(job, CHUNK_PANELS), (n_out + LANES - 1) // LANES
        stride = 4 * n_out
        while True:
            first = take_next(job + 8 * NEXT_CHUNK) * chunk
            if first >= n_panels:
                break
            last = min(first + chunk, n_panels)
            start = 0
            while start < n_tokens:
                size = tile_size(start, n_tokens)
                x = get_i64(job, ACTIVATIONS) + start * token_bytes
                for i in range(first, last):
                    panel = get_i64(job, PANELS) + i * panel_bytes
                    to = get_i64(job, OUT) + start * stride + 4 * LANES * i
                    n_rows = min(LANES, n_out - i * LANES)
                    if size == MAX_TILE:
                        multiply_tile(kind, MAX_TILE, panel, n_records, x, to, stride, n_rows)
                    elif size == 4:
                        multiply_tile(kind, 4, panel, n_records, x, to, stride, n_rows)
                    elif size == 2:
                        multiply_tile(kind, 2, panel, n_records, x, to, stride, n_rows)
                    else:
                        multiply_tile(kind, 1, panel, n_records, x, to, stride, n_rows)
                start += size

    return multiply


@njit(types.void(*[types.int64] * 15), parallel=True, nogil=True, cache=CAN_CACHE)
def run_product(
    pack: Any,
    multiply: Any,
    job: Any,
    n_threads: Any,
    x: Any,
    n_tokens: Any,
    n_in: Any,
    n_blocks: Any,
    activations: Any,
    panels: Any,
    panel_bytes: Any,
    n_records: Any,
    n_out: Any,
    chunk: Any,
    out: Any,
) -> None:
    """Fill in a job and run the two workers of a product, one after the other.

    `pack` and `multiply` are the workers, `job` is memory for `JOB_SIZE` int64.
    """
    put_i64(job, NEXT_TOKEN, 0)
    put_i64(job, NEXT_CHUNK, 0)
    put_i64(job, X, x)
    put_i64(job, N_TOKENS, n_tokens)
    put_i64(job, N_IN, n_in)
    put_i64(job, N_BLOCKS, n_blocks)
    put_i64(job, ACTIVATIONS, activations)
    put_i64(job, PANELS, panels)
    put_i64(job, PANEL_BYTES, panel_bytes)
    put_i64(job, N_RECORDS, n_records)
    put_i64(job, N_OUT, n_out)
    put_i64(job, CHUNK_PANELS, chunk)
    put_i64(job, OUT, out)
    if n_tokens <= SERIAL_TOKENS:
        call_address(pack, (job, 0))
    else:
        for i in prange(n_threads):
            call_address(pack, (job, i))
    for i in prange(n_threads):
        call_address(multiply, (job, i))


@lru_cache
def panel_workers(name: str) -> tuple[int, int]:
    """Addresses of the two workers of a format; compiles them, or loads them from the cache."""
    kind = f"{name} {source_hash()}"
    # kept alive by this function's own cache of the addresses' owners
    workers = _packer(kind), _multiplier(kind)
    _COMPILED.append(workers)
    return workers[0].address, workers[1].address


_COMPILED: list[Any] = []
