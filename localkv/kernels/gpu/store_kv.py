"""From the projections to the pages: norm, RoPE, rotation, packing and storing, in one launch.

Everything is computed in fp32 without fused multiply-adds, as the reference does it, and rows are
packed byte for byte as ggml packs them.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

from localkv.cache.layout import PAGE_TOKENS
from localkv.kernels.gpu.pages import in_page, row_before


@triton.constexpr_function
def log2(n):
    """The exponent of a power of two."""
    return n.bit_length() - 1


@triton.constexpr_function
def inverse_root(n):
    """1 / sqrt(n)."""
    return 1 / math.sqrt(n)


@triton.jit
def hadamard(x, BLOCK: tl.constexpr):
    """x [rows, n], fp32, times the normalised matrix in blocks of the last axis; 0 leaves it."""
    if BLOCK > 0:
        rows: tl.constexpr = x.shape[0]
        blocks: tl.constexpr = x.shape[1] // BLOCK
        for _ in tl.static_range(log2(BLOCK)):
            even, odd = tl.split(tl.reshape(x, (rows, blocks, BLOCK // 2, 2)))
            sums = tl.permute(tl.join(even + odd, even - odd), (0, 1, 3, 2))
            x = tl.reshape(sums, (rows, blocks * BLOCK))
        x = x * inverse_root(BLOCK)
    return x


PAGE = tl.constexpr(PAGE_TOKENS)


@triton.jit
def load_head(x_ptr, row, mask, channel, STRIDE: tl.constexpr):
    """Channels of heads, fp32 [rows, channels]; `row` counts heads of all tokens, which are STRIDE
    apart."""
    at = row[:, None] * STRIDE + channel[None, :]
    return tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def mean(x, HEAD_DIM: tl.constexpr):
    return tl.div_rn(tl.sum(x, 1), HEAD_DIM * 1.0)[:, None]


@triton.jit
def inverse_deviation(x, eps, HEAD_DIM: tl.constexpr):
    """[rows, 1], of heads [rows, WIDTH] whose further channels are 0."""
    return tl.div_rn(1.0, tl.sqrt_rn(mean(x * x, HEAD_DIM) + eps))


@triton.jit
def norm_weight(norm_ptr, head, channel, mask, HEAD_DIM: tl.constexpr, PER_HEAD: tl.constexpr):
    """[1, channels], of a head or of all."""
    at = norm_ptr + channel
    if PER_HEAD:
        at += head * HEAD_DIM
    return tl.load(at, mask=mask, other=0.0)[None, :]


@triton.jit
def normed(
    x, norm_ptr, head, eps, HEAD_DIM: tl.constexpr, CENTRED: tl.constexpr, PER_HEAD: tl.constexpr
):
    """Heads [rows, WIDTH], whose further channels are 0, after their norm."""
    j = tl.arange(0, x.shape[1])
    exists = j < HEAD_DIM
    if CENTRED:
        x = tl.where(exists[None, :], x - mean(x, HEAD_DIM), 0.0)
    scale = inverse_deviation(x, eps, HEAD_DIM)
    return x * scale * norm_weight(norm_ptr, head, j, exists, HEAD_DIM, PER_HEAD)


@triton.jit
def normed_and_turned(
    x_ptr, norm_ptr, cos_ptr, sin_ptr, row, head, token, valid, eps,
    HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, STRIDE: tl.constexpr, NORM: tl.constexpr,
    CENTRED: tl.constexpr, PER_HEAD: tl.constexpr, ROPE_DIMS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Heads [rows, WIDTH] after their norm and RoPE; a pair's other channel is loaded again."""
    j = tl.arange(0, WIDTH)
    mask = valid[:, None] & (j < HEAD_DIM)[None, :]
    x = load_head(x_ptr, row, mask, j, STRIDE)
    if NORM == "before":
        if CENTRED:
            middle = mean(x, HEAD_DIM)
            x = tl.where((j < HEAD_DIM)[None, :], x - middle, 0.0)
        scale = inverse_deviation(x, eps, HEAD_DIM)
        x = x * scale * norm_weight(norm_ptr, head, j, j < HEAD_DIM, HEAD_DIM, PER_HEAD)
    if ROPE_DIMS > 0:
        half: tl.constexpr = ROPE_DIMS // 2
        if INTERLEAVED:
            pair, other, first = j // 2, j ^ 1, j % 2 == 0
        else:
            first = j < half
            pair = tl.where(first, j, j - half)
            other = tl.where(first, j + half, j - half)
        turns = mask & (j < ROPE_DIMS)[None, :]
        y = load_head(x_ptr, row, turns, other, STRIDE)
        if NORM == "before":
            if CENTRED:
                y = y - middle
            weight = norm_weight(norm_ptr, head, other, j < ROPE_DIMS, HEAD_DIM, PER_HEAD)
            y = y * scale * weight
        at = token[:, None] * half + pair[None, :]
        cos = tl.load(cos_ptr + at, mask=turns, other=1.0)
        sin = tl.load(sin_ptr + at, mask=turns, other=0.0)
        x = x * cos + tl.where(first[None, :], -y, y) * sin
    if NORM == "after":
        x = normed(x, norm_ptr, head, eps, HEAD_DIM, CENTRED, PER_HEAD)
    return x


