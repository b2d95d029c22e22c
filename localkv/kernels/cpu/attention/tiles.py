"""Prefill attention, the sides of K and V: tiles of one page, decoded to float32.

Compiled for each type (the decoder) and side. A tile is small enough to stay in the caches of one
core.
"""

from __future__ import annotations

import numpy as np
from numba import cfunc

from localkv.kernels.cpu.attention.outliers import add_outliers_to_tile
from localkv.kernels.cpu.attention.sizes import TILE
from localkv.kernels.cpu.jit.parameters import parameter
from localkv.quant_formats import KV_FORMATS
from localkv.simd.arithmetic import f32x16, zero_f32
from localkv.simd.kinds import Address, Count
from localkv.simd.memory import broadcast_f32, load_f16, store_f32
from localkv.simd.vector import mul_add_all, store_tuple

FORMAT = KV_FORMATS[parameter("FORMAT", "q8_0")]
facts, decode = FORMAT.cpu_layout, FORMAT.part("cpu").decode
ROW_SCALES = parameter("ROW_SCALES", 0)
"""The plane of the scales of whole rows, or 0 for none."""
ROW_MINIMA = parameter("ROW_MINIMA", 0)
"""Likewise for minima."""
OUTLIERS = getattr(facts, "OUTLIERS", 0)
"""The plane of outliers, or 0 for none."""
BLOCK, SCALED, AFFINE = facts.BLOCK, facts.SCALED, facts.AFFINE
HAS_SCALE = SCALED or ROW_SCALES > 0
OF_V = parameter("OF_V", False)
"""The side: K has tokens in its lanes, V channels."""
ONE = np.float32(1)


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
    """`TILE` tokens from group `first_group` on.

    Args:
        out: of K, transposed: float32 [n_blocks * BLOCK, TILE]; of V: [TILE, n_blocks * BLOCK].
        scratch: room for 32 floats.
        plane0..3: the region of one page and KV head in each plane.
        codebook: float32 [16], of types with one.
    """
    planes = (plane0, plane1, plane2, plane3, codebook)
    for group in range(TILE // 16):
        for block in range(n_blocks):
            unit = ((first_group + group) * n_blocks + block) * 16
            scale, minimum = f32x16(ONE), zero_f32()
            if SCALED:
                scale = load_f16(plane0, unit)
            if ROW_SCALES:
                scale = load_f16(planes[ROW_SCALES], (first_group + group) * 16)
            if OF_V and HAS_SCALE:
                store_f32(scratch, 0, scale)
            if AFFINE:
                if ROW_MINIMA:
                    minimum = load_f16(planes[ROW_MINIMA], (first_group + group) * 16)
                else:
                    minimum = load_f16(plane1, unit)
                if OF_V:
                    store_f32(scratch, 16, minimum)
            for i in range(16):
                token = group * 16 + i
                if OF_V:
                    if HAS_SCALE:
                        scale = broadcast_f32(scratch, i)
                    if AFFINE:
                        minimum = broadcast_f32(scratch, 16 + i)
                values = decode(planes, unit + i)
                if HAS_SCALE:
                    values = mul_add_all(values, scale, minimum)
                if OF_V:
                    store_tuple(out, (token * n_blocks + block) * BLOCK, 16, values)
                else:
                    store_tuple(out, (block * BLOCK + i) * TILE + group * 16, 16 * TILE, values)
        if OUTLIERS:
            steps = (n_blocks * BLOCK, 1) if OF_V else (1, TILE)
            at = out + group * 16 * steps[0] * 4
            where = first_group + group
            add_outliers_to_tile(at, *steps, planes[OUTLIERS], scratch, where, n_blocks)
