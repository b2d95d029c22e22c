"""Launches `store_kv.store_kernel`, with all that comes before it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import triton
from torch import Tensor

from localkv.cache.arrays import LayerCache, Segment, SegmentBatch
from localkv.kernels.gpu.attention.packed_attention import padded
from localkv.kernels.gpu.launch import launch
from localkv.kernels.gpu.launch_bounds import check_rows, check_stored, check_turns, check_weight
from localkv.kernels.gpu.norm import norm
from localkv.kernels.gpu.pages import page_bytes
from localkv.kernels.gpu.store_kv import query_kernel, store_kernel
from localkv.kernels.layer_weights import Norm
from localkv.kernels.rope import RopeTable

FEW_TOKENS = 16
ROWS = 8
"""Tokens of a program, where there are more than a few."""


@dataclass(frozen=True)
class QueryKeySteps:
    """The steps of q, k and v on their way.

    Attributes:
        q_norm, k_norm: of a kind and with one eps, or None.
        rope: fp32 table, or None.
        q_scale: fp32 [tokens], factors on q, or None.
        after_rope: `q_norm` and `k_norm` come after RoPE; then they are of heads, without biases.
        v_norm: an RMS norm of each head of v, with the same eps, or None.
    """

    q_norm: Norm | None = None
    k_norm: Norm | None = None
    rope: RopeTable | None = None
    q_scale: Tensor | None = None
    after_rope: bool = False
    v_norm: Norm | None = None

    @property
    def of_heads(self) -> Norm | None:
        """The norm of q or k, if it is one that the kernel has."""
        return self.q_norm or self.k_norm

    def arguments(self, n_tokens: int, head_dim: int) -> dict[str, Any]:
        """The arguments that `store_kernel` and `query_kernel` share, but for the norm of k."""
        rope, of_heads = self.rope, self.of_heads
        if rope is not None:
            check_turns(rope, n_tokens, head_dim)
        any_norm = of_heads or self.v_norm
        return {
            "q_norm_ptr": None if self.q_norm is None else self.q_norm.weight,
            "cos_ptr": None if rope is None else rope.cos,
            "sin_ptr": None if rope is None else rope.sin,
            "q_scale_ptr": self.q_scale,
            "eps": 0.0 if any_norm is None else any_norm.spec.eps,
            "NORM_Q": self._place(self.q_norm),
            "CENTRED": of_heads is not None and of_heads.spec.kind == "layer",
            "PER_HEAD": of_heads is not None and of_heads.spec.span == "heads",
            "ROPE_DIMS": 0 if rope is None else 2 * rope.cos.shape[1],
            "INTERLEAVED": rope is not None and rope.interleaved,
        }

    def _place(self, of_heads: Norm | None) -> str:
        if of_heads is None:
            return ""
        return "after" if self.after_rope else "before"

    def of_keys(self) -> dict[str, Any]:
        """Further arguments of `store_kernel`."""
        return {
            "k_norm_ptr": None if self.k_norm is None else self.k_norm.weight,
            "v_norm_ptr": None if self.v_norm is None else self.v_norm.weight,
            "NORM_K": self._place(self.k_norm),
        }


def _is_of_heads(by: Norm) -> bool:
    """Whether the kernels have a norm: others need all heads of a token, or have biases."""
    return by.spec.span != "row" and by.bias is None


def _normed_first(x: Tensor, by: Norm, stride: int) -> Tensor:
    """q or k [tokens, heads, channels] after a norm that the kernels don't have, in a launch."""
    if stride != x.shape[2]:
        x = x.contiguous()
    if by.spec.span == "row":
        return norm(x.flatten(1), by).view(x.shape)
    return norm(x, by)


