"""Tiles of the CPU's products with panels: 16 rows x 1 to 8 tokens, as generated code.

Where CPUs multiply bytes (`simd/integer.py`) codes meet activations in 8 bits; otherwise codes
become float32 and meet float32 activations (`linear/panels.py`). Both read a panel's codes
once per tile of tokens and keep the sums in registers. A token's result does not depend on the
other tokens of the batch: every tile adds up the same numbers in the same order.

A tile of one panel loads each word of the activations for one product only, and loads are what it
waits for. A core of Zen 5 starts two products of bytes in a cycle, and as many loads of vectors. So
for many tokens (fewer where codes take long to read) two panels, which share these loads, are
unpacked once. An unpacked block has eight vectors of codes, as they are multiplied, then the
vectors of its scales and of its minima. Blocks lie on the stack, in the first-level cache, as do
the sums of `GROUP_TOKENS` tokens, 16 floats each. Sums are the same bits as in the tiles, which add
up the same numbers in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
    WholeScales,
    panel_format,
)
from localkv.quant_formats.shared.cpu.panel_layout import BLOCK, CACHE_LINE, LANES
from localkv.simd.cpu_features import HAS_AVX512, HAS_BYTE_DOTS, HAS_VNNI
from localkv.simd.integer import MOST_SIGNED, dot_of_bytes, dot_of_signed_bytes, flipped
from localkv.simd.kinds import Args, Builder, Intrinsic, Kind, Signature, Target, Typing, Value
from localkv.simd.memory import FAR_BYTES, emit_prefetch, emit_stream_prefetch, on_stack
from localkv.simd.vector import call, constant, f32, i32, multiply_add, splat

PREFETCH_TOKENS = 8
"""The most tokens of a tile that asks. That many generated ones meet panels that come from memory;
prompts, whose tiles find them in the second cache, lose nothing by it."""

GROUP = 4
"""Tokens whose products are in registers at once."""


def ask_ahead(b: Builder, fmt: PanelFormat, line: Value) -> None:
    """Ask for what a product with few tokens reaches some time after a cache line, at an i8*.

    Where codes take long to read one instruction has to do: those loads are many already, and the
    memory is waited for less.
    """
    if fmt.is_costly:
        emit_prefetch(b, b.gep(line, [index_of(FAR_BYTES)]))
    else:
        emit_stream_prefetch(b, line)


def lines_of(fmt: PanelFormat, block: int) -> range:
    """A block's share of the cache lines of a record: bytes from its start."""
    n, n_lines = fmt.record_blocks, fmt.layout.record_bytes // CACHE_LINE
    return range(
        block * n_lines // n * CACHE_LINE, (block + 1) * n_lines // n * CACHE_LINE, CACHE_LINE
    )


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


def dots_of_half(
    b: Builder, fmt: PanelFormat, half: int, codes: list[Any], tokens: int, act: Value
) -> Iterator[tuple[int, Any]]:
    """Each token, and the integer sums of what has one scale: half a block, or all of it."""
    at = PackedBlock(tokens)
    for group in [range(t, min(tokens, t + GROUP)) for t in range(0, tokens, GROUP)]:
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
        yield from totals.items()


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
    for t, total in dots_of_half(b, fmt, half, codes, tokens, act):
        d = splat(b, load_at(b, act, at.fact(SCALE, t), f32))
        sums.add_product(t, b.sitofp(total, F32X16), b.fmul(scale, d))


