"""Tiles of the CPU's products for two panels at once: 32 rows x 8 tokens.

A tile of one panel (`linear/tiles.py`) loads each word of the activations for one product only, and
loads are what it waits for: a core of Zen 5 starts two products of bytes in a cycle, and as many
loads of vectors. Two panels share them. Codes are read anew for every four tokens, as there are not
registers enough to keep them. Sums are those of the tile of one panel, bit for bit.
"""

from __future__ import annotations

from numba.core import cgutils, types
from numba.extending import intrinsic

from localkv.kernels.cpu.linear.job import ACTIVATION_BLOCK_BYTES
from localkv.kernels.cpu.linear.packing import (
    F32X16,
    SCALE,
    SECOND_START,
    START,
    PackedBlock,
    as_address,
    index_of,
    load_at,
)
from localkv.kernels.cpu.linear.tiles import (
    Sums,
    add_minima,
    dot_of_codes,
    multiplied_codes,
    opaque,
    put_sums,
)
from localkv.quant_formats.shared.cpu.panel_codes import (
    BLOCK_VECTORS,
    PanelFormat,
    Record,
    panel_format,
)
from localkv.quant_formats.shared.cpu.panel_layout import LANES
from localkv.simd.cpu_features import HAS_AVX512, HAS_VNNI
from localkv.simd.kinds import Args, Builder, Intrinsic, Kind, Signature, Target, Typing, Value
from localkv.simd.memory import emit_prefetch
from localkv.simd.vector import constant, f32, i32, splat

PAIR_FORMATS = ("q4_0", "q4_1", "q5_0") if HAS_AVX512 and HAS_VNNI else ()
"""Formats that gain. Codes are read twice, so that they must be made fast of what is stored, which
those of K-quants are not; and there have to be registers for the sums of two panels, and
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
        n_rows: rows of both that exist, more than those of the first.
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
            # behind its end is the other panel, which is read at the same time
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
