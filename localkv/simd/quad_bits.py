"""A plane of single bits beside codes that are bytes (`simd/quads.py`)."""

from __future__ import annotations

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from localkv.simd.kinds import Args, Builder, Intrinsic, Kind, Signature, Target, Typing, Value
from localkv.simd.lanes import LANES
from localkv.simd.quads import BYTES, QUAD
from localkv.simd.vector import I32x16, check_base, i8, i16, i32, lanes_of, pointer

MASK_BYTES = 2 * LANES * QUAD // 8


@intrinsic(prefer_literal=True)
def or_bits(typing: Typing, codes: Kind, bits: Kind, index: Kind, value: Kind) -> Intrinsic:
    """`codes`, two vectors of bytes, with `value` set in those whose bit is set.

    The bits of 16 low codes are the 16-bit item `index` of `bits`, those of the 16 high ones the
    next item, and so on for 4 rows, as for `quads.load_quads_of_five_bits`; but codes come
    transposed: byte i of lane t is byte t of row i.
    """
    check_base(bits)
    set_to = value.literal_value

    def generate(context: Target, builder: Builder, signature: Signature, args: Args) -> Value:
        where = pointer(context, builder, signature.args[1], args[1], args[2], i16)
        kind = lanes_of(i8, MASK_BYTES)
        masks = builder.load(builder.bitcast(where, kind.as_pointer()), align=1)
        places = [(lane, row) for lane in range(LANES) for row in range(QUAD)]
        one = ir.Constant(lanes_of(i8, BYTES), [1 << lane % 8 for lane, _ in places])
        zero = ir.Constant(lanes_of(i8, BYTES), [0] * BYTES)
        many = ir.Constant(lanes_of(i8, BYTES), [set_to] * BYTES)
        both = []
        for half in range(2):
            items = [(2 * row + half) * 2 + lane // 8 for lane, row in places]
            order = ir.Constant(lanes_of(i32, BYTES), items)
            spread = builder.shuffle_vector(masks, masks, order)
            is_set = builder.icmp_unsigned("!=", builder.and_(spread, one), zero)
            code = builder.bitcast(builder.extract_value(args[0], half), lanes_of(i8, BYTES))
            code = builder.or_(code, builder.select(is_set, many, zero))
            both.append(builder.bitcast(code, I32x16.llvm))
        return context.make_tuple(builder, signature.return_type, both)

    return codes(codes, bits, types.intp, value), generate