def _whole_block(
    b: Builder,
    fmt: PanelFormat,
    whole: WholeScales,
    record: Record,
    block: int,
    tokens: int,
    act: Value,
    parts: list[Sums],
) -> None:
    """A block of panels x activations in 8 bits, for a record's own sums (`WholeScales`).

    Args:
        parts: sums of scales, and of minima if there are any.
    """
    at, n = PackedBlock(tokens), BLOCK_VECTORS // 2
    firsts = dict[int, Value]()
    for half in range(2):
        part = Record(b, fmt.layout, opaque(b, record.address)) if half else record
        codes = multiplied_codes(b, fmt, part, block)[half * n : half * n + n]
        scale = whole.scale(part, block, half)
        for t, total in dots_of_half(b, fmt, half, codes, tokens, act):
            value = b.sitofp(total, F32X16)
            if half == 0:
                firsts[t] = b.fmul(value, scale)
                continue
            both = multiply_add(b, value, scale, firsts[t])
            parts[0].add_product(t, both, splat(b, load_at(b, act, at.fact(SCALE, t), f32)))
    for minima in parts[1:]:
        add_minima(b, whole.minima(record, block), tokens, act, minima)


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
        whole = fmt.whole if HAS_BYTE_DOTS else None
        # a record's own sums: of floats, as shorter sums are rounded less, or of whole numbers
        parts = [Sums(b, n) for _ in range(1 if whole is None or whole.minimum is None else 2)]
        record_bytes = fmt.layout.record_bytes
        block_bytes = ACTIVATION_BLOCK_BYTES * n
        with cgutils.for_range(b, n_records) as loop:
            at = b.gep(panel, [b.mul(loop.index, index_of(record_bytes))])
            act_offset = b.mul(loop.index, index_of(block_bytes * fmt.record_blocks))
            act = b.gep(activations, [act_offset])
            for part in parts:
                part.clear()
            for block in range(fmt.record_blocks):
                if n <= PREFETCH_TOKENS:
                    for line in lines_of(fmt, block):
                        ask_ahead(b, fmt, b.gep(at, [index_of(line)]))
                record = Record(b, fmt.layout, opaque(b, at))
                block_act = b.gep(act, [index_of(block * block_bytes)])
                if whole is not None:
                    _whole_block(b, fmt, whole, record, block, n, block_act, parts)
                elif HAS_BYTE_DOTS:
                    _integer_block(b, fmt, record, block, n, block_act, sums)
                else:
                    _float_block(b, fmt, record, block, n, block_act, parts[0])
            if whole is not None:
                factors = whole.factors(Record(b, fmt.layout, opaque(b, at)))
                for part, factor in zip(parts, factors, strict=True):
                    for t in range(n):
                        sums.add_product(t, factor, part[t])
            elif not HAS_BYTE_DOTS:
                for t in range(n):
                    sums.add(t, parts[0][t])
        put_sums(b, sums, n, out, out_stride, n_rows, addend, addend_stride)
        return context.get_dummy_value()

    address = types.intp
    return types.void(kind, tokens, *[address] * 8), generate


GROUP_TOKENS = 128
"""Tokens that meet an unpacked record, a multiple of all tiles' sizes."""

SUM_BYTES = 4 * LANES
"""Bytes of a token's sums, and of any vector."""

UNPACKED_PANELS = 2 if HAS_AVX512 and HAS_VNNI else 1
"""Panels that are unpacked at a time."""

PREFETCH_BYTES = 8192
"""How far ahead panels are asked for, which is memory's delay."""

UNPACKED_BLOCKS = 8
"""Blocks of a panel that are unpacked at a time, in one record or in several."""


def unpacks(name: str) -> bool:
    """Whether panels of a format are unpacked for many tokens."""
    return HAS_BYTE_DOTS and (UNPACKED_PANELS > 1 or panel_format(name).is_costly)


def unpacked_bytes(fmt: PanelFormat) -> int:
    """Bytes of an unpacked block."""
    n_parts = 1 + fmt.halves
    n_scales = 0 if fmt.whole is not None else n_parts
    n_minima = 0 if fmt.minimum is None else n_parts
    return SUM_BYTES * (BLOCK_VECTORS + n_scales + n_minima)


def unpacked_panel_bytes(fmt: PanelFormat) -> int:
    """Bytes of a panel's unpacked blocks, and of the factors of `WholeScales` after them."""
    n_factors = 0 if fmt.whole is None else 2
    return UNPACKED_BLOCKS * unpacked_bytes(fmt) + SUM_BYTES * n_factors


@intrinsic(prefer_literal=True)
def unpacked_memory(typing: Typing, kind: Kind) -> Intrinsic:
    """The address of unpacked blocks of panels, on the stack of the function."""
    n_bytes = UNPACKED_PANELS * unpacked_panel_bytes(panel_format(kind.literal_value))

    def generate(context: Target, b: Builder, signature: Signature, args: Args) -> Value:
        return on_stack(b, n_bytes, SUM_BYTES)

    return types.int64(kind), generate