@triton.jit
def turn_query(
    q_ptr, norm_ptr, cos_ptr, sin_ptr, scale_ptr, out_ptr, i, head, n_tokens, eps,
    N_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, STRIDE: tl.constexpr,
    NORM: tl.constexpr, CENTRED: tl.constexpr, PER_HEAD: tl.constexpr, ROPE_DIMS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """A head of q of tokens `i`, normed, turned and scaled."""
    j = tl.arange(0, WIDTH)
    valid = i < n_tokens
    row = i.to(tl.int64) * N_HEADS + head
    q = normed_and_turned(
        q_ptr, norm_ptr, cos_ptr, sin_ptr, row, head, i, valid, eps,
        HEAD_DIM, WIDTH, STRIDE, NORM, CENTRED, PER_HEAD, ROPE_DIMS, INTERLEAVED,
    )  # fmt: skip
    if scale_ptr is not None:
        q = q * tl.load(scale_ptr + i, mask=valid, other=1.0)[:, None]
    at = row[:, None] * HEAD_DIM + j[None, :]
    mask = valid[:, None] & (j < HEAD_DIM)[None, :]
    tl.store(out_ptr + at, q.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["n_tokens"])
def query_kernel(
    q_ptr, q_norm_ptr, cos_ptr, sin_ptr, q_scale_ptr, q_out_ptr, n_tokens, eps,
    N_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, Q_STRIDE: tl.constexpr,
    ROWS: tl.constexpr, NORM_Q: tl.constexpr, CENTRED: tl.constexpr, PER_HEAD: tl.constexpr,
    ROPE_DIMS: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """q alone, where another layer's K and V are read. Grid (blocks of ROWS tokens, heads);
    arguments as of `store_kernel`."""
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    turn_query(
        q_ptr, q_norm_ptr, cos_ptr, sin_ptr, q_scale_ptr, q_out_ptr, i, tl.program_id(1), n_tokens,
        eps, N_HEADS, HEAD_DIM, WIDTH, Q_STRIDE, NORM_Q, CENTRED, PER_HEAD, ROPE_DIMS, INTERLEAVED,
    )  # fmt: skip


@triton.jit(do_not_specialize=["n_tokens", "n_stored"])
def store_kernel(
    q_ptr, k_ptr, v_ptr, q_norm_ptr, k_norm_ptr, v_norm_ptr, cos_ptr, sin_ptr, q_scale_ptr,
    tokens_ptr, slots_ptr, q_out_ptr, k_planes, v_planes, k_scale_ptr, v_scale_ptr, n_tokens,
    n_stored, eps,
    WRITE_K: tl.constexpr, WRITE_V: tl.constexpr, N_HEADS: tl.constexpr, N_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    Q_STRIDE: tl.constexpr, ROWS: tl.constexpr, NORM_Q: tl.constexpr, NORM_K: tl.constexpr,
    CENTRED: tl.constexpr, PER_HEAD: tl.constexpr, ROPE_DIMS: tl.constexpr,
    INTERLEAVED: tl.constexpr, ROTATION_K: tl.constexpr, ROTATION_V: tl.constexpr,
    PAGE_BYTES: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of ROWS tokens, N_HEADS + 2 N_KV_HEADS): heads of q, of k, of v.

    Args:
        q_ptr: [n_tokens, N_HEADS, Q_STRIDE]; the first HEAD_DIM channels are q as it was
            projected; without q N_HEADS is 0.
        k_ptr, v_ptr: [n_tokens, N_KV_HEADS, HEAD_DIM or VALUE_DIM], as projected.
        q_norm_ptr, k_norm_ptr: fp32 [HEAD_DIM], or with PER_HEAD [heads, HEAD_DIM], if NORM_Q and
            NORM_K are "before" or "after" RoPE, or "".
        v_norm_ptr: fp32 [VALUE_DIM], of an RMS norm of each head of v, or None.
        cos_ptr, sin_ptr: fp32 [n_tokens, ROPE_DIMS / 2]; see `RopeTable`.
        q_scale_ptr: fp32 [n_tokens], factors on q, or None.
        tokens_ptr, slots_ptr: int64 [n_stored], tokens whose rows are stored, and where.
        q_out_ptr: [n_tokens, N_HEADS, HEAD_DIM].
        k_planes, v_planes: tuples of uint8 pointers.
        k_scale_ptr, v_scale_ptr: fp32 [N_KV_HEADS], rows are divided by it, or None.
        eps: of all norms.
        WIDTH, VALUE_WIDTH: powers of two that HEAD_DIM and VALUE_DIM fit in.
        CENTRED: norms of q and k are LayerNorms.
        ROTATION_K, ROTATION_V: channels that are rotated together, or 0.
        PAGE_BYTES: see `pages.py`.
    """
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1)
    if N_HEADS > 0:  # else there is no q, and code for its heads would not compile
        if head < N_HEADS:
            turn_query(
                q_ptr, q_norm_ptr, cos_ptr, sin_ptr, q_scale_ptr, q_out_ptr, i, head, n_tokens, eps,
                N_HEADS, HEAD_DIM, WIDTH, Q_STRIDE, NORM_Q, CENTRED, PER_HEAD, ROPE_DIMS,
                INTERLEAVED,
            )  # fmt: skip
    if head >= N_HEADS:
        valid = i < n_stored
        token = tl.load(tokens_ptr + i, mask=valid, other=0)
        slot = tl.load(slots_ptr + i, mask=valid, other=0)
        kv_head = (head - N_HEADS) % N_KV_HEADS
        row = token * N_KV_HEADS + kv_head
        page = slot // PAGE
        stored = row_before(page, kv_head, N_KV_HEADS, PAGE_BYTES) + slot % PAGE
        if head < N_HEADS + N_KV_HEADS:
            k = normed_and_turned(
                k_ptr, k_norm_ptr, cos_ptr, sin_ptr, row, kv_head, token, valid, eps,
                HEAD_DIM, WIDTH, HEAD_DIM, NORM_K, CENTRED, PER_HEAD, ROPE_DIMS, INTERLEAVED,
            )  # fmt: skip
            k = hadamard(k, ROTATION_K)
            if k_scale_ptr is not None:
                k = tl.div_rn(k, tl.load(k_scale_ptr + kv_head))
            WRITE_K(in_page(k_planes, page[:, None], PAGE_BYTES), stored, valid, k, HEAD_DIM, WIDTH)
        else:
            j = tl.arange(0, VALUE_WIDTH)
            mask = valid[:, None] & (j < VALUE_DIM)[None, :]
            v = load_head(v_ptr, row, mask, j, VALUE_DIM)
            if v_norm_ptr is not None:
                v = normed(v, v_norm_ptr, kv_head, eps, VALUE_DIM, False, False)
            v = hadamard(v, ROTATION_V)
            if v_scale_ptr is not None:
                v = tl.div_rn(v, tl.load(v_scale_ptr + kv_head))
            WRITE_V(
                in_page(v_planes, page[:, None], PAGE_BYTES),
                stored,
                valid,
                v,
                VALUE_DIM,
                VALUE_WIDTH,
            )
