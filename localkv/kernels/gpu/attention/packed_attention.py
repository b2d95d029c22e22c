"""Attention over packed pages on a GPU: which kernel, in which grid, with which tiles.

Sizes of tiles follow from compiled code: no spilled register, shared memory that every GPU of the
generation has, few instructions per key. Products in three parts of rows with 512 channels spill,
whatever the tiles. So does decoding for 128 queries, or 64 with 256 channels, where K and V are
fp16. Timed were heads with 128 channels, on an H100 and an H200
(`benchmarks/gpu_tiles.py`).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

from localkv.arch.spec import AttentionParams
from localkv.cache.arrays import Batch, Segment, SegmentBatch
from localkv.cache.layout import PAGE_TOKENS
from localkv.kernels.gpu.attention.decode import decode_kernel, merge_kernel
from localkv.kernels.gpu.attention.prefill import prefill_kernel
from localkv.kernels.gpu.device import GpuInfo
from localkv.kernels.gpu.footprint import FEW_TOKENS, MOST_CHANNELS, MOST_SPLITS
from localkv.kernels.gpu.launch import launch
from localkv.kernels.gpu.launch_bounds import check_attention
from localkv.kernels.gpu.pages import page_bytes
from localkv.quant_formats.base import QuantFormat


@dataclass(frozen=True)
class TileConfig:
    """How a kernel is launched.

    Attributes:
        queries: rows of Q of a program, a power of two.
        keys: rows of K and V of a tile; divides a page.
        warps: of a program.
        stages: tiles on their way from memory at the same time, plus one.
    """

    queries: int
    keys: int
    warps: int
    stages: int


PRODUCTS = ("fp16", "tf32", "tf32x3")
"""How tiles are multiplied (see `shared/gpu/`), by the room that it takes."""

QUICK_CODES = ("q4_0", "q8_0")
"""Types whose large tiles were faster on an H100 and an H200. q5_1's were slower."""

SERVER_BLACKWELL = 10
"""Compute capability 10.x: its matrix unit has a memory of its own."""
BLACKWELL = 12
"""GPUs of that generation without that unit, 12.x."""
SMALL = (86, 89, 120)
"""GPUs with 99 KiB of shared memory for a block; others have 163 and more."""
PIPELINES_FEW_QUERIES = triton.__version__.startswith("3.8.")
"""Triton 3.8 gives 8 queries to that unit, too, and then its pipeliner fails as in prefill."""

DECODE_KEYS = {
    "fp16": {64: 128, 128: 64, 256: 64, 512: 32},
    "tf32": {64: 64, 128: 64, 256: 32, 512: 16},
    "tf32x3": {64: 64, 128: 32, 256: 16, 512: 16},
}
PREFILL = {
    "fp16": {
        64: TileConfig(128, 128, 8, 2),
        128: TileConfig(128, 64, 8, 2),
        256: TileConfig(32, 64, 4, 2),
        512: TileConfig(16, 32, 4, 2),
    },
    "tf32": {
        64: TileConfig(64, 64, 4, 2),
        128: TileConfig(64, 32, 4, 2),
        256: TileConfig(32, 32, 8, 1),
        512: TileConfig(16, 16, 8, 1),
    },
    "tf32x3": {
        64: TileConfig(64, 32, 4, 2),
        128: TileConfig(32, 32, 4, 2),
        256: TileConfig(16, 16, 4, 1),
        512: TileConfig(16, 16, 8, 1),
    },
}
"""By channels of a head, as a power of two; within the 99 KiB of shared memory of 8.6."""
WIDEST = max(PREFILL["fp16"])
LEAST_KEYS = min(min(by_width.values()) for by_width in DECODE_KEYS.values())
"""No tile of decoding has fewer."""


