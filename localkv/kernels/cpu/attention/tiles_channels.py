"""Prefill attention, the sides of K and V, for types with scales by channel: tiles of one page,
decoded to float32, as in `attention/tiles.py`.
"""

from __future__ import annotations

from numba import cfunc

from localkv.kernels.cpu.attention.sizes import TILE
from localkv.kernels.cpu.jit.parameters import parameter
from localkv.quant_formats import FORMATS
from localkv.simd import LANES
from localkv.simd.arithmetic import fma, zero_f32
from localkv.simd.kinds import Address, Count
from localkv.simd.memory import broadcast_f16, load_f16, store_f32

FORMAT = FORMATS[parameter("FORMAT", "q8_0c")]
facts, decode = FORMAT.cpu_layout, FORMAT.part("cpu").decode
TOKENS = FORMAT.group_tokens
BLOCK, AFFINE = facts.BLOCK, facts.AFFINE
OF_V = parameter("OF_V", False)
"""The side: K has tokens in its lanes, V channels."""


@cfunc("void(" + ", ".join(["int64"] * 9) + ")")
def decode_tile(
    out: Address,
    scratch: Address,
    plane0: Address,
    plane1: Address,
    plane2: Address,
    plane3: Address,
    codebook: Address,
    n_blocks: Count,
    first_group: Count,
) -> None:
    """`TILE` tokens from group `first_group` of 16 tokens on.

    Args:
        out: of K, transposed: float32 [n_blocks * BLOCK, TILE]; of V: [TILE, n_blocks * BLOCK].
        scratch: unused.
        plane0..3: the region of one page and KV head in each plane.
        codebook: of types without one not used.
    """
    planes, head_dim = (plane0, plane1, plane2, plane3), n_blocks * BLOCK
    for group in range(TILE // LANES):
        token = (first_group + group) * LANES
        for block in range(n_blocks):
            unit = (token // LANES * n_blocks + block) * LANES
            first = token // TOKENS * head_dim + block * BLOCK
            m = zero_f32(), zero_f32()
            if OF_V:
                d = load_f16(plane0, first), load_f16(plane0, first + LANES)
                if AFFINE:
                    m = load_f16(plane1, first), load_f16(plane1, first + LANES)
                for i in range(LANES):
                    values = decode(planes, unit + i)
                    at = (group * LANES + i) * head_dim + block * BLOCK
                    store_f32(out, at, fma(values[0], d[0], m[0]))
                    store_f32(out, at + LANES, fma(values[1], d[1], m[1]))
                continue
            for i in range(LANES):
                values = decode(planes, unit + i)
                at = (block * BLOCK + i) * TILE + group * LANES
                scales = broadcast_f16(plane0, first + i), broadcast_f16(plane0, first + LANES + i)
                if AFFINE:
                    m = broadcast_f16(plane1, first + i), broadcast_f16(plane1, first + LANES + i)
                store_f32(out, at, fma(values[0], scales[0], m[0]))
                store_f32(out, at + LANES * TILE, fma(values[1], scales[1], m[1]))
