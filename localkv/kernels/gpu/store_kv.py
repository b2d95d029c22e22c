"""From the projections to the pages: norm, RoPE, rotation, packing and storing, in one launch.

Everything is computed in fp32 without fused multiply-adds, as the reference does it, and rows are
packed byte for byte as ggml packs them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from localkv.cache.layout import PAGE_TOKENS
from localkv.kernels.gpu.hadamard import hadamard

PAGE = tl.constexpr(PAGE_TOKENS)


@triton.jit
def load_head(x_ptr, row, mask, channel, HEAD_DIM: tl.constexpr):
    """Channels of heads, fp32 [rows, channels]; `row` counts heads of all tokens."""
    at = row[:, None] * HEAD_DIM + channel[None, :]
    return tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def normed_and_turned(
    x_ptr,
    norm_ptr,
    cos_ptr,
    sin_ptr,
    row,
    token,
    valid,
    eps,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    NORM: tl.constexpr,
    ROPE_DIMS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Heads [rows, WIDTH] after their RMS norm and RoPE; a pair's other channel is loaded again."""
    j = tl.arange(0, WIDTH)
    mask = valid[:, None] & (j < HEAD_DIM)[None, :]
    x = load_head(x_ptr, row, mask, j, HEAD_DIM)
    if NORM:
        scale = tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(tl.sum(x * x, 1), HEAD_DIM * 1.0) + eps))
        weight = tl.load(norm_ptr + j, mask=j < HEAD_DIM, other=0.0)
        x = x * scale[:, None] * weight[None, :]
    if ROPE_DIMS > 0:
        half: tl.constexpr = ROPE_DIMS // 2
        if INTERLEAVED:
            pair, other, first = j // 2, j ^ 1, j % 2 == 0
        else:
            first = j < half
            pair = tl.where(first, j, j - half)
            other = tl.where(first, j + half, j - half)
        turns = mask & (j < ROPE_DIMS)[None, :]
        y = load_head(x_ptr, row, turns, other, HEAD_DIM)
        if NORM:
            weight = tl.load(norm_ptr + other, mask=j < ROPE_DIMS, other=0.0)
            y = y * scale[:, None] * weight[None, :]
        at = token[:, None] * half + pair[None, :]
        cos = tl.load(cos_ptr + at, mask=turns, other=1.0)
        sin = tl.load(sin_ptr + at, mask=turns, other=0.0)
        x = x * cos + tl.where(first[None, :], -y, y) * sin
    return x


@triton.jit(do_not_specialize=["n_tokens", "n_stored"])
def store_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    q_norm_ptr,
    k_norm_ptr,
    cos_ptr,
    sin_ptr,
    q_scale_ptr,
    tokens_ptr,
    slots_ptr,
    q_out_ptr,
    k_planes,
    v_planes,
    k_scale_ptr,
    v_scale_ptr,
    n_tokens,
    n_stored,
    eps,
    WRITE_K: tl.constexpr,
    WRITE_V: tl.constexpr,
    N_HEADS: tl.constexpr,
    N_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    NORM: tl.constexpr,
    ROPE_DIMS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    SCALE_Q: tl.constexpr,
    ROTATION_K: tl.constexpr,
    ROTATION_V: tl.constexpr,
    SCALED_K: tl.constexpr,
    SCALED_V: tl.constexpr,
):
    """Grid (blocks of ROWS tokens, N_HEADS + 2 N_KV_HEADS): heads of q, of k, of v.

    Args:
        q_ptr, k_ptr, v_ptr: [n_tokens, heads, HEAD_DIM], as projected; without q N_HEADS is 0.
        q_norm_ptr, k_norm_ptr: fp32 [HEAD_DIM], if NORM.
        cos_ptr, sin_ptr: fp32 [n_tokens, ROPE_DIMS / 2]; see `RopeTable`.
        q_scale_ptr: fp32 [n_tokens], factors on q, if SCALE_Q.
        tokens_ptr, slots_ptr: int64 [n_stored], tokens whose rows are stored, and where.
        q_out_ptr: [n_tokens, N_HEADS, HEAD_DIM].
        k_planes, v_planes: tuples of uint8 pointers.
        k_scale_ptr, v_scale_ptr: fp32 [N_KV_HEADS], rows are divided by it, if SCALED_K, SCALED_V.
        ROTATION_K, ROTATION_V: channels that are rotated together, or 0.
    """
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1)
    j = tl.arange(0, WIDTH)
    if head < N_HEADS:
        valid = i < n_tokens
        row = i.to(tl.int64) * N_HEADS + head
        q = normed_and_turned(
            q_ptr,
            q_norm_ptr,
            cos_ptr,
            sin_ptr,
            row,
            i,
            valid,
            eps,
            HEAD_DIM,
            WIDTH,
            NORM,
            ROPE_DIMS,
            INTERLEAVED,
        )
        if SCALE_Q:
            q = q * tl.load(q_scale_ptr + i, mask=valid, other=1.0)[:, None]
        at = row[:, None] * HEAD_DIM + j[None, :]
        mask = valid[:, None] & (j < HEAD_DIM)[None, :]
        tl.store(q_out_ptr + at, q.to(q_out_ptr.dtype.element_ty), mask=mask)
    else:
        valid = i < n_stored
        token = tl.load(tokens_ptr + i, mask=valid, other=0)
        slot = tl.load(slots_ptr + i, mask=valid, other=0)
        kv_head = (head - N_HEADS) % N_KV_HEADS
        row = token * N_KV_HEADS + kv_head
        stored = (slot // PAGE * N_KV_HEADS + kv_head) * PAGE + slot % PAGE
        if head < N_HEADS + N_KV_HEADS:
            k = normed_and_turned(
                k_ptr,
                k_norm_ptr,
                cos_ptr,
                sin_ptr,
                row,
                token,
                valid,
                eps,
                HEAD_DIM,
                WIDTH,
                NORM,
                ROPE_DIMS,
                INTERLEAVED,
            )
            k = hadamard(k, ROTATION_K)
            if SCALED_K:
                k = tl.div_rn(k, tl.load(k_scale_ptr + kv_head))
            WRITE_K(k_planes, stored, valid, k, HEAD_DIM, WIDTH)
        else:
            mask = valid[:, None] & (j < HEAD_DIM)[None, :]
            v = load_head(v_ptr, row, mask, j, HEAD_DIM)
            v = hadamard(v, ROTATION_V)
            if SCALED_V:
                v = tl.div_rn(v, tl.load(v_scale_ptr + kv_head))
            WRITE_V(v_planes, stored, valid, v, HEAD_DIM, WIDTH)
