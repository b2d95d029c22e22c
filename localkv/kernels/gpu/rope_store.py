"""Launches `store_kv.store_kernel`, with all that comes before it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from localkv.cache.kv_cache import LayerCache, Segment, SegmentBatch
from localkv.kernels.gpu.attention.packed_attention import padded
from localkv.kernels.gpu.launch import launch
from localkv.kernels.gpu.launch_bounds import check_rows, check_stored, check_turns
from localkv.kernels.gpu.store_kv import store_kernel
from localkv.kernels.layer_weights import Norm
from localkv.kernels.rope import RopeTable

FEW_TOKENS = 16
ROWS = 8
"""Tokens of a program, where there are more than a few."""


@dataclass(frozen=True)
class QueryKeySteps:
    """The steps of q and k on their way.

    Attributes:
        q_norm, k_norm: RMS norms of each head, with one eps, or both None.
        rope: fp32 table, or None.
        q_scale: fp32 [tokens], factors on q, or None.
    """

    q_norm: Norm | None = None
    k_norm: Norm | None = None
    rope: RopeTable | None = None
    q_scale: Tensor | None = None

    @property
    def eps(self) -> float:
        """Of the norms."""
        return 0.0 if self.k_norm is None else self.k_norm.spec.eps


def _store(
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    steps: QueryKeySteps,
    segment: Segment,
    batch: SegmentBatch,
    q_out: Tensor,
) -> None:
    check_stored(k, v, segment, batch)
    n_tokens, n_kv_heads, head_dim = k.shape
    n_heads = 0 if q is None else q.shape[1]
    if q is not None:
        check_rows(q, "q", n_tokens, n_heads, head_dim)
    if steps.rope is not None:
        check_turns(steps.rope, n_tokens, head_dim)
    n_stored = batch.slots.numel()
    most = max(n_stored, n_tokens if n_heads else 0)
    if most == 0:
        return
    rows = 1 if most <= FEW_TOKENS else ROWS
    rope = steps.rope
    launch(
        store_kernel,
        (triton.cdiv(most, rows), n_heads + 2 * n_kv_heads),
        q,
        k,
        v,
        None if steps.q_norm is None else steps.q_norm.weight,
        None if steps.k_norm is None else steps.k_norm.weight,
        None if rope is None else rope.cos,
        None if rope is None else rope.sin,
        steps.q_scale,
        batch.tokens,
        batch.slots,
        q_out,
        segment.k,
        segment.v,
        segment.scale_k,
        segment.scale_v,
        n_tokens,
        n_stored,
        steps.eps,
        WRITE_K=segment.format_k.part("gpu_cache").write_rows,
        WRITE_V=segment.format_v.part("gpu_cache").write_rows,
        N_HEADS=n_heads,
        N_KV_HEADS=n_kv_heads,
        HEAD_DIM=head_dim,
        WIDTH=padded(head_dim),
        ROWS=rows,
        NORM=steps.k_norm is not None,
        ROPE_DIMS=0 if rope is None else 2 * rope.cos.shape[1],
        INTERLEAVED=rope is not None and rope.interleaved,
        SCALE_Q=steps.q_scale is not None,
        ROTATION_K=segment.rotation_k,
        ROTATION_V=segment.rotation_v,
        SCALED_K=segment.scale_k is not None,
        SCALED_V=segment.scale_v is not None,
        num_warps=1 if rows == 1 else 4,
        enable_fp_fusion=False,
    )


def rope_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    steps: QueryKeySteps,
    cache: LayerCache,
    batches: tuple[SegmentBatch, ...],
) -> Tensor:
    """Norm and turn q and k, and store the rows of k and v in each segment's types.

    They are rotated and scaled by head as each segment wants them.

    Args:
        q: [tokens, n_heads, head_dim], contiguous.
        k, v: [tokens, n_kv_heads, head_dim], contiguous.

    Returns:
        q after norm, RoPE and scale, never rotated; of q's type.
    """
    out = torch.empty_like(q)
    for i, (segment, batch) in enumerate(zip(cache.segments, batches, strict=True)):
        _store(q if i == 0 else None, k, v, steps, segment, batch, out)
    return out
