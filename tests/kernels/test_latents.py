"""Attention over latents against float64, and each part of it against leaving it out."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localkv.arch.spec import AttentionParams, CacheGroup, LatentAttentionSpec, ModelSpec
from localkv.cache.cache_checks import check_cache, unused_type
from localkv.cache.layout import GroupLayout, SegmentSpec, cache_segments, group_bytes
from localkv.config import CacheConfig
from localkv.errors import UsageError
from localkv.kernels.cpu.arrays import NumpyArrays
from localkv.kernels.cpu.attention.latent_attention import LatentAttention
from localkv.kernels.cpu.cpu_backend import cpu_backend
from localkv.kernels.cpu.linear.products import CpuProducts
from localkv.kernels.cpu.store.store_kv import rotate_cpu, store_kv_cpu
from localkv.kernels.reference.backend import hadamard_transform, latents_reference, store_kv
from localkv.kernels.reference.torch_arrays import TorchArrays
from localkv.loader.gguf_file import open_gguf
from localkv.loader.synthetic import random_rows
from localkv.loader.weights import load_model, transposed
from localkv.memory.plan import ModelMemory
from localkv.model import Transformer
from localkv.quant_formats import FORMATS
from localkv.quant_formats.packed_tensor import PackedTensor
from support.cache_types import BY_HEAD, NAMES
from support.forward import CONFORMANCE_IDS, new_cache, nmse, run
from support.latent_checks import attended, random_latents

LENGTHS = [(0, 3), (300, 2), (700, 1)]
"""Past and new tokens: one page, a second one, several parts."""


def error(
    backend: str,
    lengths: list[tuple[int, int]],
    spec: SegmentSpec,
    *,
    softcap: float = 0.0,
    **sizes: Any,
) -> float:
    """NMSE of a backend's attention over random rows, stored in its own order of a page."""
    sizes = {"n_heads": 16, "latent_dim": 64, "rope_dim": 32, **sizes}
    width = sizes["latent_dim"] + sizes["rope_dim"]
    params = AttentionParams(2 / math.sqrt(width), softcap=softcap)
    if backend == "cpu":
        arrays, kernel, rotate, store = NumpyArrays(), LatentAttention(), rotate_cpu, store_kv_cpu
    else:
        arrays, kernel = TorchArrays("cpu"), latents_reference
        rotate, store = hadamard_transform, store_kv
    made = random_latents(arrays, store, rotate, lengths=lengths, spec=spec, params=params, **sizes)
    return nmse(attended(kernel, rotate, made, params, arrays), made.want)


@pytest.mark.parametrize("generated", [False, True])
@pytest.mark.parametrize("name", [name for name in NAMES if name not in BY_HEAD])
def test_every_type_of_latents(name: str, generated: bool) -> None:
    other = NAMES[NAMES.index(name) - 3]
    spec = SegmentSpec(name, "f16" if other in BY_HEAD else other, 0, 64, 32)
    for backend in ("cpu", "reference"):
        # a rounding of the rotation may send a value to the next code
        assert error(backend, LENGTHS, spec, generated=generated) < 2e-5


@pytest.mark.slow
@pytest.mark.parametrize("generated", [False, True])
@pytest.mark.parametrize(
    ("n_heads", "latent_dim", "rope_dim"),
    [(1, 16, 16), (3, 32, 16), (20, 512, 64), (65, 80, 48), (128, 256, 64)],
)
def test_sizes(n_heads: int, latent_dim: int, rope_dim: int, generated: bool) -> None:
    sizes = {"n_heads": n_heads, "latent_dim": latent_dim, "rope_dim": rope_dim}
    spec = SegmentSpec("f32", "f16")
    assert error("cpu", LENGTHS, spec, generated=generated, **sizes) < 1e-10


def test_soft_cap() -> None:
    spec = SegmentSpec("f16", "f16")
    for backend in ("cpu", "reference"):
        assert error(backend, LENGTHS, spec, softcap=2.0) < 1e-10


def test_a_rotation_does_not_mix_the_parts() -> None:
    """A rotation of the whole row would move the rotated part's outliers into the latent."""
    spec = SegmentSpec("q4_0", "f32", 0, 64, 0)
    assert error("cpu", LENGTHS, spec) < 2e-5


def test_many_generated_tokens_take_several_launches() -> None:
    """What parts leave to be merged has a bound, whatever the number of tokens."""
    spec = SegmentSpec("f16", "f16")
    assert error("cpu", [(700, 300)], spec, generated=True) < 1e-10


@pytest.mark.parametrize("name", ["f32", "f16", "q8_0", "q4_0", "q6_K"])
def test_products_of_heads(name: str) -> None:
    """All heads at once are what each is alone, whatever the number of tokens."""
    fmt, products = FORMATS[name], CpuProducts()
    rows = random_rows(fmt, 3 * 40, 256, generator=np.random.default_rng(2))
    stack = products.prepare(PackedTensor(fmt, rows.reshape(3, 40, -1), (3, 40, 256)))
    x = np.random.default_rng(3).standard_normal((4, 3, 256)).astype(np.float32)
    want = np.stack([products.matmul(x[:, i], stack[i]) for i in range(3)], axis=1)
    assert np.array_equal(products.head_products(x, stack), want)
    for token in range(4):  # with the chain of the first
        alone = products.head_products(x[token : token + 1], stack)
        assert np.array_equal(alone, want[token : token + 1])


