"""The GPU backend on a GPU: kernels against the references, whole models against the reference's.

Where there is none these tests are skipped; what `tests/interpreter` and `tests/aot` can show is
shown there. With TRITON_INTERPRET=1 they run in the interpreter, so that they can be tried.
"""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import pytest
import torch

from localkv.arch.spec import AttentionParams
from localkv.cache.arrays import Segment
from localkv.cache.ladder import parse_ladder
from localkv.cache.layout import PAGE_TOKENS, SegmentSpec
from localkv.config import CacheConfig
from localkv.engine.batch_engine import BatchEngine
from localkv.engine.engine import Engine
from localkv.engine.generation import GenerationOptions
from localkv.kernels.attention import StoreKV
from localkv.kernels.layer_weights import Linear
from localkv.kernels.reference.backend import linear as plain_linear
from localkv.kernels.reference.backend import reference_backend, store_kv
from localkv.loader.synthetic import random_rows, synthetic_model
from localkv.quant_formats import FORMATS, WEIGHT_FORMATS
from localkv.quant_formats.packed_tensor import PackedTensor
from localkv.sampling.params import SamplingParams
from localkv.sampling.sampler import Sampler
from support.cache_types import BY_HEAD, NAMES, PAIRS
from support.paged_rows import PagedRows, paged_rows, plain_attention
from support.torch_edge import torch_cache

HAS_GPU = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (HAS_GPU or INTERPRETED), reason="needs an NVIDIA GPU of sm_80 or newer"
    ),
]


def on_device(rows: PagedRows) -> PagedRows:
    seg, batch, segment = rows.seg_batch, rows.batch, rows.segment
    codebooks = (segment.codebook_k, segment.codebook_v)
    codebook_k, codebook_v = (None if book is None else book.to(DEVICE) for book in codebooks)
    return PagedRows(
        rows.q.to(DEVICE),
        replace(
            segment,
            k=tuple(plane.to(DEVICE) for plane in segment.k),
            v=tuple(plane.to(DEVICE) for plane in segment.v),
            codebook_k=codebook_k,
            codebook_v=codebook_v,
        ),
        replace(
            seg, page_table=seg.page_table.to(DEVICE), length_table=seg.length_table.to(DEVICE)
        ),
        replace(
            batch, positions=batch.positions.to(DEVICE), start_table=batch.start_table.to(DEVICE)
        ),
    )


SHAPES: tuple[tuple[list[tuple[int, int]], int, int], ...] = (
    ([(1300, 1)], 128, 4),
    ([(700, 1), (0, 3), (255, 2)], 64, 3),
    ([(300, 40), (0, 90)], 128, 8),
    ([(513, 20)], 96, 1),
)
"""Rows before and new tokens of each sequence, channels of a head, query heads of a KV head."""


@pytest.mark.parametrize(
    ("type_k", "type_v", "lengths", "head_dim", "group"),
    [(*pair, *SHAPES[i % len(SHAPES)]) for i, pair in enumerate(PAIRS)],
)
def test_attention(
    type_k: str, type_v: str, lengths: list[tuple[int, int]], head_dim: int, group: int
) -> None:
    from localkv.kernels.gpu.attention.packed_attention import segment_attention
    from localkv.kernels.gpu.products.tile_sizes import gpu_of

    rows = paged_rows(
        lengths, type_k=type_k, type_v=type_v, n_kv_heads=2, group=group, head_dim=head_dim
    )
    there = on_device(rows)
    for params in (AttentionParams(head_dim**-0.5), AttentionParams(head_dim**-0.5, 100, 5.0)):
        out, lse = segment_attention(
            gpu_of(DEVICE), there.q, there.segment, there.seg_batch, there.batch, params
        )
        want, want_lse = plain_attention(
            rows, params.softmax_scale, softcap=params.softcap, window=params.window
        )
        assert float((out.cpu() - want).norm() / want.norm()) < 1.5e-3
        assert float((lse.cpu() - want_lse).abs().max()) < 1e-2


@pytest.mark.parametrize("name", [name for name in NAMES if name not in BY_HEAD])
def test_stored_rows_are_the_references(name: str) -> None:
    from support.gpu_store import store_kv_gpu

    x = torch.randn(300, 2, 128, generator=torch.Generator().manual_seed(0)) * 3

    def stored(store: StoreKV, device: torch.device) -> Segment:
        cache = torch_cache(
            n_layers=1,
            n_kv_heads=2,
            head_dim=128,
            segments=[SegmentSpec(name, name)],
            n_ctx=300,
            device=device,
        )
        batch = cache.batch([(cache.new_sequence(), [0] * 300)])
        (segment,) = cache.layers[0].segments
        for plane in (*segment.k, *segment.v):
            plane.zero_()
        rows = x.to(device)
        store(rows, rows, cache.layers[0], batch.segments)
        return segment

    ours, plain = stored(store_kv_gpu, DEVICE), stored(store_kv, torch.device("cpu"))
    for a, b in zip((*ours.k, *ours.v), (*plain.k, *plain.v), strict=True):
        assert torch.equal(a.cpu(), b)


