"""Attention that reads the first and the newest rows as f16, against its definition in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from localkv.arch.mixer_spec import AttentionParams
from localkv.cache.layout import SegmentSpec, tail_segments
from localkv.cache.tail import Tail
from localkv.cache.uniform_cache import uniform_cache
from localkv.formats import KV_FORMATS
from localkv.kernels.attention import attention
from localkv.kernels.cpu.arrays import NumpyArrays
from localkv.kernels.cpu.attention.packed_attention import PackedAttention
from localkv.kernels.cpu.store.rotate import rotate_cpu
from localkv.kernels.cpu.store.store_kv import store_kv_cpu
from localkv.kernels.reference.attention import attention_reference
from localkv.kernels.reference.hadamard import hadamard_transform
from localkv.kernels.reference.store_kv import store_kv
from localkv.kernels.reference.torch_arrays import TorchArrays
from localkv.kernels.reference.torch_codec import decode, encode
from localkv.kernels.store_kv import store_rotated

HEADS, GROUP, DIM = 2, 3, 64
Backend = tuple[Any, Any, Any, Any, Callable[[Tensor], Any]]
BACKENDS: dict[str, Callable[[], Backend]] = {
    "reference": lambda: (
        TorchArrays(),
        attention_reference,
        store_kv,
        hadamard_transform,
        lambda x: x,
    ),
    "cpu": lambda: (
        NumpyArrays(),
        PackedAttention(),
        store_kv_cpu,
        rotate_cpu,
        lambda x: x.contiguous().numpy(),
    ),
}


def segments(tail: Tail, type_k: str, type_v: str, rotation: int) -> tuple[SegmentSpec, ...]:
    packed = SegmentSpec(type_k, type_v, tail.start, rotation, rotation, tail)
    sink = (SegmentSpec("f16", "f16"),) if tail.start else ()
    return (*sink, packed, *tail_segments(tail))


def rounded(x: Tensor, name: str, rotation: int = 0) -> Tensor:
    fmt = KV_FORMATS[name]
    return hadamard_transform(
        decode(fmt, encode(fmt, hadamard_transform(x, rotation))).double(), rotation
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


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("tail", "window", "type_k", "rotation"),
    [
        (Tail(4, 64), 0, "q4_0", 64),
        (Tail(0, 20), 100, "q4_0", 0),
        (Tail(70, 1), 0, "q8_0", 0),
        (Tail(300, 300), 0, "q4_0", 0),
    ],
)
def test_rows_are_read_as_they_are_defined(
    backend: str, tail: Tail, window: int, type_k: str, rotation: int
) -> None:
    """Several sequences, prompts in chunks and generated tokens, on pages full of NaN."""
    arrays, run, store, rotate, made = BACKENDS[backend]()
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
    steps = [((1, 280), False), ((3, 3), True), ((300, 40), False), ((20, 1), True), ((1, 2), True)]
    for news, generated in steps:
        parts = [(s, [0] * new) for s, new in zip(sequences, news, strict=True)]
        batch = cache.batch(parts, generated=generated)
        new = [x[s.length : s.length + n] for x, s, n in zip(rows, sequences, news, strict=True)]
        k, v = (made(torch.cat([x[:, side] for x in new])) for side in (0, 1))
        store_rotated(store, rotate, k, v, layer, batch.segments)
        q = 3 * torch.randn(sum(news), HEADS * GROUP, DIM, generator=generator)
        got = torch.as_tensor(
            np.asarray(attention(run, made(q), layer, batch, params, rotate=rotate))
        ).double()
        for i, sequence in enumerate(sequences):
            positions = range(sequence.length, sequence.length + news[i])
            known = rows[i][: positions.stop]
            sides = [known[:, 0], known[:, 1]]
            exact = [rounded(x, "f16") for x in sides]
            packed = [rounded(sides[0], type_k, rotation), rounded(sides[1], "q4_0", rotation)]
            begins = [tail.begin(position) for position in positions]
            at = slice(batch.starts[i], batch.starts[i + 1])
            want = expected(q[at], exact, packed, begins, tail, window)
            assert float((got[at] - want).norm() / want.norm()) < (5e-4 if generated else 2e-6)
            sequence.length = positions.stop