@pytest.mark.parametrize("name", ["f32", "f16", "bf16", "q8_0", "q4_0"])
def test_matrices_of_older_files_are_transposed(name: str) -> None:
    """Floats as they are; the values of other types as F16."""
    fmt = FORMATS[name]
    rows = random_rows(fmt, 2 * 64, 96, generator=np.random.default_rng(2))
    stack = PackedTensor(fmt, rows.reshape(2, 64, -1), (2, 64, 96))
    turned = transposed(stack)
    assert turned.format.name == (name if fmt.block_size == 1 else "f16")
    assert turned.shape == (2, 96, 64)
    want = stack.decode().transpose(0, 2, 1)
    assert np.allclose(turned.decode(), want, rtol=0 if fmt.block_size == 1 else 2**-11)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"type_k": "q4_0"}, ""),
        ({"type_k": "q4_0", "type_v": "q4_0"}, ""),
        ({"type_k": "q8_0", "type_v": "q4_0"}, "-ctv q4_0 has no effect: latents are q8_0"),
    ],
)
def test_a_type_of_v_that_has_no_use_is_said(arguments: dict[str, str], words: str) -> None:
    group = CacheGroup(1, 512, 64, 0, (0,), is_latent=True)
    line = unused_type(CacheConfig(**arguments), [group])
    assert words in line if words and line else line is None
    assert unused_type(CacheConfig(**arguments), [replace(group, is_latent=False)]) is None


def test_types_of_the_parts_and_their_bytes() -> None:
    group = CacheGroup(1, 512, 64, 0, (0, 1, 2), is_latent=True)
    cache = CacheConfig("q4_0", "f32", type_k_rope="q8_0")
    (segment,) = cache_segments(cache, group)
    assert (segment.type_k, segment.type_v) == ("q4_0", "q8_0")
    assert (segment.rotation_k, segment.rotation_v) == (512, 64)
    layout = GroupLayout(group, (segment,))
    assert group_bytes(layout, n_ctx=256) == (3 * 256 * 288, 3 * 256 * 68)
    check_cache(cache, [group])
    with pytest.raises(UsageError, match="-ctk-rope q8_0 is about keys"):
        check_cache(cache, [replace(group, is_latent=False)])
    with pytest.raises(UsageError, match="rotated key cache type q8_0 with block size 32"):
        check_cache(cache, [replace(group, value_dim=48)])


@pytest.fixture
def model(conformance: Path) -> Transformer:
    return load_model(conformance / "archs2" / "deepseek2.gguf", cpu_backend())[0]


def f16_logits(model: Transformer, chunk: int = 300) -> np.ndarray:
    return run(model, new_cache(model, SegmentSpec("f16", "f16")), CONFORMANCE_IDS[:150], chunk)


def with_mixer(config: ModelSpec, change: Callable[[LatentAttentionSpec], Any]) -> ModelSpec:
    layers = []
    for layer in config.layers:
        assert isinstance(layer.mixer, LatentAttentionSpec)
        layers.append(replace(layer, mixer=change(layer.mixer)))
    return replace(config, layers=tuple(layers))


def test_any_chunks_give_the_same_bits(model: Transformer) -> None:
    once = f16_logits(model)
    for chunk in (1, 7, 130):
        assert np.array_equal(f16_logits(model, chunk), once)


@pytest.mark.parametrize(
    "change",
    [
        lambda mixer: replace(mixer, rope=None),
        lambda mixer: replace(mixer, rope=replace(mixer.rope, interleaved=False)),
        lambda mixer: replace(mixer, rope=replace(mixer.rope, theta=30000.0)),
        lambda mixer: replace(mixer, rope=replace(mixer.rope, magnitude=1.2)),
        lambda mixer: replace(mixer, params=AttentionParams(1 / math.sqrt(64))),
    ],
    ids=["no RoPE", "other pairs", "other base", "magnitude", "no mscale"],
)
def test_each_part_matters(
    change: Callable[[LatentAttentionSpec], Any], model: Transformer
) -> None:
    changed = Transformer(with_mixer(model.config, change), model.weights, model.backend)
    assert nmse(f16_logits(changed), f16_logits(model)) > 1e-3


@pytest.mark.parametrize("part", ["attn_kv_a_norm", "attn_q_a_norm", "attn_k_b", "attn_v_b"])
def test_each_weight_matters(part: str, model: Transformer) -> None:
    """Norms are of ones, and matrices of heads in another order."""
    layers = []
    for layer in model.weights.layers:
        value = getattr(layer.mixer, part)
        if part.endswith("norm"):
            value = replace(value, weight=np.ones_like(value.weight))
        else:
            value = value[np.arange(value.shape[0])[::-1].copy()]
            value = model.backend.prepare(replace(value, rows=np.ascontiguousarray(value.rows)))
        layers.append(replace(layer, mixer=replace(layer.mixer, **{part: value})))
    weights = replace(model.weights, layers=tuple(layers))
    changed = Transformer(model.config, weights, model.backend)
    assert nmse(f16_logits(changed), f16_logits(model)) > 1e-3


def test_the_plan_of_an_older_file(conformance: Path) -> None:
    """What is made of `attn_kv_b` takes memory of its own, and the tensor none."""
    gguf = open_gguf(conformance / "archs2" / "deepseek2-legacy.gguf")
    model, _ = load_model(gguf, cpu_backend())
    tensors = tuple(gguf.tensors.values())
    mapped, allocated = ModelMemory(tensors, model.config, "cpu", 512, 1).weights
    mixers = [layer.mixer for layer in model.weights.layers]
    made = sum(stack.n_bytes for mixer in mixers for stack in (mixer.attn_k_b, mixer.attn_v_b))
    old = sum(tensor.n_bytes for tensor in tensors if "attn_kv_b" in tensor.name)
    assert allocated == made > 0
    assert mapped == sum(tensor.n_bytes for tensor in tensors) - old
