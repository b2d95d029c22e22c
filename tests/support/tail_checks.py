"""A check of attention that reads the first and the newest rows as f16."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from localkv.arch.spec import AttentionParams
from localkv.cache.arrays import Arrays
from localkv.cache.kv_cache import uniform_cache
from localkv.cache.layout import SegmentSpec, Tail, tail_segments
from localkv.kernels.attention import (
    PackGroups,
    Rotate,
    SegmentAttention,
    StoreKV,
    attention,
    pack_groups,
    store_rotated,
)
from localkv.kernels.reference.backend import hadamard_transform
from localkv.kernels.reference.torch_arrays import decode, encode
from localkv.quant_formats import FORMATS

HEADS, GROUP, DIM = 2, 3, 64
Step = tuple[tuple[int, int], bool]
"""New tokens of each of two sequences, and whether they are generated."""


class Kernels(NamedTuple):
    """The kernels of a backend; `made` makes its arrays of tensors."""

    arrays: Arrays
    run: SegmentAttention
    store: StoreKV
    pack: PackGroups
    rotate: Rotate
    made: Callable[[Tensor], Any]


def segments(tail: Tail, type_k: str, type_v: str, rotation: int) -> tuple[SegmentSpec, ...]:
    packed = SegmentSpec(type_k, type_v, tail.start, rotation, rotation, tail)
    sink = (SegmentSpec("f16", "f16"),) if tail.start else ()
    return (*sink, packed, *tail_segments(tail))


def rounded(x: Tensor, name: str, rotation: int, tail: Tail) -> Tensor:
    """What is read of rows [tokens, HEADS, DIM]; rows of open groups are as they were."""
    fmt, whole = FORMATS[name], tail.whole(len(x))
    if tail.group > 1:
        x = x.half().float()
    rows = hadamard_transform(x[tail.start : whole], rotation).transpose(0, 1).contiguous()
    packed = hadamard_transform(decode(fmt, encode(fmt, rows)).double(), rotation)
    return torch.cat(
        [x[: tail.start].double(), packed.transpose(0, 1), x[max(tail.start, whole) :]]
    )


def expected(
    q: Tensor, exact: list[Tensor], packed: list[Tensor], begins: list[int], tail: Tail, window: int
) -> Tensor:
    """q [new, heads, DIM] of the last positions; rows [tokens, HEADS, DIM]."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    past = len(exact[0]) - len(q)
    for i in range(len(q)):
        at = torch.arange(past + i + 1)
        is_exact = (at < tail.start) | (at >= begins[i])
        seen = at[max(0, past + i + 1 - window) if window else 0 :]
        for head in range(q.shape[1]):
            k, v = (
                torch.where(is_exact[:, None], e[at, head // GROUP], p[at, head // GROUP])[seen]
                for e, p in zip(exact, packed, strict=True)
            )
            weights = (k @ q[i, head].double() / math.sqrt(DIM)).softmax(0)
            out[i, head] = weights @ v
    return out


def check(
    kernels: Kernels,
    tail: Tail,
    type_k: str,
    *,
    steps: Sequence[Step],
    errors: tuple[float, float],
    window: int = 0,
    rotation: int = 0,
) -> None:
    """Several sequences, prompts in chunks and generated tokens, on pages full of NaN, against the
    definition in float64.

    Args:
        errors: of tokens of prompts and of generated ones, relative to all results together.
    """
    arrays, run, store, pack, rotate, made = kernels
    cache = uniform_cache(
        arrays,
        n_layers=1,
        n_kv_heads=HEADS,
        head_dim=DIM,
        segments=segments(tail, type_k, "q4_0", rotation),
        n_ctx=768,
        n_batch=300,
        n_sequences=2,
    )
    (layer,) = cache.layers
    for segment in layer.segments:
        for plane in (*segment.k, *segment.v):
            plane[:] = 0xFF
    generator = torch.Generator().manual_seed(5)
    rows = [torch.randn(700, 2, HEADS, DIM, generator=generator) for _ in range(2)]
    sequences = [cache.new_sequence(), cache.new_sequence()]
    params = AttentionParams(1 / math.sqrt(DIM), window)
    for news, generated in steps:
        parts = [(s, [0] * new) for s, new in zip(sequences, news, strict=True)]
        batch = cache.batch(parts, generated=generated)
        new = [x[s.length : s.length + n] for x, s, n in zip(rows, sequences, news, strict=True)]
        k, v = (made(torch.cat([x[:, side] for x in new])) for side in (0, 1))
        store_rotated(store, rotate, k, v, layer, batch.segments)
        pack_groups(pack, layer, batch.segments)
        q = 3 * torch.randn(sum(news), HEADS * GROUP, DIM, generator=generator)
        got = torch.as_tensor(
            np.asarray(attention(run, made(q), layer, batch, params, rotate=rotate))
        ).double()
        for i, sequence in enumerate(sequences):
            positions = range(sequence.length, sequence.length + news[i])
            known = rows[i][: positions.stop]
            sides = [known[:, 0], known[:, 1]]
            exact = [x.half().double() for x in sides]
            types = (type_k, "q4_0")
            packed = [
                rounded(x, name, rotation, tail) for x, name in zip(sides, types, strict=True)
            ]
            begins = [tail.begin(position) for position in positions]
            at = slice(batch.starts[i], batch.starts[i + 1])
            want = expected(q[at], exact, packed, begins, tail, window)
            assert float((got[at] - want).norm() / want.norm()) < errors[generated]
            sequence.length = positions.stop
