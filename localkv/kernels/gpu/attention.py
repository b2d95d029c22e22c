"""Attention over packed pages on a GPU: which kernel, in which grid, with which tiles."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from localkv.kernels.gpu.attention_config import (
    PRODUCTS,
    TileConfig,
    decode_config,
    prefill_config,
)
from localkv.kernels.gpu.attention_decode import decode_kernel
from localkv.kernels.gpu.attention_merge import merge_kernel
from localkv.kernels.gpu.attention_prefill import prefill_kernel
from localkv.kernels.gpu.gpu_info import GpuInfo
from localkv.kv_cache import Batch, Segment, SegmentBatch
from localkv.quant_formats.base import QuantFormat
from localkv.quant_formats.gpu_cache import gpu_codec

FEW_TOKENS = 8
"""New tokens of a sequence up to which its context is split among programs."""
MOST_SPLITS = 64
MOST_CHANNELS = 256
LEAST_QUERIES = 8
"""Columns that a matrix product needs."""
PROGRAMS_PER_PROCESSOR = 2


@dataclass(frozen=True)
class DeviceBatch:
    """A batch's share of a segment, as kernels read it.

    Attributes:
        page_table, lengths, starts: int32, as in `SegmentBatch` and `Batch`, on the device.
        positions: int64 [tokens].
        first_position: position of the segment's row 0.
        most_new: new tokens of a sequence, at most.
    """

    page_table: Tensor
    lengths: Tensor
    starts: Tensor
    positions: Tensor
    first_position: int
    most_new: int


def device_batch(batch: Batch, seg_batch: SegmentBatch) -> DeviceBatch:
    """Copy what kernels need to the device of the page table."""

    def int32(values: tuple[int, ...]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=batch.positions.device)

    return DeviceBatch(
        seg_batch.page_table.to(torch.int32),
        int32(seg_batch.lengths),
        int32(batch.starts),
        batch.positions,
        seg_batch.first_position,
        max(end - at for at, end in zip(batch.starts, batch.starts[1:], strict=False)),
    )


def padded(head_dim: int) -> int:
    """The power of two that a head's channels are padded to.

    Raises:
        ValueError: a head has more channels than tiles are made for.
    """
    if head_dim > MOST_CHANNELS:
        raise ValueError(f"heads of {head_dim} channels: kernels take {MOST_CHANNELS} at most")
    width: int = triton.next_power_of_2(head_dim)
    return max(64, width)


def _side(fmt: QuantFormat, side: str) -> dict[str, object]:
    codec = gpu_codec(fmt)
    return {
        f"READ_{side}": codec.read_tile,
        f"COLUMNS_{side}": codec.columns,
        f"PRODUCT_{side}": codec.PRODUCT,
    }


def attention_constants(
    format_k: QuantFormat,
    format_v: QuantFormat,
    *,
    n_kv_heads: int,
    group: int,
    head_dim: int,
    tiles: TileConfig,
    softcap: bool,
    window: bool,
    ptx: bool,
) -> dict[str, object]:
    """The compile-time arguments that `decode_kernel` and `prefill_kernel` share."""
    return {
        **_side(format_k, "K"),
        **_side(format_v, "V"),
        "N_KV_HEADS": n_kv_heads,
        "GROUP": group,
        "QUERIES": tiles.queries,
        "HEAD_DIM": head_dim,
        "WIDTH": padded(head_dim),
        "KEYS": tiles.keys,
        "STAGES": tiles.stages,
        "SOFTCAP": softcap,
        "WINDOW": window,
        "PTX": ptx,
    }


def product_of(*formats: QuantFormat) -> str:
    """The product, of those that the types need, that takes the most room."""
    products: list[str] = [gpu_codec(fmt).PRODUCT for fmt in formats]
    return max(products, key=PRODUCTS.index)


def tiles_of(
    arch: int,
    head_dim: int,
    format_k: QuantFormat,
    format_v: QuantFormat,
    group: int,
    few_tokens: int,
) -> TileConfig:
    """Tiles of `decode_kernel` for so many new tokens of a sequence, or, with 0, of prefill."""
    width, product = padded(head_dim), product_of(format_k, format_v)
    if few_tokens == 0:
        return prefill_config(arch, width, product)
    queries: int = triton.next_power_of_2(few_tokens * group)
    return decode_config(arch, width, product, max(LEAST_QUERIES, queries))


def n_splits(gpu: GpuInfo, sequences: int, n_kv_heads: int, capacity: int, keys: int) -> int:
    """Among how many programs a context is split, whatever its length, so that all are busy."""
    programs = sequences * n_kv_heads
    wanted = -(-PROGRAMS_PER_PROCESSOR * gpu.n_processors // programs)
    return max(1, min(wanted, MOST_SPLITS, capacity // keys))


def segment_attention(
    gpu: GpuInfo,
    q: Tensor,
    segment: Segment,
    batch: DeviceBatch,
    softmax_scale: float,
    *,
    softcap: float = 0.0,
    window: int = 0,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of a batch's queries to the rows of a segment.

    Args:
        q: [tokens, n_heads, head_dim], contiguous.
        softcap: logits x become softcap * tanh(x / softcap), unless it is 0.
        window: keys that a token sees, itself included; 0 for all before it.
        sinks: fp32 [n_heads], logit of a key that has no value; of several segments' calls, at most
            one may have it.

    Returns:
        output [tokens, n_heads, head_dim] of q's type, log-sum-exp fp32 [tokens, n_heads]; where a
        token sees nothing, 0 and -inf.
    """
    tokens, n_heads, head_dim = q.shape
    n_kv_heads = segment.k[0].shape[1]
    group = n_heads // n_kv_heads
    sequences = len(batch.lengths)
    width = padded(head_dim)
    decode = batch.most_new <= FEW_TOKENS
    tiles = tiles_of(
        gpu.arch,
        head_dim,
        segment.format_k,
        segment.format_v,
        group,
        batch.most_new if decode else 0,
    )
    constants = attention_constants(
        segment.format_k,
        segment.format_v,
        n_kv_heads=n_kv_heads,
        group=group,
        head_dim=head_dim,
        tiles=tiles,
        softcap=softcap != 0,
        window=window != 0,
        ptx=gpu.ptx,
    )
    tables = (batch.page_table, batch.lengths, batch.starts, batch.positions)
    numbers = (batch.first_position, batch.page_table.shape[1], softmax_scale, softcap, window)
    options = {"num_warps": tiles.warps, "num_stages": tiles.stages}
    out = torch.empty_like(q)
    lse = torch.empty(tokens, n_heads, dtype=torch.float32, device=q.device)
    if not decode:
        blocks = triton.cdiv(batch.most_new * group, tiles.queries)
        prefill_kernel[(blocks, n_kv_heads, sequences)](
            q,
            segment.k,
            segment.v,
            *tables,
            sinks,
            out,
            lse,
            *numbers,
            **constants,
            SINKS=sinks is not None,
            **options,
        )
        return out, lse
    capacity = batch.page_table.shape[1] * segment.k[0].shape[2]
    splits = n_splits(gpu, sequences, n_kv_heads, capacity, tiles.keys)
    parts = torch.empty(tokens, n_heads, splits, head_dim, dtype=torch.float32, device=q.device)
    part_lse = torch.empty(tokens, n_heads, splits, dtype=torch.float32, device=q.device)
    decode_kernel[(n_kv_heads, splits, sequences)](
        q, segment.k, segment.v, *tables, parts, part_lse, *numbers, **constants, **options
    )
    merge_kernel[(tokens, n_heads)](
        parts,
        part_lse,
        sinks,
        out,
        lse,
        N_HEADS=n_heads,
        N_SPLITS=splits,
        SPLITS=triton.next_power_of_2(splits),
        HEAD_DIM=head_dim,
        WIDTH=width,
        SINKS=sinks is not None,
    )
    return out, lse


class PackedAttention:
    """`SegmentAttention` on a GPU: brings what kernels need of a batch to the device once."""

    def __init__(self, gpu: GpuInfo) -> None:
        self.gpu = gpu
        self._recent: list[tuple[SegmentBatch, DeviceBatch]] = []

    def __call__(
        self,
        q: Tensor,
        segment: Segment,
        seg_batch: SegmentBatch,
        batch: Batch,
        softmax_scale: float,
    ) -> tuple[Tensor, Tensor]:
        return segment_attention(
            self.gpu, q, segment, self._on_device(batch, seg_batch), softmax_scale
        )

    def _on_device(self, batch: Batch, seg_batch: SegmentBatch) -> DeviceBatch:
        for known, on_device in self._recent:
            if known is seg_batch:
                return on_device
        if len(self._recent) > len(batch.segments):
            self._recent.clear()
        self._recent.append((seg_batch, device_batch(batch, seg_batch)))
        return self._recent[-1][1]