@pytest.mark.parametrize("n_tokens", [1, 2, 5, 8, 17, 64, 200, 300])
@pytest.mark.parametrize("name", [fmt.name for fmt in WEIGHT_FORMATS.values()])
def test_products(name: str, n_tokens: int) -> None:
    from localkv.kernels.gpu.products.products import linears
    from localkv.kernels.gpu.triton_backend import triton_backend

    n_out, n_in = 272, 512
    rows = random_rows(FORMATS[name], n_out, n_in, generator=np.random.default_rng(1))
    weight = PackedTensor(FORMATS[name], torch.from_numpy(rows), (n_out, n_in))
    generator = torch.Generator().manual_seed(2)
    x, residual = (torch.randn(n_tokens, n, generator=generator) for n in (n_in, n_out))
    backend = triton_backend(DEVICE)
    layer = Linear(backend.prepare(weight))
    (got,) = linears(x.to(DEVICE), (layer,), residual=residual.to(DEVICE))
    got = got.cpu()
    want = residual.double() + plain_linear(x.double(), Linear(weight))
    assert float((got - want).norm() / want.norm()) < (1e-6 if n_tokens == 1 else 1.5e-3)


@pytest.mark.parametrize(("type_k", "type_v"), [("f16", "f16"), ("q4_0", "q8_0"), ("q8_0", "q4_1")])
@pytest.mark.parametrize(("shape", "weights"), [("llama-tiny", "f32"), ("moe-tiny", "q8_0")])
def test_generation(shape: str, weights: str, type_k: str, type_v: str) -> None:
    """Recorded steps across pages and buckets, drawn on the device, and their logits.

    Where weights are packed, products round activations to fp16, and a packed cache makes steps of
    that. A few tokens then go to other experts, in Triton's interpreter too, so that most rows
    count, not the worst.
    """
    from localkv.kernels.gpu.triton_backend import triton_backend

    ours, plain = (
        Engine(
            synthetic_model(shape, weights, backend),
            CacheConfig(type_k, type_v, n_ctx=600),
            n_batch=200,
        )
        for backend in (triton_backend(DEVICE), reference_backend())
    )
    ours.warm_up()
    prompt = [(i * 31 + 7) % 512 for i in range(250)]
    for temperature in (0.0, 0.9):
        sampler = Sampler(SamplingParams(seed=1, temperature=temperature), n_vocab=512)
        ids = list(
            BatchEngine(ours).generate(prompt, GenerationOptions(sampler=sampler, max_tokens=20))
        )
        assert len(ids) == 20
        assert (
            list(
                BatchEngine(ours).generate(
                    prompt, GenerationOptions(sampler=sampler, max_tokens=20)
                )
            )
            == ids
        )
        want = plain.logits(prompt + ids)
        got = ours.logits(prompt + ids)
        jumps = weights != "f32" and type_k != "f16"
        rows = (got - want).norm(dim=1) / want.norm(dim=1)
        off = rows.median() if jumps else (got - want).norm() / want.norm()
        assert float(off) < (5e-2 if jumps else 2e-2)
        if temperature == 0.0:
            # what was taken is the largest, or as good as that
            at = want[len(prompt) - 1 : -1]
            short = at.max(-1).values - at[range(20), ids]
            worst = short.median() if jumps else short.max()
            assert float(worst) < 0.05 * float(at.std())


def test_generation_within_a_budget() -> None:
    """Pages change between recorded steps, which are others for each set of runs of pages."""
    from localkv.kernels.gpu.triton_backend import triton_backend

    backends = (triton_backend(DEVICE), reference_backend())
    models = [synthetic_model("llama-tiny", "f32", backend) for backend in backends]
    (group,) = models[0].config.groups
    row = 2 * len(group.layers) * group.n_kv_heads * (group.key_dim + group.value_dim)
    ladder = parse_ladder("f16,q8_0,q8_0/q4_0,q4_0")
    cache = CacheConfig(
        "f16", "f16", n_ctx=600, kv_budget=row * PAGE_TOKENS * 3 // 2, kv_ladder=ladder
    )
    ours, plain = (Engine(model, cache, n_batch=200) for model in models)
    ours.warm_up()
    prompt = [(i * 31 + 7) % 512 for i in range(250)]
    sampler = Sampler(SamplingParams(temperature=0.0), n_vocab=512)
    ids = list(
        BatchEngine(ours).generate(prompt, GenerationOptions(sampler=sampler, max_tokens=20))
    )
    assert len(ids) == 20
    assert ours.cache.requantised.n_pages > 0
    assert (
        list(BatchEngine(ours).generate(prompt, GenerationOptions(sampler=sampler, max_tokens=20)))
        == ids
    )
    want, got = plain.logits(prompt + ids), ours.logits(prompt + ids)
    assert float((got - want).norm() / want.norm()) < 5e-2
