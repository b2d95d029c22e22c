"""Attention over latents in the interpreter, against float64."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from localkv.arch.spec import AttentionParams, CacheGroup, NormSpec
from localkv.cache.kv_cache import KVCache
from localkv.cache.layout import GroupLayout, SegmentSpec
from localkv.kernels.attention import store_rotated
from localkv.kernels.gpu.attention.latents import head_products, segment_latents
from localkv.kernels.gpu.device import GpuInfo
from localkv.kernels.gpu.products.plane_tensor import prepare
from localkv.kernels.gpu.rope_store import QueryKeySteps, store_rows
from localkv.kernels.gpu.triton_backend import triton_backend
from localkv.kernels.layer_weights import Norm
from localkv.kernels.reference.backend import hadamard_transform, norm, store_kv
from localkv.kernels.reference.torch_arrays import TorchArrays
from localkv.quant_formats import FORMATS
from localkv.quant_formats.packed_tensor import PackedTensor
from support.forward import CONFORMANCE_IDS, logits, nmse
from support.latent_checks import attended, random_latents

GPU = GpuInfo(arch=90, n_processors=3, ptx=False)
FAMILIES = [
    ("f32", "f16"),
    ("f16", "q8_0"),
    ("bf16", "f16"),
    ("q8_0", "f16"),
    ("q5_1", "q4_0"),
    ("q4_0", "f16"),
    ("iq4_nl", "fp8_e4m3"),
    ("fp8_e4m3", "f16"),
    ("fp8_e4m3_token", "f16"),
    ("nuq4", "f16"),
    ("q8_0", "nuq4"),
    ("nuq4", "nuq4"),
]
"""A type of latents of each family of kernels."""


def error(
    types: tuple[str, str],
    lengths: list[tuple[int, int]],
    *,
    latent_dim: int = 64,
    rope_dim: int = 32,
    n_heads: int = 6,
    softcap: float = 0.0,
) -> float:
    params = AttentionParams(1 / math.sqrt(latent_dim + rope_dim), softcap=softcap)
    arrays = TorchArrays("cpu")
    made = random_latents(
        arrays,
        store_kv,
        hadamard_transform,
        n_heads=n_heads,
        latent_dim=latent_dim,
        rope_dim=rope_dim,
        lengths=lengths,
        spec=SegmentSpec(*types, 0, latent_dim & -latent_dim, 0),
        params=params,
    )
    for plane in (*made.segment.k, *made.segment.v):
        plane[made.cache.pools[0].free] = 0xFF
    run = partial(segment_latents, GPU)
    return nmse(attended(run, hadamard_transform, made, params, arrays), made.want)


@pytest.mark.parametrize("types", FAMILIES, ids="/".join)
def test_decode(types: tuple[str, str]) -> None:
    assert error(types, [(70, 1), (0, 2)]) < 2e-5


@pytest.mark.slow
@pytest.mark.parametrize("types", FAMILIES, ids="/".join)
def test_prefill(types: tuple[str, str]) -> None:
    assert error(types, [(10, 9), (0, 12)]) < 2e-5


@pytest.mark.slow
@pytest.mark.parametrize(("latent_dim", "rope_dim", "n_heads"), [(512, 64, 20), (80, 16, 3)])
def test_sizes(latent_dim: int, rope_dim: int, n_heads: int) -> None:
    sizes = {"latent_dim": latent_dim, "rope_dim": rope_dim, "n_heads": n_heads}
    for lengths in ([(300, 1)], [(2, 10)]):
        assert error(("f16", "f16"), lengths, **sizes, softcap=3.0) < 2e-5


def test_stored_rows() -> None:
    """The latent is normed and rotated, the other part only rotated, each by itself."""
    arrays, generator = TorchArrays("cpu"), torch.Generator().manual_seed(3)
    group = CacheGroup(1, 128, 64, 0, (0,), is_latent=True)
    spec = SegmentSpec("q8_0", "q5_1", 0, 128, 64)
    k = torch.randn(5, 1, 128, generator=generator)
    v = torch.randn(5, 1, 64, generator=generator)
    by = Norm(NormSpec("", "rms", 1e-6), torch.rand(128, generator=generator) + 0.5)
    planes = []
    for is_ours in (True, False):
        cache = KVCache([GroupLayout(group, (spec,))], n_ctx=256, arrays=arrays)
        layer = cache.layers[0]
        for plane in (*layer.segments[0].k, *layer.segments[0].v):
            plane.zero_()
        rows = layer.rows_of(cache.batch([(cache.new_sequence(), [0] * 5)]))
        if is_ours:
            store_rows(k, v, QueryKeySteps(k_norm=by), layer, rows)
        else:
            store_rotated(store_kv, hadamard_transform, norm(k, by), v, layer, rows)
        planes.append([*layer.segments[0].k, *layer.segments[0].v])
    for ours, theirs in zip(*planes, strict=True):
        assert torch.equal(ours, theirs)


def test_products_of_heads() -> None:
    generator = np.random.default_rng(4)
    values = generator.standard_normal((3, 64, 32)).astype(np.float32)
    stack = PackedTensor(FORMATS["f32"], values.view(np.uint8), values.shape)
    x = torch.from_numpy(generator.standard_normal((7, 3, 32)).astype(np.float32))
    got = head_products(x, prepare(stack, torch.device("cpu")))
    assert nmse(got.numpy(), np.einsum("thi,hoi->tho", x.numpy(), values)) < 1e-10


@pytest.mark.slow
def test_llama_cpp_logits(conformance: Path) -> None:
    path = conformance / "archs2" / "deepseek2.gguf"
    want = np.fromfile(path.with_suffix(".logits.f32"), np.float32).reshape(300, -1)[:12]
    got = logits(path, triton_backend("cpu"), CONFORMANCE_IDS[:12], "f16", chunk=9)
    assert nmse(got, want) <= 2e-6
