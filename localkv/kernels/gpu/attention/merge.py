"""The sum of the splits' results of `attention_decode`, weighted by their log-sum-exp."""

from __future__ import annotations

import triton
import triton.language as tl

from localkv.kernels.gpu.attention.online_softmax import LOWEST


@triton.jit(do_not_specialize=["n_splits"])
def merge_kernel(
    parts_ptr,
    part_lse_ptr,
    sinks_ptr,
    out_ptr,
    lse_ptr,
    n_splits,
    N_HEADS: tl.constexpr,
    SPLITS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Grid (tokens, heads).

    Args:
        parts_ptr, part_lse_ptr: fp32 [tokens, heads, n_splits, HEAD_DIM] and [..., n_splits].
        sinks_ptr: fp32 [heads], logits of a key without a value, if SINKS.
        out_ptr, lse_ptr: [tokens, heads, HEAD_DIM] and fp32 [tokens, heads].
        SPLITS: a power of two, n_splits at least.
    """
    head = tl.program_id(1)
    row = tl.program_id(0).to(tl.int64) * N_HEADS + head
    i = tl.arange(0, SPLITS)
    j = tl.arange(0, WIDTH)
    lse = tl.load(part_lse_ptr + row * n_splits + i, mask=i < n_splits, other=-float("inf"))
    largest = tl.maximum(tl.max(lse, 0), LOWEST)
    if SINKS:
        sink = tl.load(sinks_ptr + head)
        largest = tl.maximum(largest, sink)
    weights = tl.exp(lse - largest)
    total = tl.sum(weights, 0)
    if SINKS:
        total += tl.exp(sink - largest)
    parts = tl.load(
        parts_ptr + (row * n_splits + i)[:, None] * HEAD_DIM + j[None, :],
        mask=(weights != 0)[:, None] & (j < HEAD_DIM)[None, :],
        other=0.0,
    )
    seen = total != 0  # NaN too, so that it shows
    out = tl.sum(parts * weights[:, None], 0) / tl.where(seen, total, 1.0)
    tl.store(out_ptr + row * HEAD_DIM + j, out, mask=j < HEAD_DIM)
    tl.store(lse_ptr + row, tl.where(seen, largest + tl.log(total), -float("inf")))
