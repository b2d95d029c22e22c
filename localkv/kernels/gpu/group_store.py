"""Packing groups of rows, and a page of rows in other types, on a GPU; rotation in its own launch.

Rows of a group come from the tail, in f16, or from a page that changes its types. Where K's or V's
type packs several tokens together, both sides of a segment are packed so. As in `store_kv.py`,
arithmetic is fp32 without fused multiply-adds, so bytes are the reference's.

A page changes its types layer by layer. The readers of attention unpack its rows into float32
memory of a layer's page. The kernel that stores new rows packs them, or, in types that pack several
tokens together, the one that packs groups. So the bytes are those that `cache/repack.py` makes of
the values that attention reads, which it rounds to fp16 where it multiplies in fp16.
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
from localkv.kernels.bounds import BoundsError, check_array, check_segment
from localkv.kernels.gpu.attention.packed_attention import padded
from localkv.kernels.gpu.attention.softmax import store_outputs
from localkv.kernels.gpu.device import GpuInfo
from localkv.kernels.gpu.launch import launch
from localkv.kernels.gpu.pages import in_page, page_bytes, row_before
from localkv.kernels.gpu.rope_store import QueryKeySteps, store_rows
from localkv.kernels.gpu.store_kv import hadamard
from localkv.kernels.namespace import dtype_name
from localkv.quant_formats.base import QuantFormat
from localkv.quant_formats.shared.channel_groups import TOKENS

ROWS = 8
"""Rows of a program."""


@triton.jit(do_not_specialize=["n_rows"])
def rotate_kernel(
    x_ptr, out_ptr, n_rows,
    HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """x, out: fp32 [n_rows, HEAD_DIM]; BLOCK divides HEAD_DIM, and WIDTH is the power of two above.

    Grid (blocks of N rows).
    """
    row = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N)
    channel = tl.arange(0, WIDTH)
    at = row[:, None] * HEAD_DIM + channel[None, :]
    mask = (row < n_rows)[:, None] & (channel < HEAD_DIM)[None, :]
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, hadamard(x, BLOCK), mask=mask)


def rotate_gpu(x: Tensor, block: int) -> Tensor:
    """`hadamard_transform` of x [tokens, heads, head_dim] on a GPU; a block of 0 leaves it."""
    if block == 0:
        return x
    x = x.contiguous()
    n_rows, head_dim = x.shape[0] * x.shape[1], x.shape[2]
    out = x.new_empty(x.shape)
    launch(
        rotate_kernel,
        (triton.cdiv(n_rows, ROWS),),
        x,
        out,
        n_rows,
        HEAD_DIM=head_dim,
        WIDTH=triton.next_power_of_2(head_dim),
        BLOCK=block,
        N=ROWS,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return out


PAGE = tl.constexpr(PAGE_TOKENS)


@triton.jit
def pack_group(
    rows_ptr, planes, scale_ptr, slot, source, head,
    WRITE: tl.constexpr, N_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr,
    ROTATION: tl.constexpr, PAGE_BYTES: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """TOKENS rows of a KV head of K or of V."""
    i, j = tl.arange(0, TOKENS), tl.arange(0, WIDTH)
    rows = (source // PAGE * N_KV_HEADS + head) * PAGE + source % PAGE + i
    at = rows_ptr + rows[:, None] * HEAD_DIM + j[None, :]
    exists = tl.broadcast_to((j < HEAD_DIM)[None, :], (TOKENS, WIDTH))
    x = hadamard(tl.load(at, mask=exists, other=0.0).to(tl.float32), ROTATION)
    if scale_ptr is not None:
        x = tl.div_rn(x, tl.load(scale_ptr + head))
    page = slot // PAGE
    rows = row_before(page, head, N_KV_HEADS, PAGE_BYTES) + slot % PAGE + i
    WRITE(in_page(planes, page, PAGE_BYTES), rows, i >= 0, x, HEAD_DIM, WIDTH)


@triton.jit
def group_kernel(
    groups_ptr, k_rows_ptr, v_rows_ptr, k_planes, v_planes, k_scale_ptr, v_scale_ptr,
    WRITE_K: tl.constexpr, WRITE_V: tl.constexpr, N_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    ROTATION_K: tl.constexpr, ROTATION_V: tl.constexpr, PAGE_BYTES: tl.constexpr,
    GROUP: tl.constexpr, TOKENS_K: tl.constexpr, TOKENS_V: tl.constexpr,
):  # fmt: skip
    """Grid (groups, 2 N_KV_HEADS): heads of k, then of v.

    Args:
        groups_ptr: int64 [groups, 2], the slot of a group's first row, and the number of the row
            among the ones that it is packed from. Where the first is negative, there is no group.
        k_rows_ptr, v_rows_ptr: fp16 or fp32 [pages, N_KV_HEADS, PAGE, HEAD_DIM or VALUE_DIM].
        PAGE_BYTES: of the planes, see `pages.py`.
        GROUP: tokens of a group; TOKENS_K or TOKENS_V of them are packed at once.
    """
    slot = tl.load(groups_ptr + 2 * tl.program_id(0))
    source = tl.load(groups_ptr + 2 * tl.program_id(0) + 1)
    head = tl.program_id(1)
    if slot < 0:
        return
    if head < N_KV_HEADS:
        for at in range(0, GROUP, TOKENS_K):
            pack_group(
                k_rows_ptr, k_planes, k_scale_ptr, slot + at, source + at, head,
                WRITE_K, N_KV_HEADS, HEAD_DIM, WIDTH, ROTATION_K, PAGE_BYTES, TOKENS_K,
            )  # fmt: skip
    else:
        for at in range(0, GROUP, TOKENS_V):
            pack_group(
                v_rows_ptr, v_planes, v_scale_ptr, slot + at, source + at, head - N_KV_HEADS,
                WRITE_V, N_KV_HEADS, VALUE_DIM, VALUE_WIDTH, ROTATION_V, PAGE_BYTES, TOKENS_V,
            )  # fmt: skip


def pack_groups_gpu(packed: Segment, tail: Segment, groups: Tensor) -> None:
    """Pack groups of rows of the tail, rotated and scaled by head as the segment wants them.

    Args:
        groups: int64 [n, 2], see `group_kernel`.

    Raises:
        BoundsError: planes or groups don't fit each other, or the tail isn't f16.
    """
    key_dim, value_dim = tail.k[0].shape[3], tail.value_dim
    check_segment(tail, key_dim, value_dim)
    if (tail.format_k.name, tail.format_v.name) != ("f16", "f16") or tail.rotation_k:
        raise BoundsError(f"groups are packed from {tail.format_k.name}/{tail.format_v.name}")
    k, v = (planes[0].view(torch.float16)[..., 0] for planes in (tail.k, tail.v))
    pack_rows_gpu(packed, k, v, groups)


def pack_rows_gpu(packed: Segment, k: Tensor, v: Tensor, groups: Tensor) -> None:
    """Pack groups of rows of k and v.

    Args:
        k, v: float16 or float32 [pages, n_kv_heads, PAGE_TOKENS, channels].

    Raises:
        BoundsError: arrays don't fit each other.
    """
    n_pages, n_kv_heads, _, key_dim = k.shape
    value_dim = v.shape[3]
    check_segment(packed, key_dim, value_dim, pages_apart=True)
    for name, rows in (("k", k), ("v", v)):
        shape = (n_pages, packed.k[0].shape[1], PAGE_TOKENS, rows.shape[3])
        check_array(name, rows, dtype_name(rows), *shape)
    check_array("groups", groups, "int64", len(groups), 2)
    if not len(groups):
        return
    launch(
        group_kernel,
        (len(groups), 2 * n_kv_heads),
        groups_ptr=groups,
        k_rows_ptr=k,
        v_rows_ptr=v,
        k_planes=packed.operands_k,
        v_planes=packed.operands_v,
        k_scale_ptr=packed.scale_k,
        v_scale_ptr=packed.scale_v,
        WRITE_K=packed.format_k.part("gpu").write_rows,
        WRITE_V=packed.format_v.part("gpu").write_rows,
        N_KV_HEADS=n_kv_heads,
        HEAD_DIM=key_dim,
        WIDTH=padded(key_dim),
        VALUE_DIM=value_dim,
        VALUE_WIDTH=padded(value_dim),
        ROTATION_K=packed.rotation_k,
        ROTATION_V=packed.rotation_v,
        PAGE_BYTES=page_bytes(packed),
        **group_sizes(packed.format_k, packed.format_v),
        enable_fp_fusion=False,
    )


def group_sizes(format_k: QuantFormat, format_v: QuantFormat) -> dict[str, int]:
    """How the kernel packs groups of two types: tokens of a group, those packed at once, warps."""
    tokens = [max(TOKENS, fmt.group_tokens) for fmt in (format_k, format_v)]
    group = max(tokens)
    return {
        "GROUP": group,
        "TOKENS_K": tokens[0],
        "TOKENS_V": tokens[1],
        "num_warps": 4 if group == TOKENS else 8,
    }


Side = Literal["k", "v"]
SIDES: tuple[Side, Side] = ("k", "v")
UNPACKED_ROWS = 32
"""Rows of a program."""


@triton.jit(do_not_specialize=["page"])
def unpack_kernel(
    planes, out_ptr, page,
    READ: tl.constexpr, COLUMNS: tl.constexpr, UNIT: tl.constexpr, N_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr, PAGE_BYTES: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
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
        (PAGE_TOKENS // UNPACKED_ROWS, n_kv_heads),
        planes,
        out,
        page,
        READ=codec.read_tile,
        COLUMNS=codec.columns,
        UNIT=getattr(codec, "UNIT", 1.0),
        N_KV_HEADS=n_kv_heads,
        HEAD_DIM=head_dim,
        WIDTH=padded(head_dim),
        TOKENS=UNPACKED_ROWS,
        PAGE_BYTES=page_bytes(segment),
        PTX=gpu.ptx,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return out


def repack_page_gpu(gpu: GpuInfo, source: Segment, target: Segment, page: int) -> None:
    """What `cache/repack.py` does, with the values that attention reads; nothing asks the host."""
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
    """Pack the rows in types that pack several tokens together."""
    tokens = group_sizes(target.format_k, target.format_v)["GROUP"]
    first = torch.arange(0, PAGE_TOKENS, tokens, device=k.device)
    groups = torch.stack((page * PAGE_TOKENS + first, first), 1)
    of_k, of_v = (x.swapaxes(0, 1).contiguous()[None] for x in (k, v))
    pack_rows_gpu(target, of_k, of_v, groups)


def _rotated(x: Tensor, source: Segment, target: Segment, side: Side) -> Tensor:
    """Rows as the target stores them."""
    before, after = (getattr(one, f"rotation_{side}") for one in (source, target))
    return x if before == after else rotate_gpu(rotate_gpu(x, before), after)