@intrinsic
def sums_memory(typing: Typing) -> Intrinsic:
    """The address of the sums of `GROUP_TOKENS` tokens, on the stack of the function."""

    def generate(context: Target, b: Builder, signature: Signature, args: Args) -> Value:
        return on_stack(b, UNPACKED_PANELS * GROUP_TOKENS * SUM_BYTES, SUM_BYTES)

    return types.int64(), generate


def _unpacked(b: Builder, fmt: PanelFormat, record: Record, block: int) -> list[Any]:
    """The vectors of an unpacked block."""
    if fmt.whole is not None:
        return fmt.whole.products(record, block) + fmt.whole.minima(record, block)
    vectors = multiplied_codes(b, fmt, record, block)
    return vectors + fmt.scales(record, block) + fmt.minima(record, block)


@intrinsic(prefer_literal=True)
def unpack_record(typing: Typing, kind: Kind, record: Kind, ahead: Kind, out: Kind) -> Intrinsic:
    """Unpack a record, and ask for another one.

    Args:
        record, ahead, out: addresses.
    """
    fmt = panel_format(kind.literal_value)

    def generate(context: Target, b: Builder, signature: Signature, args: Args) -> Value:
        at, ahead, out = (as_address(b, x) for x in args[1:])
        for block in range(fmt.record_blocks):
            for line in lines_of(fmt, block):  # too many at once are passed over
                emit_prefetch(b, b.gep(ahead, [index_of(line)]))
            record = Record(b, fmt.layout, opaque(b, at))
            for i, vector in enumerate(_unpacked(b, fmt, record, block)):
                store_at(b, vector, out, block * unpacked_bytes(fmt) + SUM_BYTES * i)
        if fmt.whole is not None:
            record = Record(b, fmt.layout, opaque(b, at))
            for i, factor in enumerate(fmt.whole.factors(record)):
                store_at(b, factor, out, UNPACKED_BLOCKS * unpacked_bytes(fmt) + SUM_BYTES * i)
        return context.get_dummy_value()

    return types.void(kind, *[types.intp] * 3), generate


