"""Tiles of the CPU's products with panels: 16 rows x 1 to 8 tokens, as generated code.

Where CPUs multiply bytes (`simd/integer.py`) codes meet activations in 8 bits; otherwise codes
become float32 and meet float32 activations (`linear/panels.py`). Both read a panel's codes
once per tile of tokens and keep the sums in registers. A token's result does not depend on the
other tokens of the batch: every tile adds up the same numbers in the same order.

A tile of one panel loads each word of the activations for one product only, and
loads are what it waits for: a core of Zen 5 starts two products of bytes in a cycle, and as many
loads of vectors. Two panels share them. Codes are read again for every four tokens, as there are
not registers enough to keep them. Sums are the same as in the tile of one panel, bit for bit.

Codes that take long to read are unpacked once for many tokens. An unpacked record is a block after
the other: eight vectors of codes, as they are multiplied, then the vectors of its scales and of its
minima. It lies on the stack, in the first-level cache, as do the sums of `GROUP_TOKENS` tokens, 16
floats each. Sums are the same bits as in the tiles, which add up the same numbers in the same
order.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from localkv.kernels.cpu.linear.jobs import ACTIVATION_BLOCK_BYTES
from localkv.kernels.cpu.linear.panels import (
    F32X16,
    I32X16,
    SCALE,
    SECOND_START,
    START,
    VALUE_SUMS,
    PackedBlock,
    as_address,
    index_of,
    load_at,
    pointer_at,
    store_at,
)
from localkv.quant_formats.shared.cpu.panel_codes import (
    BLOCK_VECTORS,
    PanelFormat,
    Record,
    panel_format,
)
from localkv.quant_formats.shared.cpu.panel_layout import BLOCK, LANES
from localkv.simd.cpu_features import HAS_AVX512, HAS_BYTE_DOTS, HAS_VNNI
from localkv.simd.integer import MOST_SIGNED, dot_of_bytes, dot_of_signed_bytes, flipped
from localkv.simd.kinds import Args, Builder, Intrinsic, Kind, Signature, Target, Typing, Value
from localkv.simd.memory import FAR_BYTES, emit_prefetch, emit_stream_prefetch, on_stack
from localkv.simd.vector import call, constant, f32, i32, multiply_add, splat

PREFETCH_TOKENS = 8
"""The most tokens of a tile that asks. That many generated ones meet panels that come from memory;
prompts, whose tiles find them in the second cache, lose nothing by it."""


def ask_ahead(b: Builder, fmt: PanelFormat, line: Value) -> None:
    """Ask for what a product with few tokens reaches some time after a cache line, at an i8*.

    Where codes take long to read one instruction has to do: those loads are many already, and the
    memory is waited for less.
    """
    if fmt.is_costly:
        emit_prefetch(b, b.gep(line, [index_of(FAR_BYTES)]))
    else:
        emit_stream_prefetch(b, line)


def opaque(builder: Builder, address: Value) -> Value:
    """An address, made opaque to LLVM.

    Otherwise LLVM keeps words that hold bits of several blocks in registers until these run out.
    """
    kind = ir.FunctionType(address.type, [address.type])
    return builder.asm(kind, "", "=r,0", [address], side_effect=True)


class Sums:
    """Vectors in stack slots, which LLVM turns into registers."""

    def __init__(self, builder: Builder, n: int, item: ir.Type = F32X16) -> None:
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


def dot_of_codes(b: Builder, fmt: PanelFormat, total: Value, codes: Value, x: Value) -> Value:
    if fmt.is_signed:
        return dot_of_signed_bytes(b, total, codes, x)
    return dot_of_bytes(b, total, codes, x, most=255 if fmt.zero == 128 else MOST_SIGNED)


def multiplied_codes(b: Builder, fmt: PanelFormat, record: Record, block: int) -> list[Any]:
    """The codes of a block, signed where they are multiplied as such."""
    return [flipped(b, x) if fmt.is_signed else x for x in fmt.codes(record, block)]


def _integer_block(
    b: Builder, fmt: PanelFormat, record: Record, block: int, tokens: int, act: Value, sums: Sums
) -> None:
    """sums += a block of panels x activations in 8 bits, at `act`."""
    n = BLOCK_VECTORS // (1 + fmt.halves)
    codes = multiplied_codes(b, fmt, record, block)
    for half in range(1 + fmt.halves):
        part = record
        if half and not fmt.is_costly:  # half of the codes at a time, as registers have room
            part = Record(b, fmt.layout, opaque(b, record.address))
            # what LLVM finds unused it leaves out
            codes = multiplied_codes(b, fmt, part, block)
        scale = fmt.scale(part, block, half)
        add_half(b, fmt, half, codes[half * n : half * n + n], scale, tokens, act, sums)
    add_minima(b, fmt.minima(record, block), tokens, act, sums)


def add_half(
    b: Builder,
    fmt: PanelFormat,
    half: int,
    codes: list[Any],
    scale: Value,
    tokens: int,
    act: Value,
    sums: Sums,
) -> None:
    """Add what has one scale: half a block, or all of it."""
    at = PackedBlock(tokens)
    for group in [range(t, min(tokens, t + 4)) for t in range(0, tokens, 4)]:
        totals = {}
        for t in group:
            if fmt.surplus:
                start = at.fact(SECOND_START if half else START, t)
                totals[t] = splat(b, load_at(b, act, start, i32))
            else:
                totals[t] = constant(i32, 0)
        for j, code in enumerate(codes, half * len(codes)):
            for t in group:
                x = splat(b, load_at(b, act, at.codes(j, t), i32))
                totals[t] = dot_of_codes(b, fmt, totals[t], code, x)
        for t in group:
            d = splat(b, load_at(b, act, at.fact(SCALE, t), f32))
            sums.add_product(t, b.sitofp(totals[t], F32X16), b.fmul(scale, d))


def add_minima(b: Builder, minima: list[Any], tokens: int, act: Value, sums: Sums) -> None:
    """Add the minima of a block."""
    at = PackedBlock(tokens)
    for half, minimum in enumerate(minima):
        for t in range(tokens):
            x = splat(b, load_at(b, act, at.fact(VALUE_SUMS[half], t), f32))
            sums.add_product(t, minimum, x)


def _float_block(
    b: Builder, fmt: PanelFormat, record: Record, block: int, tokens: int, act: Value, sums: Sums
) -> None:
    """A block with activations in float32."""
    at = PackedBlock(tokens)
    codes = fmt.codes(record, block)
    scales = fmt.scales(record, block)
    for j, vector in enumerate(codes):
        scale = scales[j * len(scales) // BLOCK_VECTORS]
        for byte in range(4):
            code = b.and_(b.lshr(vector, constant(i32, 8 * byte)), constant(i32, 255))
            code = b.sub(code, constant(i32, fmt.zero))
            value = b.fmul(b.sitofp(code, F32X16), scale)
            for t in range(tokens):
                x = load_at(b, act, at.column(4 * j + byte, t), f32)
                sums.add_product(t, value, splat(b, x))
    for half, minimum in enumerate(fmt.minima(record, block)):
        for t in range(tokens):
            x = load_at(b, act, at.column(BLOCK + half, t), f32)
            sums.add_product(t, minimum, splat(b, x))


def put_sums(
    b: Builder,
    sums: Sums,
    tokens: int,
    out: Value,
    out_stride: Value,
    n_rows: Value,
    addend: Value,
    addend_stride: Value,
) -> None:
    """The sums of a tile, and what is added to them, go to `out` (see `multiply_tile`)."""
    lanes = ir.Constant(I32X16, list(range(LANES)))
    mask = b.icmp_signed("<", lanes, splat(b, b.trunc(n_rows, i32)))
    align = ir.Constant(i32, 4)
    with b.if_then(b.icmp_signed("!=", addend, index_of(0))):
        start = as_address(b, addend)
        for t in range(tokens):
            pointer = pointer_at(b, start, b.mul(addend_stride, index_of(t)), F32X16)
            arguments = [pointer, align, mask, constant(f32, 0.0)]
            sums.add(t, call(b, "llvm.masked.load.v16f32.p0", F32X16, arguments))
    for t in range(tokens):
        pointer = pointer_at(b, out, b.mul(out_stride, index_of(t)), F32X16)
        call(b, "llvm.masked.store.v16f32.p0", ir.VoidType(), [sums[t], pointer, align, mask])


@intrinsic(prefer_literal=True)
def multiply_tile(
    typing: Typing,
    kind: Kind,
    tokens: Kind,
    panel: Kind,
    n_records: Kind,
    activations: Kind,
    out: Kind,
    out_stride: Kind,
    n_rows: Kind,
    addend: Kind,
    addend_stride: Kind,
) -> Intrinsic:
    """A panel times a tile of tokens.

    Args:
        kind, tokens: a format's name and the tokens of the tile; known when compiling.
        panel, activations, out: addresses; `out` is float32 [tokens, n_rows].
        out_stride: bytes from token to token in `out`.
        n_rows: rows of the panel that exist.
        addend: address of what is added, float32 as `out`, or 0.
    """
    fmt = panel_format(kind.literal_value)
    n = tokens.literal_value

    def generate(context: Target, b: Builder, signature: Signature, args: Args) -> Value:
        panel, n_records, activations, out, out_stride, n_rows, addend, addend_stride = args[2:]
        panel, activations, out = (as_address(b, x) for x in (panel, activations, out))
        sums = Sums(b, n)
        sums.clear()
        part = Sums(b, n)
        record_bytes = fmt.layout.record_bytes
        block_bytes = ACTIVATION_BLOCK_BYTES * n
        multiply = _integer_block if HAS_BYTE_DOTS else _float_block
        with cgutils.for_range(b, n_records) as loop:
            at = b.gep(panel, [b.mul(loop.index, index_of(record_bytes))])
            act_offset = b.mul(loop.index, index_of(block_bytes * fmt.record_blocks))
            act = b.gep(activations, [act_offset])
            n_lines = record_bytes // 64
            if not HAS_BYTE_DOTS:
                part.clear()  # shorter sums are rounded less
            for block in range(fmt.record_blocks):
                if n <= PREFETCH_TOKENS:
                    for line in range(
                        block * n_lines // fmt.record_blocks,
                        (block + 1) * n_lines // fmt.record_blocks,
                    ):
                        ask_ahead(b, fmt, b.gep(at, [index_of(64 * line)]))
                record = Record(b, fmt.layout, opaque(b, at))
                block_act = b.gep(act, [index_of(block * block_bytes)])
                multiply(b, fmt, record, block, n, block_act, sums if HAS_BYTE_DOTS else part)
            if not HAS_BYTE_DOTS:
                for t in range(n):
                    sums.add(t, part[t])
        put_sums(b, sums, n, out, out_stride, n_rows, addend, addend_stride)
        return context.get_dummy_value()

    address = types.intp
    return types.void(kind, tokens, *[address] * 8), generate


PAIR_FORMATS = ("q4_0", "q4_1", "q5_0") if HAS_AVX512 and HAS_VNNI else ()
"""Formats that gain. Codes are read twice, so that they must be made fast of what is stored, unlike
the codes of K-quants; and there have to be registers for the sums of two panels, and
instructions that leave the others free."""
PREFETCH_BYTES = 8192
"""How far ahead panels are asked for, which is memory's delay."""
GROUP = 4
"""Tokens whose products are in registers at once."""