def decode_config(
    arch: int,
    width: int,
    product: str,
    queries: int,
    *,
    halves: bool = False,
    quick_codes: bool = False,
) -> TileConfig:
    """For `attention_decode`.

    Args:
        arch: compute capability, 86 for 8.6.
        width: channels of a head, as a power of two.
        product: of `PRODUCTS`, the later of K's and V's.
        queries: rows of Q, as a power of two.
        halves: K and V are fp16, whose tiles are copied to shared memory as they are.
        quick_codes: K and V are of `QUICK_CODES`.
    """
    if halves and (width, queries) == (128, 64) and arch // 10 in (8, BLACKWELL):
        return TileConfig(queries, 32, 4, 2 if arch // 10 == 8 else 1)
    keys = DECODE_KEYS[product][width]
    if arch == 90 and (width, queries) == (128, 8) and quick_codes:
        return TileConfig(queries, 128, 4, 1)
    if arch // 10 == SERVER_BLACKWELL:
        # fewer than its matrix unit takes, which is made for large products
        keys = min(keys, 64 if queries <= 8 else 32)
        if PIPELINES_FEW_QUERIES:
            return TileConfig(queries, keys, 4, 1)
    warps, stages = 4, 2
    if width == WIDEST:
        warps = 4 if queries <= 8 else 8
        stages = 2 if product == "fp16" and arch // 10 != SERVER_BLACKWELL else 1
    return TileConfig(queries, keys, warps, stages)


def prefill_config(arch: int, width: int, product: str, *, halves_and_codes: bool) -> TileConfig:
    """For `attention_prefill`; arguments as of `decode_config`.

    Args:
        halves_and_codes: K is fp16, which is copied to shared memory as it is, and V isn't.
    """
    if arch == 90 and width == 256 and product == "fp16":
        return TileConfig(128, 64, 8, 2)  # wgmma reads from more shared memory
    tiles = PREFILL[product][width]
    if halves_and_codes and width == 256 and product == "fp16" and arch in SMALL:
        tiles = replace(tiles, keys=32)
    if arch // 10 == SERVER_BLACKWELL:
        # the pipeliner of Triton 3.6 to 3.8 fails on its tensor memory and the fence
        return replace(tiles, stages=1)
    return tiles


MULTIPLIES_CODES = False
"""Whether prompts multiply K of fp8_e4m3 as it is with queries in two e4m3, on GPUs that can
(8.9 and newer). `benchmarks/gpu.py` times both ways; nothing is chosen that was not measured."""
LEAST_QUERIES = 8
"""Columns that a matrix product needs."""
MOST_QUERIES = 128
"""Rows (new token, query head of a KV head) of a sequence that one program of decoding takes."""
MOST_WIDE_QUERIES = {"fp16": 32, "tf32": 32, "tf32x3": 8}
"""The most queries of rows with more than 256 channels, by product."""
PROGRAMS_PER_PROCESSOR = 4


def padded(head_dim: int) -> int:
    """The power of two that a head's channels are padded to.

    Raises:
        ValueError: a head has more channels than tiles are made for.
    """
    if head_dim > MOST_CHANNELS:
        raise ValueError(f"heads of {head_dim} channels: kernels take {MOST_CHANNELS} at most")
    width: int = triton.next_power_of_2(head_dim)
    return max(64, width)


def _side(fmt: QuantFormat, side: str) -> dict[str, Any]:
    codec = fmt.part("gpu")
    return {
        f"READ_{side}": codec.read_tile,
        f"COLUMNS_{side}": codec.columns,
        f"PRODUCT_{side}": codec.PRODUCT,
        f"UNIT_{side}": getattr(codec, "UNIT", 1.0),
    }


def attention_constants(
    format_k: QuantFormat,
    format_v: QuantFormat,
    *,
    n_kv_heads: int,
    group: int,
    head_dim: int,
    value_dim: int,
    tiles: TileConfig,
    softcap: bool,
    window: int,
    ptx: bool,
    tail: int = 0,
    tail_tokens: int = 1,
    page_bytes: int = 0,
    codes: bool = False,
) -> dict[str, Any]:
    """The compile-time arguments that `decode_kernel` and `prefill_kernel` share.

    Args:
        window: 1 with a window, 2 with chunks, else 0.
        tail: 1 where keys are seen up to the tail, 2 where only the tail's are, else 0.
        tail_tokens: tokens that are packed together.
        page_bytes: how far pages are apart if they don't follow one another, else 0.
        codes: `prefill_kernel` multiplies K's codes, which are e4m3.
    """
    of_k = _side(format_k, "K")
    if codes:
        of_k |= {"READ_K": format_k.part("gpu").read_codes, "PRODUCT_K": "e4m3"}
    without = {} if tail else dict.fromkeys(("exact_ptr", "tail_start", "tail_newest"))
    return {
        **without,
        "TAIL": tail,
        "TAIL_TOKENS": tail_tokens,
        "PAGE_BYTES": page_bytes,
        **of_k,
        **_side(format_v, "V"),
        "N_KV_HEADS": n_kv_heads,
        "GROUP": group,
        "QUERIES": tiles.queries,
        "HEAD_DIM": head_dim,
        "WIDTH": padded(head_dim),
        "VALUE_DIM": value_dim,
        "VALUE_WIDTH": padded(value_dim),
        "KEYS": tiles.keys,
        "STAGES": tiles.stages,
        "SOFTCAP": softcap,
        "WINDOW": window,
        "PTX": ptx,
    }


def product_of(*formats: QuantFormat) -> str:
    """The product, of those that the types need, that takes the most room."""
    products: list[str] = [fmt.part("gpu").PRODUCT for fmt in formats]
    return max(products, key=PRODUCTS.index)


def tiles_of(
    arch: int,
    channels: int,
    format_k: QuantFormat,
    format_v: QuantFormat,
    group: int,
    few_tokens: int,
) -> TileConfig:
    """Tiles of `decode_kernel` for a number of new tokens per sequence, or, with 0, of prefill.

    Args:
        channels: of a row of K or of V, whichever has more.
    """
    width, product = padded(channels), product_of(format_k, format_v)
    if few_tokens == 0:
        mixed = format_k.name == "f16" != format_v.name
        return prefill_config(arch, width, product, halves_and_codes=mixed)
    queries: int = triton.next_power_of_2(few_tokens * group)
    names = {format_k.name, format_v.name}
    return decode_config(
        arch,
        width,
        product,
        max(LEAST_QUERIES, queries),
        halves=names == {"f16"},
        quick_codes=names <= set(QUICK_CODES),
    )


def n_splits(gpu: GpuInfo, sequences: int, n_kv_heads: int, capacity: int, keys: int) -> int:
    """The programs among which a context of any length is split, so that all are busy."""
    programs = sequences * n_kv_heads
    wanted = -(-PROGRAMS_PER_PROCESSOR * gpu.n_processors // programs)
    return max(1, min(wanted, MOST_SPLITS, capacity // keys))


@cache
def slopes_on(device: torch.device, params: AttentionParams, n_heads: int) -> Tensor:
    """ALiBi's slopes, fp32 [n_heads], which a step that is recorded finds there."""
    return torch.tensor(params.slopes(n_heads), dtype=torch.float32, device=device)


def segment_attention(
    gpu: GpuInfo,
    q: Tensor,
    segment: Segment,
    seg_batch: SegmentBatch,
    batch: Batch,
    params: AttentionParams,
    *,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of a batch's queries to the rows of a segment.

    Args:
        q: [tokens, n_heads, head_dim], contiguous.
        seg_batch, batch: of the parts that change from token to token, only tensors are read.
        sinks: fp32 [n_heads], logit of a key that has no value; of several segments' calls, at most
            one may have it.

    Returns:
        output [tokens, n_heads, value_dim] of q's type, log-sum-exp fp32 [tokens, n_heads]; where a
        token sees nothing, 0 and -inf.
    """
    check_attention(q, segment, seg_batch, batch, sinks)
    tail = seg_batch.tail
    tokens, n_heads, head_dim = q.shape
    n_kv_heads, value_dim = segment.k[0].shape[1], segment.value_dim
    group = n_heads // n_kv_heads
    sequences = len(batch.starts) - 1
    most_new = max(end - at for at, end in itertools.pairwise(batch.starts))
    channels = max(head_dim, value_dim)
    most_queries = MOST_QUERIES
    if padded(channels) == WIDEST:
        most_queries = MOST_WIDE_QUERIES[product_of(segment.format_k, segment.format_v)]
    decode = most_new <= FEW_TOKENS and most_new * group <= most_queries
    tiles = tiles_of(
        gpu.arch, channels, segment.format_k, segment.format_v, group, most_new if decode else 0
    )
    constants = attention_constants(
        segment.format_k,
        segment.format_v,
        n_kv_heads=n_kv_heads,
        group=group,
        head_dim=head_dim,
        value_dim=value_dim,
        tiles=tiles,
        softcap=params.softcap != 0,
        window=2 if params.chunk else 1 if params.window else 0,
        ptx=gpu.ptx,
        tail=0 if tail is None else 2 if seg_batch.is_tail else 1,
        tail_tokens=1 if tail is None else tail.group,
        page_bytes=page_bytes(segment),
        codes=MULTIPLIES_CODES
        and not decode
        and gpu.arch >= 89
        and segment.format_k.name == "fp8_e4m3",
    )
    constants["firsts_ptr"] = seg_batch.first_table
    constants["slopes_ptr"] = slopes_on(q.device, params, n_heads) if params.alibi else None
    if tail is not None:
        constants["exact_ptr"] = seg_batch.exact_table
        constants |= {"tail_start": tail.start, "tail_newest": tail.newest}
    table = seg_batch.page_table
    tables = (table, seg_batch.length_table, batch.start_table, batch.positions)
    numbers = (seg_batch.first_position, table.shape[1])
    numbers += (params.softmax_scale, params.softcap, params.window or params.chunk)
    options: dict[str, Any] = {"num_warps": tiles.warps, "num_stages": tiles.stages}
    out = q.new_empty(tokens, n_heads, value_dim)
    lse = torch.empty(tokens, n_heads, dtype=torch.float32, device=q.device)
    if not decode:
        blocks = triton.cdiv(most_new * group, tiles.queries)
        launch(
            prefill_kernel,
            (blocks, n_kv_heads, sequences),
            q,
            segment.operands_k,
            segment.operands_v,
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
    capacity = table.shape[1] * segment.k[0].shape[2]
    if reach := params.window or params.chunk:
        capacity = min(capacity, reach + PAGE_TOKENS)
    if tail is not None and seg_batch.is_tail:
        capacity = min(capacity, tail.reach + PAGE_TOKENS)
    splits = n_splits(gpu, sequences, n_kv_heads, capacity, tiles.keys)
    parts = torch.empty(tokens, n_heads, splits, value_dim, dtype=torch.float32, device=q.device)
    part_lse = torch.empty(tokens, n_heads, splits, dtype=torch.float32, device=q.device)
    launch(
        decode_kernel,
        (n_kv_heads, splits, sequences),
        q,
        segment.operands_k,
        segment.operands_v,
        *tables,
        parts,
        part_lse,
        *numbers,
        **constants,
        **options,
    )
    launch(
        merge_kernel,
        (tokens, n_heads),
        parts,
        part_lse,
        sinks,
        out,
        lse,
        splits,
        N_HEADS=n_heads,
        # for any tiles, so that it depends on the context only, not on the number of tokens
        SPLITS=triton.next_power_of_2(n_splits(gpu, sequences, n_kv_heads, capacity, LEAST_KEYS)),
        HEAD_DIM=value_dim,
        WIDTH=padded(value_dim),
        SINKS=sinks is not None,
    )
    return out, lse
