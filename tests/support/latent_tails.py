"""A check of attention over latents that reads the first and the newest rows as f16."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from localkv.arch.spec import AttentionParams, CacheGroup
from localkv.cache.arrays import Arrays
from localkv.cache.kv_cache import KVCache
from localkv.cache.layout import GroupLayout, Tail
from localkv.kernels.attention import PackGroups, Rotate, StoreKV, pack_groups, store_rotated
from localkv.kernels.attention_mixers import SegmentLatents, attend
from support.tail_checks import Step, rounded, segments

HEADS, LATENT, ROPE = 5, 64, 32


class LatentKernels(NamedTuple):
    """The kernels of a backend; `made` makes its arrays of tensors."""

    arrays: Arrays
    run: SegmentLatents
    store: StoreKV
    pack: PackGroups
    rotate: Rotate
    made: Callable[[Tensor], Any]


def check_latents(
    kernels: LatentKernels, tail: Tail, type_k: str, type_v: str, steps: Sequence[Step]
) -> float:
    """Two sequences, prompts in chunks and generated tokens, on pages full of NaN, against the
    definition in float64.

    Returns:
        The largest error of a step, relative to its result.
    """
    arrays, run, store, pack, rotate, made = kernels
    group = CacheGroup(1, LATENT, ROPE, 0, (0,), is_latent=True)
    layout = GroupLayout(group, segments(tail, type_k, type_v, 32))
    cache = KVCache([layout], n_ctx=768, n_batch=300, n_sequences=2, arrays=arrays)
    (layer,) = cache.layers
    for segment in layer.segments:
        for plane in (*segment.k, *segment.v):
            plane[:] = 0xFF
    generator = torch.Generator().manual_seed(5)
    rows = [torch.randn(700, 1, LATENT + ROPE, generator=generator) for _ in range(2)]
    sequences = [cache.new_sequence(), cache.new_sequence()]
    params, worst = AttentionParams(1 / math.sqrt(LATENT + ROPE)), 0.0
    for news, generated in steps:
        parts = [(s, [0] * new) for s, new in zip(sequences, news, strict=True)]
        batch = cache.batch(parts, generated=generated)
        new = torch.cat(
            [x[s.length : s.length + n] for x, s, n in zip(rows, sequences, news, strict=True)]
        )
        latents, rotated = made(new[..., :LATENT]), made(new[..., LATENT:])
        store_rotated(store, rotate, latents, rotated, layer, batch.segments)
        pack_groups(pack, layer, batch.segments)
        q = 3 * torch.randn(sum(news), HEADS, LATENT + ROPE, generator=generator)
        halves = made(q[..., :LATENT]), made(q[..., LATENT:])
        got = torch.as_tensor(
            np.asarray(attend(run, *halves, layer, batch, params, rotate=rotate))
        ).double()
        for i, sequence in enumerate(sequences):
            end, at = sequence.length + news[i], slice(batch.starts[i], batch.starts[i + 1])
            want = expected(q[at], rows[i][:end], tail, type_k, type_v)
            worst = max(worst, float((got[at] - want).norm() / want.norm()))
            sequence.length = end
    return worst


def expected(q: Tensor, known: Tensor, tail: Tail, type_k: str, type_v: str) -> Tensor:
    """Sums of latents [new, HEADS, LATENT] for q of the last positions of `known`."""
    sides = known[..., :LATENT], known[..., LATENT:]
    exact = torch.cat([side.half().double() for side in sides], -1)[:, 0]
    packed = torch.cat(
        [rounded(x, name, 32, tail) for x, name in zip(sides, (type_k, type_v), strict=True)], -1
    )[:, 0]
    out = torch.zeros((*q.shape[:2], LATENT), dtype=torch.float64)
    past = len(known) - len(q)
    for i in range(len(q)):
        at = torch.arange(past + i + 1)
        is_exact = (at < tail.start) | (at >= tail.begin(past + i))
        read = torch.where(is_exact[:, None], exact[at], packed[at])
        weights = (q[i].double() @ read.T / math.sqrt(LATENT + ROPE)).softmax(-1)
        out[i] = weights @ read[:, :LATENT]
    return out