def _add_part(
    b: Builder,
    fmt: PanelFormat,
    block: int,
    half: int,
    panels: list[Value],
    tokens: int,
    act: Value,
    sums: list[Sums],
) -> None:
    """What has one scale: half a block, or all of it, of both panels (see `tiles.add_half`)."""
    at, n = PackedBlock(tokens), BLOCK_VECTORS // (1 + fmt.halves)
    for group in [range(t, t + GROUP) for t in range(0, tokens, GROUP)]:
        records = [Record(b, fmt.layout, opaque(b, panel)) for panel in panels]
        codes = [multiplied_codes(b, fmt, record, block) for record in records]
        totals = dict[tuple[int, int], Value]()
        for t in group:
            start = constant(i32, 0)
            if fmt.surplus:
                where = at.fact(SECOND_START if half else START, t)
                start = splat(b, load_at(b, act, where, i32))
            totals |= {(i, t): start for i in range(len(panels))}
        for j in range(half * n, half * n + n):
            for t in group:
                x = splat(b, load_at(b, act, at.codes(j, t), i32))
                for i in range(len(panels)):
                    totals[i, t] = dot_of_codes(b, fmt, totals[i, t], codes[i][j], x)
        scales = [fmt.scale(record, block, half) for record in records]
        for t in group:
            d = splat(b, load_at(b, act, at.fact(SCALE, t), f32))
            for i, scale in enumerate(scales):
                sums[i].add_product(t, b.sitofp(totals[i, t], F32X16), b.fmul(scale, d))


