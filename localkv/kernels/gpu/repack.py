"""Packing a page of rows in other types on a GPU, layer by layer.

Rows are unpacked by the readers of attention, into float32 memory of a layer's page, and packed by
the kernel that stores new rows, or, in types that pack several tokens together, by the one that
packs groups. So the bytes are those that `cache/repack.py` would make of the
values that attention reads, which it rounds to fp16 where it multiplies in fp16.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from localkv.cache.arrays import LayerCache, Segment, SegmentBatch
from localkv.cache.layout import PAGE_TOKENS
from localkv.cache.repack import Copies, put_copies, stays
from localkv.kernels.bounds import BoundsError, check_segment
from localkv.kernels.gpu.attention.packed_attention import padded
from localkv.kernels.gpu.attention.softmax import store_outputs
from localkv.kernels.gpu.device import GpuInfo
from localkv.kernels.gpu.group_store import pack_rows_gpu, rotate_gpu
from localkv.kernels.gpu.launch import launch
from localkv.kernels.gpu.pages import in_page, page_bytes, row_before
from localkv.kernels.gpu.rope_store import QueryKeySteps, store_rows
from localkv.quant_formats.shared.channel_groups import TOKENS as GROUP_TOKENS

Side = Literal["k", "v"]
SIDES: tuple[Side, Side] = ("k", "v")
TOKENS = 32
"""Rows of a program."""


@triton.jit(do_not_specialize=["page"])
def unpack_kernel(
    planes,
    out_ptr,
    page,
    READ: tl.constexpr,
    COLUMNS: tl.constexpr,
    UNIT: tl.constexpr,
    N_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    PAGE_BYTES: tl.constexpr,
    PTX: tl.constexpr,
):
    """Grid (blocks of TOKENS rows, KV heads).

    Args:
        planes: tuple of uint8 pointers.
        out_ptr: fp32 [PAGE_TOKENS, N_KV_HEADS, HEAD_DIM].
        page: whose rows are unpacked.
        PAGE_BYTES: see `pages.py`.
    """
    head = tl.program_id(1)
    at = tl.program_id(0) * TOKENS
    token = at + tl.arange(0, TOKENS)
    valid = token >= 0
    page = tl.cast(page, tl.int64)
    first_row = row_before(page, head, N_KV_HEADS, PAGE_BYTES) + at
    first_row = tl.multiple_of(first_row, TOKENS)
    planes = in_page(planes, page, PAGE_BYTES)
    low, high = READ(planes, first_row, valid, HEAD_DIM, WIDTH, PTX)
    j_low, j_high = COLUMNS(WIDTH)
    row = token * N_KV_HEADS + head
    low, high = low.to(tl.float32) * UNIT, high.to(tl.float32) * UNIT
    store_outputs(out_ptr, low, row, valid, j_low, HEAD_DIM, COLUMNS=False)
    store_outputs(out_ptr, high, row, valid, j_high, HEAD_DIM, COLUMNS=False)


def unpack_page(gpu: GpuInfo, segment: Segment, side: Side, page: int) -> Tensor:
    """The rows of a page as attention reads them, rotated as they are stored: float32
    [PAGE_TOKENS, n_kv_heads, channels]."""
    fmt, planes = getattr(segment, f"format_{side}"), getattr(segment, side)
    n_pages, n_kv_heads = planes[0].shape[:2]
    if not 0 <= page < n_pages:
        raise BoundsError(f"page {page} of {n_pages}")
    head_dim = planes[0].shape[3] * fmt.block_size
    codec = fmt.part("gpu")
    shape = (PAGE_TOKENS, n_kv_heads, head_dim)
    out = torch.empty(shape, dtype=torch.float32, device=planes[0].device)
    launch(
        unpack_kernel,
        (PAGE_TOKENS // TOKENS, n_kv_heads),
        planes,
        out,
        page,
        READ=codec.read_tile,
        COLUMNS=codec.columns,
        UNIT=getattr(codec, "UNIT", 1.0),
        N_KV_HEADS=n_kv_heads,
        HEAD_DIM=head_dim,
        WIDTH=padded(head_dim),
        TOKENS=TOKENS,
        PAGE_BYTES=page_bytes(segment),
        PTX=gpu.ptx,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return out


def repack_page_gpu(gpu: GpuInfo, source: Segment, target: Segment, page: int) -> None:
    """As `cache/repack.py` has it, of the values that attention reads; nothing asks the host."""
    key_dim = source.k[0].shape[3] * source.format_k.block_size
    for segment in (source, target):
        check_segment(segment, key_dim, source.value_dim, pages_apart=True)
    kept: Copies = {
        side: [plane[page : page + 1].clone() for plane in getattr(source, side)]
        for side in SIDES
        if stays(source, target, side)
    }
    k, v = (_rotated(unpack_page(gpu, source, s, page), source, target, s) for s in SIDES)
    as_they_are = replace(target, rotation_k=0, rotation_v=0)
    if target.is_whole:
        _pack_groups(as_they_are, k, v, page)
    else:
        _pack_rows(as_they_are, k, v, page)
    put_copies(target, kept, page)


def _pack_rows(target: Segment, k: Tensor, v: Tensor, page: int) -> None:
    """Rows [PAGE_TOKENS, n_kv_heads, channels], one by one."""
    tokens = torch.arange(PAGE_TOKENS, device=k.device)
    rows = SegmentBatch(
        page_table=tokens[:0],
        lengths=(),
        length_table=tokens[:0],
        first_position=0,
        tokens=tokens,
        slots=page * PAGE_TOKENS + tokens,
    )
    store_rows(k, v, QueryKeySteps(), LayerCache((target,)), (rows,))


def _pack_groups(target: Segment, k: Tensor, v: Tensor, page: int) -> None:
    """The same rows in types that pack several tokens together."""
    first = torch.arange(0, PAGE_TOKENS, GROUP_TOKENS, device=k.device)
    groups = torch.stack((page * PAGE_TOKENS + first, first), 1)
    of_k, of_v = (x.swapaxes(0, 1).contiguous()[None] for x in (k, v))
    pack_rows_gpu(target, of_k, of_v, groups)


def _rotated(x: Tensor, source: Segment, target: Segment, side: Side) -> Tensor:
    """Rows as the target stores them."""
    before, after = (getattr(one, f"rotation_{side}") for one in (source, target))
    return x if before == after else rotate_gpu(rotate_gpu(x, before), after)
