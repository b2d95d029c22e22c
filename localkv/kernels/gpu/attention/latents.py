"""Latent attention on a GPU: `kernels/attention_mixers.py` in few launches, in grids of tiles.

A tile of packed rows is decoded once, as keys and as values. A program has a block of rows of
queries (new token, head) and a share of the context, all of it for prompts. `merge_latents_kernel`
adds shares up, weighted by their log-sum-exp.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from localkv.arch.spec import AttentionParams, LatentAttentionSpec, LayerSpec
from localkv.cache.arrays import Batch, LayerCache, Segment, SegmentBatch
from localkv.cache.layout import PAGE_TOKENS
from localkv.kernels.attention import pack_groups
from localkv.kernels.attention_mixers import attend
from localkv.kernels.backend import TokenInputs
from localkv.kernels.bounds import BoundsError, check_array, check_segment, check_tables
from localkv.kernels.gpu.attention.packed_attention import TileConfig, n_splits, padded, product_of
from localkv.kernels.gpu.attention.softmax import (
    LOWEST,
    dot,
    log_sum_exp,
    page_of_tile,
    place,
    position_of,
    query,
    rounded_to,
    row_of,
    row_of_tile,
    scaled_logits,
    store_outputs,
    tail_begin,
)
from localkv.kernels.gpu.device import GpuInfo
from localkv.kernels.gpu.footprint import FEW_TOKENS, MOST_CHANNELS, MOST_SPLITS
from localkv.kernels.gpu.group_store import pack_groups_gpu, rotate_gpu
from localkv.kernels.gpu.grouped_attention import gated, head_gate
from localkv.kernels.gpu.launch import launch
from localkv.kernels.gpu.moe import stack_products
from localkv.kernels.gpu.products.products import linears, normed
from localkv.kernels.gpu.rope_store import QueryKeySteps, store_rows, turn_queries
from localkv.kernels.layer_weights import LatentAttentionWeights, LayerWeights
from localkv.quant_formats.base import QuantFormat
from localkv.quant_formats.packed_tensor import PackedTensor


@triton.jit
def _queries(ptr, row, is_query, channel, N: tl.constexpr, PRODUCT: tl.constexpr):
    """Some channels of queries. They are loaded for each tile, since all of them would take more
    registers than there are."""
    at, mask = place(ptr, row, is_query, channel, N, False)
    return query(tl.load(at, mask=mask, other=0.0, volatile=True), PRODUCT)


@triton.jit(do_not_specialize=["first_position", "table_width", "tail_start", "tail_newest"])
def latents_kernel(
    q_ptr, q_rotated_ptr, k_planes, v_planes, page_table_ptr, lengths_ptr, starts_ptr,
    positions_ptr, out_ptr, lse_ptr, first_position, table_width, scale, softcap, exact_ptr,
    tail_start, tail_newest,
    READ_K: tl.constexpr, COLUMNS_K: tl.constexpr, PRODUCT_K: tl.constexpr, UNIT_K: tl.constexpr,
    READ_V: tl.constexpr, COLUMNS_V: tl.constexpr, PRODUCT_V: tl.constexpr, UNIT_V: tl.constexpr,
    N_HEADS: tl.constexpr, QUERIES: tl.constexpr, LATENT_DIM: tl.constexpr,
    LATENT_WIDTH: tl.constexpr, ROPE_DIM: tl.constexpr, ROPE_WIDTH: tl.constexpr,
    KEYS: tl.constexpr, STAGES: tl.constexpr, SOFTCAP: tl.constexpr, PTX: tl.constexpr,
    TAIL: tl.constexpr, TAIL_TOKENS: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of QUERIES, splits, sequences).

    Args:
        q_ptr, q_rotated_ptr: [tokens, N_HEADS, LATENT_DIM] and [tokens, N_HEADS, ROPE_DIM].
        k_planes, v_planes: tuples of uint8 pointers, of the latents and of the rotated parts.
        page_table_ptr: int64 [sequences, table_width].
        lengths_ptr: int32 [sequences], rows in this segment.
        starts_ptr: int32 [sequences + 1], offsets of the sequences' tokens in q.
        positions_ptr: int64 [tokens].
        out_ptr, lse_ptr: fp32 [tokens, heads, splits, LATENT_DIM] and [tokens, heads, splits]; of
            a split without keys 0 and -inf.
        first_position: position of the segment's row 0.
        exact_ptr, tail_start, tail_newest, TAIL, TAIL_TOKENS: as `decode_kernel` has them.
        UNIT_K, UNIT_V: as `decode_kernel` has them.
        KEYS: rows of a tile; divides a page.
    """
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # those with the longest rows come first
    split = tl.program_id(1)
    sequence = tl.program_id(2)
    n_splits = tl.num_programs(1)
    start = tl.load(starts_ptr + sequence)
    n_queries = (tl.load(starts_ptr + sequence + 1) - start) * N_HEADS
    if block * QUERIES >= n_queries:
        return

    i = block * QUERIES + tl.arange(0, QUERIES)
    is_query = i < n_queries
    row = row_of(i, start, 0, 1, N_HEADS)
    position = position_of(i, start, is_query, positions_ptr, first_position, N_HEADS)
    length = tl.load(lengths_ptr + sequence)
    length = tl.minimum(length, tl.max(tl.where(is_query, position, -1), 0) + 1)
    first_tile = 0
    least = 0
    if TAIL:
        tail = tail_begin(
            position, first_position, exact_ptr, sequence, tail_start, tail_newest, TAIL_TOKENS
        )
        if TAIL == 1:
            length = tl.minimum(length, tl.max(tl.where(is_query, tail, 0), 0))
        else:
            least = tl.min(tl.where(is_query, tail, length), 0)
            first_tile = least // KEYS
    share = tl.cdiv(tl.maximum(tl.cdiv(length, KEYS) - first_tile, 0), n_splits)
    begin = (first_tile + split * share) * KEYS
    end = tl.minimum(begin + share * KEYS, length)

    k_low, k_high = COLUMNS_K(LATENT_WIDTH)
    v_low, v_high = COLUMNS_V(ROPE_WIDTH)
    largest = tl.full((QUERIES,), LOWEST, tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    out_low = tl.zeros((QUERIES, LATENT_WIDTH // 2), tl.float32)
    out_high = tl.zeros((QUERIES, LATENT_WIDTH // 2), tl.float32)
    pages = page_table_ptr + sequence * table_width
    for at in tl.range(begin, end, KEYS, num_stages=STAGES):
        first_row = row_of_tile(page_of_tile(pages, at), at, 0, 1, KEYS, PAGE_BYTES=0)
        key = at + tl.arange(0, KEYS)
        valid = key < end
        if TAIL == 2:  # rows before may never have been stored
            valid = valid & (key >= least)
        low, high = READ_V(v_planes, first_row, valid, ROPE_DIM, ROPE_WIDTH, PTX)
        q = _queries(q_rotated_ptr, row, is_query, v_low, ROPE_DIM, PRODUCT_V)
        products = dot(q, tl.trans(low), None, PRODUCT_V)
        q = _queries(q_rotated_ptr, row, is_query, v_high, ROPE_DIM, PRODUCT_V)
        products = dot(q, tl.trans(high), products, PRODUCT_V)
        if UNIT_V != UNIT_K:
            products = products * (UNIT_V / UNIT_K)
        low, high = READ_K(k_planes, first_row, valid, LATENT_DIM, LATENT_WIDTH, PTX)
        q = _queries(q_ptr, row, is_query, k_low, LATENT_DIM, PRODUCT_K)
        products = dot(q, tl.trans(low), products, PRODUCT_K)
        q = _queries(q_ptr, row, is_query, k_high, LATENT_DIM, PRODUCT_K)
        products = dot(q, tl.trans(high), products, PRODUCT_K)
        logits = scaled_logits(products, scale * UNIT_K, softcap, SOFTCAP)
        seen = valid[None, :] & (key[None, :] <= position[:, None])
        if TAIL == 1:
            seen = seen & (key[None, :] < tail[:, None])
        if TAIL == 2:
            seen = seen & (key[None, :] >= tail[:, None])
        logits = tl.where(seen, logits, -float("inf"))
        larger = tl.maximum(largest, tl.max(logits, 1))
        weights = tl.exp2(logits - larger[:, None])
        shrink = tl.exp2(largest - larger)
        total = total * shrink + tl.sum(weights, 1)
        largest = larger
        weights = rounded_to(weights, PRODUCT_K)
        out_low = dot(weights, low, out_low * shrink[:, None], PRODUCT_K)
        out_high = dot(weights, high, out_high * shrink[:, None], PRODUCT_K)

    row = row * n_splits + split
    tl.store(lse_ptr + row, log_sum_exp(largest, total), mask=is_query)
    norm = UNIT_K / tl.where(total != 0, total, 1.0)[:, None]  # NaN too, so that it shows
    store_outputs(out_ptr, out_low * norm, row, is_query, k_low, LATENT_DIM, COLUMNS=False)
    store_outputs(out_ptr, out_high * norm, row, is_query, k_high, LATENT_DIM, COLUMNS=False)


@triton.jit(do_not_specialize=["n_splits"])
def merge_latents_kernel(
    parts_ptr, part_lse_ptr, out_ptr, lse_ptr, n_splits,
    SPLITS: tl.constexpr, LATENT_DIM: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Grid (tokens * heads,): each row's splits, one after the other.

    Args:
        parts_ptr, part_lse_ptr: fp32 [rows, n_splits, LATENT_DIM] and [rows, n_splits].
        out_ptr, lse_ptr: fp32 [rows, LATENT_DIM] and [rows].
        SPLITS: a power of two, n_splits at least.
    """
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, SPLITS)
    j = tl.arange(0, WIDTH)
    lse = tl.load(part_lse_ptr + row * n_splits + i, mask=i < n_splits, other=-float("inf"))
    largest = tl.maximum(tl.max(lse, 0), LOWEST)
    total = tl.sum(tl.exp(lse - largest), 0)
    out = tl.zeros((WIDTH,), tl.float32)
    for split in range(n_splits):
        at = row * n_splits + split
        weight = tl.exp(tl.load(part_lse_ptr + at) - largest)
        part = tl.load(parts_ptr + at * LATENT_DIM + j, mask=j < LATENT_DIM, other=0.0)
        out += part * weight
    seen = total != 0  # NaN too, so that it shows
    out = out / tl.where(seen, total, 1.0)
    tl.store(out_ptr + row * LATENT_DIM + j, out, mask=j < LATENT_DIM)
    tl.store(lse_ptr + row, tl.where(seen, largest + tl.log(total), -float("inf")))


TILES = {
    "fp16": TileConfig(16, 32, 4, 1),
    "tf32": TileConfig(16, 16, 8, 1),
    "tf32x3": TileConfig(16, 16, 8, 1),
}
"""For decoding and for prompts. With 32 queries and 512 channels a program would spill registers;
with f32 caches it does so anyway. None of them has been timed."""

MORE_WARPS = TileConfig(16, 32, 8, 1)
"""For latents with scales by channel, which are all in registers at once, and for tails, whose
bounds are."""


def latent_tiles(
    format_k: QuantFormat, format_v: QuantFormat, *, is_tail: bool = False
) -> TileConfig:
    """The tiles of two types."""
    if is_tail or format_k.group_tokens > 1:
        return MORE_WARPS
    return TILES[product_of(format_k, format_v)]


def latent_constants(
    format_k: QuantFormat,
    format_v: QuantFormat,
    *,
    n_heads: int,
    latent_dim: int,
    rope_dim: int,
    tiles: TileConfig,
    softcap: bool,
    ptx: bool,
    tail: int = 0,
    tail_tokens: int = 1,
) -> dict[str, Any]:
    """The compile-time arguments of `latents_kernel`, and those for tails where there are none.

    Args:
        tail, tail_tokens: as `attention_constants` has them.
    """
    constants: dict[str, Any] = {"TAIL": tail, "TAIL_TOKENS": tail_tokens}
    if not tail:
        constants |= dict.fromkeys(("exact_ptr", "tail_start", "tail_newest"))
    for side, fmt in (("K", format_k), ("V", format_v)):
        codec = fmt.part("gpu")
        constants[f"READ_{side}"] = codec.read_tile
        constants[f"COLUMNS_{side}"] = codec.columns
        constants[f"PRODUCT_{side}"] = codec.PRODUCT
        constants[f"UNIT_{side}"] = getattr(codec, "UNIT", 1.0)
    return {
        **constants,
        "N_HEADS": n_heads,
        "QUERIES": tiles.queries,
        "LATENT_DIM": latent_dim,
        "LATENT_WIDTH": padded(latent_dim),
        "ROPE_DIM": rope_dim,
        "ROPE_WIDTH": padded(rope_dim),
        "KEYS": tiles.keys,
        "STAGES": tiles.stages,
        "SOFTCAP": softcap,
        "PTX": ptx,
    }


def segment_latents(
    gpu: GpuInfo,
    q: Tensor,
    q_rotated: Tensor,
    segment: Segment,
    seg_batch: SegmentBatch,
    batch: Batch,
    params: AttentionParams,
) -> tuple[Tensor, Tensor]:
    """See `SegmentLatents`; of what changes from token to token only tensors are read."""
    q, q_rotated = q.contiguous(), q_rotated.contiguous()
    tokens, n_heads, latent_dim = q.shape
    rope_dim, tail = q_rotated.shape[2], seg_batch.tail
    _check(q, q_rotated, segment, seg_batch, batch)
    sequences = len(batch.starts) - 1
    most_new = max(end - at for at, end in itertools.pairwise(batch.starts))
    decode = most_new <= FEW_TOKENS
    formats = (segment.format_k, segment.format_v)
    tiles = latent_tiles(*formats, is_tail=seg_batch.is_tail)
    constants = latent_constants(
        *formats,
        n_heads=n_heads,
        latent_dim=latent_dim,
        rope_dim=rope_dim,
        tiles=tiles,
        softcap=params.softcap != 0,
        ptx=gpu.ptx,
        tail=0 if tail is None else 2 if seg_batch.is_tail else 1,
        tail_tokens=1 if tail is None else tail.group,
    )
    if tail is not None:
        constants["exact_ptr"] = seg_batch.exact_table
        constants |= {"tail_start": tail.start, "tail_newest": tail.newest}
    table = seg_batch.page_table
    blocks = triton.cdiv(most_new * n_heads, tiles.queries)
    capacity = table.shape[1] * segment.k[0].shape[2]
    if tail is not None and seg_batch.is_tail:
        capacity = min(capacity, tail.reach + PAGE_TOKENS)
    splits = n_splits(gpu, sequences, blocks, capacity, tiles.keys) if decode else 1
    parts = q.new_empty(tokens, n_heads, splits, latent_dim)
    part_lse = torch.empty(tokens, n_heads, splits, dtype=torch.float32, device=q.device)
    launch(
        latents_kernel,
        (blocks, splits, sequences),
        q,
        q_rotated,
        segment.operands_k,
        segment.operands_v,
        table,
        seg_batch.length_table,
        batch.start_table,
        batch.positions,
        parts,
        part_lse,
        seg_batch.first_position,
        table.shape[1],
        params.softmax_scale,
        params.softcap,
        **constants,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    if splits == 1:
        return parts[:, :, 0], part_lse[:, :, 0]
    out, lse = torch.empty_like(q), torch.empty_like(part_lse[:, :, 0])
    launch(
        merge_latents_kernel,
        (tokens * n_heads,),
        parts,
        part_lse,
        out,
        lse,
        splits,
        SPLITS=MOST_SPLITS,
        LATENT_DIM=latent_dim,
        WIDTH=padded(latent_dim),
    )
    return out, lse


def _check(
    q: Tensor, q_rotated: Tensor, segment: Segment, rows: SegmentBatch, batch: Batch
) -> None:
    """Queries, pages and tables are of the same tokens, sizes and sequences."""
    tokens, n_heads, latent_dim = q.shape
    n_sequences = len(batch.starts) - 1
    check_segment(segment, latent_dim, q_rotated.shape[2])
    check_tables(rows, batch)
    if segment.k[0].shape[1] != 1 or tokens != batch.starts[-1]:
        raise BoundsError(f"{tokens} tokens, {segment.k[0].shape[1]} KV heads")
    check_array("queries", q, "float32", tokens, n_heads, latent_dim)
    check_array("rotated queries", q_rotated, "float32", tokens, n_heads, q_rotated.shape[2])
    check_array("lengths", rows.length_table, "int32", n_sequences)
    check_array("starts", batch.start_table, "int32", n_sequences + 1)


def why_not(spec: LatentAttentionSpec) -> str:
    """What no kernel does, in words; empty if there is nothing."""
    if spec.latent_dim > MOST_CHANNELS:
        return f"latents of {spec.latent_dim} channels, of {MOST_CHANNELS} at most"
    return ""


def latent_attention(
    gpu: GpuInfo,
    x: Tensor,
    layer: LayerWeights,
    spec: LayerSpec,
    inputs: TokenInputs,
    cache: LayerCache,
    batch: Batch,
) -> Tensor:
    """Mix tokens by latent attention: ten launches for one segment, with a latent of q; more for a
    sink and a tail."""
    weights, attn = layer.mixer, spec.mixer
    assert isinstance(weights, LatentAttentionWeights)
    assert isinstance(attn, LatentAttentionSpec)
    first = weights.attn_q if weights.attn_q_a is None else weights.attn_q_a
    projections = [first, weights.attn_kv_a_mqa]
    q, row = linears(normed(x, layer.attn_norm, projections), projections)
    if weights.attn_q_a is not None:
        (q,) = linears(normed(q, weights.attn_q_a_norm, [weights.attn_q]), [weights.attn_q])

    turns = QueryKeySteps(rope=inputs.rope)
    parts = row.view(len(x), 1, attn.latent_dim + attn.rope_dim)
    latent = parts[..., : attn.latent_dim].contiguous()
    rotated = turn_queries(parts[..., attn.latent_dim :], turns)
    norm = QueryKeySteps(k_norm=weights.attn_kv_a_norm)
    store_rows(latent, rotated, norm, cache, cache.rows_of(batch))
    pack_groups(pack_groups_gpu, cache, cache.rows_of(batch))

    heads = q.view(len(x), attn.n_heads, attn.nope_dim + attn.rope_dim)
    plain = heads[..., : attn.nope_dim]
    if inputs.q_scale is not None:
        plain = plain * inputs.q_scale[:, None, None]
    steps = QueryKeySteps(rope=inputs.rope, q_scale=inputs.q_scale)
    q_rotated = turn_queries(heads[..., attn.nope_dim :], steps)
    run = partial(segment_latents, gpu)
    absorbed = head_products(plain, weights.attn_k_b)
    out = attend(run, absorbed, q_rotated, cache, batch, attn.params, rotate=rotate_gpu)
    values = head_products(out, weights.attn_v_b)
    if weights.attn_gate is not None:
        values = gated(values, head_gate(x, layer, weights.attn_gate))
    return values.flatten(1)


def head_products(x: Tensor, stack: PackedTensor) -> Tensor:
    """See `primitives.head_products`: heads are the experts of their own rows."""
    n_tokens, n_heads, n_in = x.shape
    heads = torch.arange(n_heads, dtype=torch.int32, device=x.device).expand(n_tokens, -1)
    rows = x.reshape(-1, n_in)
    return stack_products(rows, heads.contiguous(), stack).view(n_tokens, n_heads, -1)