@intrinsic(prefer_literal=True)
def multiply_pair(
    typing: Typing,
    kind: Kind,
    tokens: Kind,
    panel: Kind,
    panel_bytes: Kind,
    n_records: Kind,
    activations: Kind,
    out: Kind,
    out_stride: Kind,
    n_rows: Kind,
    addend: Kind,
    addend_stride: Kind,
) -> Intrinsic:
    """Two panels, one `panel_bytes` after the other, times a tile of tokens.

    Args:
        n_rows: rows of both that exist, more than the first has.
        tokens: a multiple of `GROUP`; for the others see `tiles.multiply_tile`.
    """
    fmt = panel_format(kind.literal_value)
    n = tokens.literal_value

    def generate(context: Target, b: Builder, signature: Signature, args: Args) -> Value:
        panel, size, n_records, activations, out, out_stride, n_rows = args[2:9]
        addend, addend_stride = args[9:]
        panel, activations, out = (as_address(b, x) for x in (panel, activations, out))
        sums = [Sums(b, n), Sums(b, n)]
        for each in sums:
            each.clear()
        record_bytes = fmt.layout.record_bytes
        block_bytes = ACTIVATION_BLOCK_BYTES * n
        with cgutils.for_range(b, n_records) as loop:
            offset = b.mul(loop.index, index_of(record_bytes))
            first = b.gep(panel, [offset])
            panels = [first, b.gep(first, [size])]
            # after its end is the other panel, which is read at the same time
            ahead = b.add(offset, index_of(PREFETCH_BYTES))
            jump = b.select(b.icmp_signed("<", ahead, size), index_of(0), size)
            coming = b.gep(panel, [b.add(ahead, jump)])
            act_offset = b.mul(loop.index, index_of(block_bytes * fmt.record_blocks))
            act = b.gep(activations, [act_offset])
            n_lines = record_bytes // 64
            for block in range(fmt.record_blocks):
                lines = range(
                    block * n_lines // fmt.record_blocks, (block + 1) * n_lines // fmt.record_blocks
                )
                for line in lines:
                    where = b.gep(coming, [index_of(64 * line)])
                    emit_prefetch(b, where)
                    emit_prefetch(b, b.gep(where, [size]))
                block_act = b.gep(act, [index_of(block * block_bytes)])
                for half in range(1 + fmt.halves):
                    _add_part(b, fmt, block, half, panels, n, block_act, sums)
                for each, at in zip(sums, panels, strict=True):
                    record = Record(b, fmt.layout, opaque(b, at))
                    add_minima(b, fmt.minima(record, block), n, block_act, each)
        nothing, row_bytes = index_of(0), index_of(4 * LANES)
        for i, each in enumerate(sums):
            here = out if i == 0 else b.gep(out, [row_bytes])
            rows = index_of(LANES) if i == 0 else b.sub(n_rows, index_of(LANES))
            plus = addend
            if i:
                is_none = b.icmp_signed("==", addend, nothing)
                plus = b.select(is_none, nothing, b.add(addend, row_bytes))
            put_sums(b, each, n, here, out_stride, rows, plus, addend_stride)
        return context.get_dummy_value()

    return types.void(kind, tokens, *[types.intp] * 9), generate


