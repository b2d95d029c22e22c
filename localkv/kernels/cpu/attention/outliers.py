"""Outliers that some types keep on their own: what is missing to one value of two blocks of a row.

Their plane has a 16-bit item for each block of a token, in groups of 16 tokens. The item of the
first of two blocks is what is missing, as fp16. The second block's is the place among the 64 values
(`quant_formats/nuq`). Lanes are tokens.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from localkv.cache.layout import PAGE_TOKENS
from localkv.quant_formats.nuq import PAIR
from localkv.simd import LANES
from localkv.simd.arithmetic import fma, i32x16, zero_f32
from localkv.simd.integer import and_i32
from localkv.simd.kinds import Address, Count, Vectors
from localkv.simd.memory import (
    broadcast_f16,
    get_f32,
    get_u16,
    load_f16,
    load_f32,
    load_u16,
    put_f32,
    store_f32,
)
from localkv.simd.shuffle import add_turned_rows, gather_of_64, turn_rows

BLOCKS = 2


@njit
def add_outliers_to_logits(
    logits: Address, q: Address, n_rows: Count, plane: Address, group: Count, n_blocks: Count
) -> None:
    """logits += q times what is missing to K, of a group of 16 tokens.

    Args:
        logits: of the group's first token: float32 [n_rows, PAGE_TOKENS].
        q: float32 [n_rows, n_blocks * 32].
    """
    for block in range(0, n_blocks - 1, BLOCKS):
        unit = (group * n_blocks + block) * 16
        missing = load_f16(plane, unit)
        place = and_i32(load_u16(plane, unit + 16), i32x16(np.int32(PAIR - 1)))
        for row in range(n_rows):
            at = row * PAGE_TOKENS
            there = gather_of_64(q + (row * n_blocks + block) * 128, place)
            store_f32(logits, at, fma(there, missing, load_f32(logits, at)))


@njit
def add_outliers_to_output(
    out: Address,
    p: Address,
    zeros: Vectors,
    plane: Address,
    scratch: Address,
    n_tokens: Count,
    n_blocks: Count,
) -> None:
    """out += p times what is missing to V, of the first tokens of a page.

    A value has as many products as there are rows, at most 16: they are the lanes of its sum.

    Args:
        out: float32 [rows, n_blocks * 32].
        p: float32 [rows, PAGE_TOKENS], with zeros up to a multiple of 16 tokens.
        zeros: as many as there are rows.
        scratch: room for `OUTLIER_ROOM` floats.
    """
    turned = scratch + PAIR * LANES * 4
    for block in range(0, n_blocks - 1, BLOCKS):
        for place in range(PAIR):
            store_f32(scratch, place * LANES, zero_f32())
        for group in range((n_tokens + 15) // 16):
            turn_rows(p + group * LANES * 4, PAGE_TOKENS, zeros, turned)
            unit = (group * n_blocks + block) * 16
            for i in range(min(16, n_tokens - group * 16)):
                at = get_u16(plane, unit + 16 + i) % PAIR * LANES
                missing = broadcast_f16(plane, unit + i)
                weights = load_f32(turned, i * LANES)
                store_f32(scratch, at, fma(weights, missing, load_f32(scratch, at)))
        for first in range(0, PAIR, LANES):
            at = out + (block * 32 + first) * 4
            add_turned_rows(at, n_blocks * 32, zeros, scratch + first * LANES * 4)


@njit
def add_outliers_to_tile(
    out: Address,
    token_step: Count,
    channel_step: Count,
    plane: Address,
    scratch: Address,
    group: Count,
    n_blocks: Count,
) -> None:
    """Add what is missing to the decoded values of a group of 16 tokens.

    Args:
        out: float32, of the group's first token; strides are in floats.
        scratch: room for 16 floats.
    """
    for block in range(0, n_blocks - 1, BLOCKS):
        unit = (group * n_blocks + block) * 16
        store_f32(scratch, 0, load_f16(plane, unit))
        for i in range(16):
            place = block * 32 + get_u16(plane, unit + 16 + i) % PAIR
            at = i * token_step + place * channel_step
            put_f32(out, at, get_f32(out, at) + get_f32(scratch, i))
