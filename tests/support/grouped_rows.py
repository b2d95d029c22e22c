"""Rows packed in groups from f16 pages, in permuted pages, and attention over them in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from localkv.arch.spec import AttentionParams
from localkv.cache.arrays import Batch, LayerCache, Segment, SegmentBatch, row_fields
from localkv.cache.layout import PAGE_TOKENS, pages_for
from localkv.kernels.reference.backend import hadamard_transform
from localkv.quant_formats import FORMATS


@dataclass(frozen=True)
class GroupedRows:
    """Sequences with whole groups of packed rows, and new tokens that come behind these.

    Attributes:
        k, v: of each sequence, what its rows were before they were packed.
        groups: int64 [n, 2], as `SegmentBatch` has them.
    """

    q: Tensor
    k: list[Tensor]
    v: list[Tensor]
    packed: Segment
    tail: Segment
    seg_batch: SegmentBatch
    batch: Batch
    groups: Tensor


def _segment(
    type_k: str, type_v: str, n_pages: int, heads: int, dim: int, rotations: tuple[int, int]
) -> Segment:
    formats = FORMATS[type_k], FORMATS[type_v]
    k, v = (
        tuple(
            torch.full((n_pages, heads, PAGE_TOKENS, *fields), 0xFF, dtype=torch.uint8)
            for fields in row_fields(fmt, dim)
        )
        for fmt in formats
    )
    return Segment(*formats, *rotations, k, v)


def grouped_rows(
    lengths: Sequence[int],
    *,
    type_k: str,
    type_v: str,
    store: object,
    pack: object,
    n_kv_heads: int = 2,
    group: int = 2,
    head_dim: int = 64,
    n_new: int = 1,
    rotations: tuple[int, int] = (0, 0),
    size: float = 1.0,
    seed: int = 0,
) -> GroupedRows:
    """Sequences of `lengths` rows, multiples of a group, and `n_new` tokens each.

    K and V are normal numbers times `size`; of K, a channel is an outlier.

    Args:
        store, pack: how a backend stores rows of f16, and packs groups of them.
    """
    generator = torch.Generator().manual_seed(seed)
    n_pages = sum(pages_for(n) for n in lengths) + 2
    tokens = max(FORMATS[name].group_tokens for name in (type_k, type_v))
    packed = _segment(type_k, type_v, n_pages, n_kv_heads, head_dim, rotations)
    tail = _segment("f16", "f16", n_pages, n_kv_heads, head_dim, (0, 0))
    pages, tail_pages = (torch.randperm(n_pages, generator=generator).tolist() for _ in range(2))
    tables, groups, ks, vs = [], [], [], []
    for length in lengths:
        n = pages_for(length)
        tables.append([pages.pop() for _ in range(n)])
        tail_table = [tail_pages.pop() for _ in range(n)]
        slots = [
            tail_table[i // PAGE_TOKENS] * PAGE_TOKENS + i % PAGE_TOKENS for i in range(length)
        ]
        k, v = (
            (size * torch.randn(length, n_kv_heads, head_dim, generator=generator)).half().float()
            for _ in range(2)
        )
        k[..., 3] = (k[..., 3] * 8 + 20).half().float()
        ks.append(k)
        vs.append(v)
        rows = SegmentBatch(
            torch.tensor([tail_table]), (length,), torch.tensor([length]), 0,
            torch.arange(length), torch.tensor(slots),
        )  # fmt: skip
        store(k, v, LayerCache((tail,)), (rows,))
        groups += [
            (tables[-1][i // PAGE_TOKENS] * PAGE_TOKENS + i % PAGE_TOKENS, slots[i])
            for i in range(0, length, tokens)
        ]
    order = torch.randperm(len(groups), generator=generator)
    table = torch.tensor([*groups, (-1, 0)])[torch.cat([order, torch.tensor([len(groups)])])]
    pack(packed, tail, table)
    width = max(len(one) for one in tables)
    positions = [length + i for length in lengths for i in range(n_new)]
    starts = tuple(range(0, len(positions) + 1, n_new))
    seg_batch = SegmentBatch(
        torch.tensor([one + [0] * (width - len(one)) for one in tables]),
        tuple(lengths),
        torch.tensor(lengths, dtype=torch.int32),
        0,
        torch.zeros(0, dtype=torch.int64),
        torch.zeros(0, dtype=torch.int64),
    )
    batch = Batch(
        torch.zeros(len(positions), dtype=torch.int64),
        torch.tensor(positions),
        starts,
        torch.tensor(starts, dtype=torch.int32),
        (seg_batch,),
        torch.zeros(0, dtype=torch.int64),
        (True,) * len(lengths),
        torch.zeros(len(lengths), dtype=torch.int64),
        torch.zeros(0, dtype=torch.int64),
    )
    q = torch.randn(len(positions), n_kv_heads * group, head_dim, generator=generator)
    return GroupedRows(q, ks, vs, packed, tail, seg_batch, batch, table)


def stored(name: str, x: Tensor, rotation: int) -> Tensor:
    """What is read of rows [n, n_kv_heads, head_dim] that were packed, in float64."""
    codec = FORMATS[name].codec
    rows = hadamard_transform(x, rotation).transpose(0, 1).contiguous().numpy()
    return torch.from_numpy(np.array(codec.decode(codec.encode(rows)))).transpose(0, 1).double()


def plain_attention(rows: GroupedRows, params: AttentionParams) -> tuple[Tensor, Tensor]:
    """Softmax in float64 over the packed rows; queries are as the cache's K, rotated or not."""
    q, packed = rows.q.double(), rows.packed
    out, lse = torch.zeros_like(q), torch.full_like(q[..., 0], -torch.inf)
    n_heads = packed.k[0].shape[1]
    group = q.shape[1] // n_heads
    for i, start in enumerate(rows.batch.starts[:-1]):
        k = stored(packed.format_k.name, rows.k[i], packed.rotation_k)
        v = stored(packed.format_v.name, rows.v[i], packed.rotation_v)
        for token in range(start, rows.batch.starts[i + 1]):
            first = max(0, int(params.first_visible(rows.batch.positions[token])))
            for head in range(q.shape[1]):
                logits = k[first:, head // group] @ q[token, head] * params.softmax_scale
                if len(logits):
                    lse[token, head] = logits.logsumexp(-1)
                    out[token, head] = logits.softmax(-1) @ v[first:, head // group]
    return out, lse