GROUP_TOKENS = 64
"""Tokens that meet an unpacked record, a multiple of all tiles' sizes."""

SUM_BYTES = 4 * LANES
"""Bytes of a token's sums, and of any vector."""


def unpacks(name: str) -> bool:
    """Whether records of a format are unpacked for many tokens."""
    return HAS_BYTE_DOTS and panel_format(name).is_costly


def _block_bytes(fmt: PanelFormat) -> int:
    n_scales = 1 + fmt.halves
    n_minima = 0 if fmt.minimum is None else n_scales
    return SUM_BYTES * (BLOCK_VECTORS + n_scales + n_minima)


@intrinsic(prefer_literal=True)
def record_memory(typing: Typing, kind: Kind) -> Intrinsic:
    """The address of an unpacked record, on the stack of the function."""
    fmt = panel_format(kind.literal_value)
    n_bytes = fmt.record_blocks * _block_bytes(fmt)

    def generate(context: Target, b: Builder, signature: Signature, args: Args) -> Value:
        return on_stack(b, n_bytes, SUM_BYTES)

    return types.int64(kind), generate


@intrinsic
def sums_memory(typing: Typing) -> Intrinsic:
    """The address of the sums of `GROUP_TOKENS` tokens, on the stack of the function."""

    def generate(context: Target, b: Builder, signature: Signature, args: Args) -> Value:
        return on_stack(b, GROUP_TOKENS * SUM_BYTES, SUM_BYTES)

    return types.int64(), generate