def _rows_of_program(n_tokens: int) -> int:
    return 1 if n_tokens <= FEW_TOKENS else ROWS


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
    for by, heads in ((steps.q_norm, n_heads), (steps.k_norm, n_kv_heads)):
        if by is not None and heads:
            check_weight(by, heads, head_dim)
    if steps.v_norm is not None:
        check_weight(steps.v_norm, n_kv_heads, v.shape[2])
    n_stored = batch.slots.numel()
    most = max(n_stored, n_tokens if n_heads else 0)
    if most == 0:
        return
    rows = _rows_of_program(most)
    launch(
        store_kernel,
        (triton.cdiv(most, rows), n_heads + 2 * n_kv_heads),
        q_ptr=q,
        k_ptr=k,
        v_ptr=v,
        tokens_ptr=batch.tokens,
        slots_ptr=batch.slots,
        q_out_ptr=q_out,
        k_planes=segment.operands_k,
        v_planes=segment.operands_v,
        k_scale_ptr=segment.scale_k,
        v_scale_ptr=segment.scale_v,
        n_tokens=n_tokens,
        n_stored=n_stored,
        WRITE_K=segment.format_k.part("gpu").write_rows,
        WRITE_V=segment.format_v.part("gpu").write_rows,
        N_HEADS=n_heads,
        N_KV_HEADS=n_kv_heads,
        HEAD_DIM=head_dim,
        WIDTH=padded(head_dim),
        VALUE_DIM=v.shape[2],
        VALUE_WIDTH=padded(v.shape[2]),
        Q_STRIDE=head_dim if q is None else q.stride(1),
        ROWS=rows,
        ROTATION_K=segment.rotation_k,
        ROTATION_V=segment.rotation_v,
        PAGE_BYTES=page_bytes(segment),
        **steps.arguments(n_tokens, head_dim),
        **steps.of_keys(),
        num_warps=1 if rows == 1 else 4,
        enable_fp_fusion=False,
    )


def store_rows(
    k: Tensor, v: Tensor, steps: QueryKeySteps, cache: LayerCache, batches: tuple[SegmentBatch, ...]
) -> None:
    """Store rows of k and v alone, as `rope_store` does."""
    for segment, batch in zip(cache.segments, batches, strict=True):
        _store(None, k, v, steps, segment, batch, k)


def turn_queries(q: Tensor, steps: QueryKeySteps) -> Tensor:
    """q alone, as `rope_store` gives it; a layer that stores nothing has no more."""
    q, steps = _prepared(q, steps)
    n_tokens, n_heads, head_dim = q.shape
    check_rows(q, "q", n_tokens, n_heads, head_dim)
    if steps.q_norm is not None:
        check_weight(steps.q_norm, n_heads, head_dim)
    out = q.new_empty(q.shape)
    rows = _rows_of_program(n_tokens)
    launch(
        query_kernel,
        (triton.cdiv(n_tokens, rows), n_heads),
        q_ptr=q,
        q_out_ptr=out,
        n_tokens=n_tokens,
        N_HEADS=n_heads,
        HEAD_DIM=head_dim,
        WIDTH=padded(head_dim),
        Q_STRIDE=q.stride(1),
        ROWS=rows,
        **steps.arguments(n_tokens, head_dim),
        num_warps=1 if rows == 1 else 4,
        enable_fp_fusion=False,
    )
    return out


def _prepared(q: Tensor, steps: QueryKeySteps) -> tuple[Tensor, QueryKeySteps]:
    """q after a norm that the kernels don't have."""
    if steps.q_norm is None or _is_of_heads(steps.q_norm):
        return q, steps
    return _normed_first(q, steps.q_norm, q.stride(1)), replace(steps, q_norm=None)


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
        q: [tokens, n_heads, head_dim]; heads may be further apart.
        k: [tokens, n_kv_heads, head_dim], contiguous.
        v: [tokens, n_kv_heads, value_dim], contiguous.

    Returns:
        q after norm, RoPE and scale, never rotated; of q's type.
    """
    q, steps = _prepared(q, steps)
    check_rows(q, "q", *q.shape)
    if steps.k_norm is not None and not _is_of_heads(steps.k_norm):
        k, steps = _normed_first(k, steps.k_norm, k.shape[2]), replace(steps, k_norm=None)
    out = q.new_empty(q.shape)
    pairs = zip(cache.segments, batches, strict=True)
    storing = [(segment, batch) for segment, batch in pairs if not segment.is_whole]
    # of several segments the last one stores rows as they come
    for segment, batch in storing:
        _store(q if segment is storing[-1][0] else None, k, v, steps, segment, batch, out)
    return out