def _start_of(b: Builder, fmt: PanelFormat, half: int, act: Value, at: PackedBlock, t: int) -> Any:
    """What the integer sums of half a block start with, or of all of it."""
    if not fmt.surplus:
        return constant(i32, 0)

    def start(name: int) -> Any:
        return splat(b, load_at(b, act, at.fact(name, t), i32))

    if fmt.whole is None:
        return start(SECOND_START if half else START)
    both = b.add(start(START), start(SECOND_START))
    return b.mul(both, constant(i32, fmt.whole.shift // fmt.surplus))


def _add_unpacked(
    b: Builder,
    fmt: PanelFormat,
    half: int,
    blocks: list[Value],
    tokens: int,
    act: Value,
    sums: list[Sums],
) -> None:
    """What has one scale: half a block, or all of it, of unpacked blocks of each panel."""
    at, panels = PackedBlock(tokens), range(len(blocks))
    each = BLOCK_VECTORS // n_sums_of(fmt)
    for group in [range(t, min(tokens, t + GROUP)) for t in range(0, tokens, GROUP)]:
        totals = dict[tuple[int, int], Value]()
        for t in group:
            start = _start_of(b, fmt, half, act, at, t)
            totals |= {(i, t): start for i in panels}
        for j in range(half * each, half * each + each):
            codes = [load_at(b, block, SUM_BYTES * j, I32X16) for block in blocks]
            for t in group:
                x = splat(b, load_at(b, act, at.codes(j, t), i32))
                for i in panels:
                    totals[i, t] = dot_of_unpacked(b, fmt, totals[i, t], codes[i], x)
        where = SUM_BYTES * (BLOCK_VECTORS + half)
        scales = [] if fmt.whole else [load_at(b, block, where, F32X16) for block in blocks]
        for t in group:
            d = splat(b, load_at(b, act, at.fact(SCALE, t), f32))
            for i in panels:
                value = b.sitofp(totals[i, t], F32X16)
                sums[i].add_product(t, value, b.fmul(scales[i], d) if scales else d)


def n_sums_of(fmt: PanelFormat) -> int:
    """Integer sums of an unpacked block."""
    return 1 if fmt.whole is not None else 1 + fmt.halves


def dot_of_unpacked(b: Builder, fmt: PanelFormat, total: Value, codes: Value, x: Value) -> Value:
    if fmt.whole is not None:
        return dot_of_bytes(b, total, codes, x)
    return dot_of_codes(b, fmt, total, codes, x)


@intrinsic(prefer_literal=True)
def multiply_blocks(
    typing: Typing,
    kind: Kind,
    n_panels: Kind,
    tokens: Kind,
    n_blocks: Kind,
    unpacked: Kind,
    activations: Kind,
    sums: Kind,
) -> Intrinsic:
    """Add unpacked blocks of panels times a tile of tokens to their sums.

    Args:
        unpacked: address of the first panel's; the next one's are `unpacked_panel_bytes` from
            there.
        sums: address of the first panel's; the others' are `GROUP_TOKENS` tokens' apart.
    """
    fmt = panel_format(kind.literal_value)
    n, n_p = tokens.literal_value, n_panels.literal_value
    each_bytes, has_minima = unpacked_bytes(fmt), fmt.minimum is not None
    first_minimum = BLOCK_VECTORS + (0 if fmt.whole else 1 + fmt.halves)

    def generate(context: Target, b: Builder, signature: Signature, args: Args) -> Value:
        unpacked, activations, memory = (as_address(b, x) for x in args[4:])
        panels = [b.gep(unpacked, [index_of(i * unpacked_panel_bytes(fmt))]) for i in range(n_p)]
        sums, minima = ([Sums(b, n) for _ in range(n_p)] for _ in range(2))
        places = [(i, t, SUM_BYTES * (GROUP_TOKENS * i + t)) for i in range(n_p) for t in range(n)]

        def each_block(add: Callable[[list[Value], Value], None]) -> None:
            with cgutils.for_range(b, args[3]) as loop:
                offset = b.mul(loop.index, index_of(each_bytes))
                act = b.gep(activations, [b.mul(loop.index, index_of(ACTIVATION_BLOCK_BYTES * n))])
                add([b.gep(panel, [offset]) for panel in panels], act)

        def add_dots(blocks: list[Value], act: Value) -> None:
            for half in range(n_sums_of(fmt)):
                _add_unpacked(b, fmt, half, blocks, n, act, sums)

        def add_all_minima(blocks: list[Value], act: Value) -> None:
            for block, to in zip(blocks, minima if fmt.whole else sums, strict=True):
                where = [SUM_BYTES * (first_minimum + half) for half in range(1 + fmt.halves)]
                add_minima(b, [load_at(b, block, at, F32X16) for at in where], n, act, to)

        def add_block(blocks: list[Value], act: Value) -> None:
            add_dots(blocks, act)
            if has_minima:
                add_all_minima(blocks, act)

        if fmt.whole is None:
            for i, t, place in places:
                b.store(load_at(b, memory, place, F32X16), sums[i].slots[t])
            each_block(add_block)
            for i, t, place in places:
                store_at(b, sums[i][t], memory, place)
            return context.get_dummy_value()
        for part in sums:
            part.clear()
        each_block(add_dots)
        of_all = [sums]
        if has_minima:  # after all products, as registers have room for one of both
            for part in minima:
                part.clear()
            each_block(add_all_minima)
            of_all.append(minima)
        for i, t, place in places:
            total = load_at(b, memory, place, F32X16)
            for k, parts in enumerate(of_all):
                where = UNPACKED_BLOCKS * each_bytes + SUM_BYTES * k
                factor = load_at(b, panels[i], where, F32X16)
                total = multiply_add(b, factor, parts[i][t], total)
            store_at(b, total, memory, place)
        return context.get_dummy_value()

    return types.void(kind, n_panels, tokens, *[types.intp] * 4), generate


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