@intrinsic(prefer_literal=True)
def unpack_record(typing: Typing, kind: Kind, record: Kind, out: Kind) -> Intrinsic:
    fmt = panel_format(kind.literal_value)

    def generate(context: Target, b: Builder, signature: Signature, args: Args) -> Value:
        at, out = (as_address(b, x) for x in args[1:])
        for block in range(fmt.record_blocks):
            record = Record(b, fmt.layout, opaque(b, at))
            vectors = multiplied_codes(b, fmt, record, block)
            vectors += fmt.scales(record, block) + fmt.minima(record, block)
            for i, vector in enumerate(vectors):
                store_at(b, vector, out, block * _block_bytes(fmt) + SUM_BYTES * i)
        return context.get_dummy_value()

    return types.void(kind, types.intp, types.intp), generate


@intrinsic(prefer_literal=True)
def multiply_record(
    typing: Typing, kind: Kind, tokens: Kind, record: Kind, activations: Kind, sums: Kind
) -> Intrinsic:
    """Add an unpacked record times a tile of tokens to their sums."""
    fmt = panel_format(kind.literal_value)
    n = tokens.literal_value
    n_scales = 1 + fmt.halves

    def generate(context: Target, b: Builder, signature: Signature, args: Args) -> Value:
        record, activations, memory = (as_address(b, x) for x in args[2:])
        sums = Sums(b, n)
        for t in range(n):
            b.store(load_at(b, memory, SUM_BYTES * t, F32X16), sums.slots[t])
        with cgutils.for_range(b, index_of(fmt.record_blocks)) as loop:
            at = b.gep(record, [b.mul(loop.index, index_of(_block_bytes(fmt)))])
            act = b.gep(activations, [b.mul(loop.index, index_of(ACTIVATION_BLOCK_BYTES * n))])

            def vector(i: int, item: Any) -> Any:
                return load_at(b, at, SUM_BYTES * i, item)

            each, last = BLOCK_VECTORS // n_scales, _block_bytes(fmt) // SUM_BYTES
            for half in range(n_scales):
                codes = [vector(half * each + i, I32X16) for i in range(each)]
                scale = vector(BLOCK_VECTORS + half, F32X16)
                add_half(b, fmt, half, codes, scale, n, act, sums)
            minima = [vector(i, F32X16) for i in range(BLOCK_VECTORS + n_scales, last)]
            add_minima(b, minima, n, act, sums)
        for t in range(n):
            store_at(b, sums[t], memory, SUM_BYTES * t)
        return context.get_dummy_value()

    return types.void(kind, tokens, *[types.intp] * 3), generate


@intrinsic
def clear_sums(typing: Typing, sums: Kind, tokens: Kind) -> Intrinsic:
    def generate(context: Target, b: Builder, signature: Signature, args: Args) -> Value:
        memory = as_address(b, args[0])
        with cgutils.for_range(b, args[1]) as loop:
            store_at(b, constant(f32, 0.0), memory, b.mul(loop.index, index_of(SUM_BYTES)))
        return context.get_dummy_value()

    return types.void(types.intp, types.intp), generate


@intrinsic
def put_unpacked_sums(
    typing: Typing,
    sums: Kind,
    tokens: Kind,
    out: Kind,
    out_stride: Kind,
    n_rows: Kind,
    addend: Kind,
    addend_stride: Kind,
) -> Intrinsic:
    """Sums of some tokens, and what is added to them, go to `out` (see `tiles.multiply_tile`)."""

    def generate(context: Target, b: Builder, signature: Signature, args: Args) -> Value:
        memory, tokens, out, out_stride, n_rows, addend, addend_stride = args
        memory, out = as_address(b, memory), as_address(b, out)
        with cgutils.for_range(b, tokens) as loop:
            sums = Sums(b, 1)
            total = load_at(b, memory, b.mul(loop.index, index_of(SUM_BYTES)), F32X16)
            b.store(total, sums.slots[0])
            to = b.gep(out, [b.mul(loop.index, out_stride)])
            more = b.add(addend, b.mul(loop.index, addend_stride))
            is_added = b.icmp_signed("!=", addend, index_of(0))
            more = b.select(is_added, more, index_of(0))
            put_sums(b, sums, 1, to, out_stride, n_rows, more, addend_stride)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 7), generate
