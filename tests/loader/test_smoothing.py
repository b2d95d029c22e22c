"""Smoothing: smaller channels in the cache, the same logits."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as GGMLType

from localkv.config import CacheConfig
from localkv.engine.engine import Engine
from localkv.errors import ModelFileError, UsageError
from localkv.kernels.cpu.cpu_backend import cpu_backend
from localkv.kernels.reference.backend import attention_reference, reference_backend
from localkv.loader.gguf_file import open_gguf
from localkv.loader.importance import Importance
from localkv.loader.model_header import model_spec
from localkv.loader.quantised_format import TypeChoices
from localkv.loader.quantize import Request, plan_quantization, write_files
from localkv.loader.smoothing import (
    SMOOTHED,
    Smoothing,
    attention_layers,
    matrix_inputs,
    pairs_of_channels,
    share_heads,
    smoothing_of,
)
from localkv.loader.synthetic import random_blocks, set_scales
from localkv.loader.tensor_reader import FileTensors
from localkv.loader.weights import load_model
from localkv.quality.activations import Squares, read_chunks
from localkv.quality.ranges import channel_sizes
from localkv.quant_formats import FORMATS
from localkv.quant_formats.base import split_blocks
from localkv.quant_formats.packed_tensor import PackedTensor, can_scale_rows, scaled
from support.dense_variants import dense_variant
from support.hybrid_models import HybridModel, hybrid
from support.paths import MODELS
from support.random_gemma import RandomGemma
from support.random_model import RandomModel, variant

sys.path.insert(0, str(MODELS))

from outliers import Outliers, write_twin

IDS = [(7 * i + i * i) % 96 for i in range(24)]
NAMES = [
    "llama",
    "llama-mqa",
    "llama-partial-rope",
    "llama-biases",
    "llama-fused-qkv",
    "qwen3",
    "gemma3",
]
OTHERS: dict[str, Callable[[], RandomModel | RandomGemma | HybridModel]] = {
    **{
        name: functools.partial(dense_variant, name)
        for name in ("olmo2", "hunyuan_vl", "command-r-plus", "gptneox", "plamo", "starcoder2")
    },
    "gemma3n": functools.partial(RandomGemma, "gemma3n"),
    "gemma4": functools.partial(RandomGemma, v_from_k=True),
    "qwen35": functools.partial(hybrid, "qwen35"),
    "falcon-h1": functools.partial(hybrid, "falcon-h1"),
}
"""Norms of rows and of each head, after RoPE and before it, K of another layer, gates."""


def engine(path: Path, smoothing: Smoothing | None) -> Engine:
    model, unused = load_model(path, reference_backend(torch.float32), smoothing=smoothing)
    assert not unused
    return Engine(model, CacheConfig("f32", "f32", n_ctx=64, kv_rotation="off", swa_full=True))


def absmax(engine: Engine, side: str) -> dict[int, np.ndarray]:
    """The largest magnitudes that an f32 cache holds: [n_kv_heads, channels] of each layer."""
    found = {}
    for i, layer in enumerate(engine.cache.layers):
        if not layer.segments:
            continue
        (plane,) = getattr(layer.segments[0], side)
        found[i] = plane.view(torch.float32)[0, :, : len(IDS), :, 0].abs().amax(1).numpy()
    return found


def smoothed(path: Path, alpha: float) -> tuple[torch.Tensor, Engine, torch.Tensor, Engine]:
    """Logits and engine of a model, and of the same one smoothed by its own magnitudes."""
    plain = engine(path, None)
    expected = plain.logits(IDS)
    gguf = open_gguf(path)
    smoothing = smoothing_of(
        model_spec(gguf), gguf.tensors, absmax(plain, "k"), absmax(plain, "v"), alpha
    )
    other = engine(path, smoothing)
    return expected, plain, other.logits(IDS), other


@pytest.mark.parametrize("name", NAMES)
def test_logits_keep_their_bits_and_channels_grow_alike(name: str, tmp_path: Path) -> None:
    source, path = variant(name).write(tmp_path / "plain.gguf"), tmp_path / "model.gguf"
    write_twin(source, path, Outliers(k_pairs=3, k_strength=16, v_channels=5, v_strength=8))
    expected, plain, logits, other = smoothed(path, 1.0)
    assert torch.equal(expected, logits)
    config = model_spec(open_gguf(path))
    for layer, spec in attention_layers(config).items():
        before, after = (absmax(one, "k")[layer] for one in (plain, other))
        assert (before != after).any()
        if share_heads(config, layer):
            before, after = before.max(0), after.max(0)
        pairs = pairs_of_channels(spec)
        before, after = (np.maximum(x, x[..., pairs]) for x in (before, after))
        # exponents are whole numbers: of the spread at most a factor of two stays
        assert after.max() / after.min() < min(2.01, before.max() / before.min())
        before, after = (absmax(one, "v")[layer] for one in (plain, other))
        if spec.v_norm is None:
            assert after.max() / after.min() < min(2.01, before.max() / before.min())


@pytest.mark.parametrize("name", OTHERS)
def test_any_magnitudes(name: str, tmp_path: Path) -> None:
    model = OTHERS[name]()
    kind = () if isinstance(model, HybridModel) else (GGMLType.F32,)
    path = model.write(tmp_path / "model.gguf", *kind)
    gguf = open_gguf(path)
    config, rng = model_spec(gguf), np.random.default_rng(1)
    groups = config.groups
    sizes = {i: (group.n_kv_heads, group.key_dim) for group in groups for i in group.layers}
    large = {i: np.exp2(rng.uniform(-4, 4, size)) for i, size in sizes.items()}
    found = smoothing_of(config, gguf.tensors, large, large, 1.0)
    assert found.k.keys() == sizes.keys()
    plain, other = engine(path, None), engine(path, found)
    halves = isinstance(model, HybridModel)  # fp16's smallest numbers lose bits
    tolerance = 1e-5 if halves else 0
    expected, logits = plain.logits(IDS), other.logits(IDS)
    torch.testing.assert_close(expected, logits, rtol=0, atol=tolerance)
    for layer, cached in absmax(plain, "k").items():
        assert (cached != absmax(other, "k")[layer]).any()


@pytest.mark.parametrize("kind", [GGMLType.F16, GGMLType.BF16, GGMLType.Q8_0, GGMLType.Q4_1])
def test_packed_weights_are_scaled_as_they_are(kind: GGMLType, tmp_path: Path) -> None:
    model = variant("llama-biases")
    for part in ("attn_k", "attn_v"):  # RoPE's pairs are neighbours
        model.tensors[f"blk.0.{part}.weight"][6:8] *= 32
        model.tensors[f"blk.0.{part}.bias"][6:8] *= 32
    path = model.write(tmp_path / "model.gguf", kind)
    expected, plain, logits, other = smoothed(path, 0.5)
    if kind == GGMLType.F16:
        torch.testing.assert_close(expected, logits, rtol=0, atol=1e-5)
    else:
        assert torch.equal(expected, logits)
    assert not np.array_equal(absmax(plain, "k")[0], absmax(other, "k")[0])
    moved = not np.array_equal(absmax(plain, "v")[0], absmax(other, "v")[0])
    assert moved == (kind in (GGMLType.F16, GGMLType.BF16))  # columns share scales in the others


def test_compiled_kernels_agree(tmp_path: Path) -> None:
    path = variant("llama").write(tmp_path / "model.gguf", GGMLType.Q4_0)
    plain = engine(path, None)
    plain.logits(IDS)
    gguf = open_gguf(path)
    found = smoothing_of(model_spec(gguf), gguf.tensors, absmax(plain, "k"), absmax(plain, "v"))
    one, other = (
        Engine(
            load_model(path, cpu_backend(), smoothing=smoothing)[0],
            CacheConfig("f32", "f32", n_ctx=64, kv_rotation="off"),
        ).logits(IDS)
        for smoothing in (None, found)
    )
    # sums over a head's channels are of the same numbers
    np.testing.assert_allclose(one, other, rtol=0, atol=1e-5)


def test_strength(tmp_path: Path) -> None:
    gguf = open_gguf(variant("llama").write(tmp_path / "model.gguf"))
    config = model_spec(gguf)
    spec = attention_layers(config)[0]
    large = {0: np.ones((spec.n_kv_heads, spec.key_dim), np.float32)}
    large[0][1, 3] = 256
    large[0][0, :] = 0  # a head that is never used
    partner = pairs_of_channels(spec)[3]
    for alpha, exponent in ((0.0, 0), (0.5, 4), (1.0, 8)):
        k = np.array(smoothing_of(config, gguf.tensors, large, {}, alpha).k[0])
        assert k[1, 3] == k[1, partner] == exponent
        assert not k[0].any()
    with pytest.raises(ValueError, match="alpha"):
        smoothing_of(config, gguf.tensors, large, {}, 1.5)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_a_twin_is_smoothed_to_the_model_itself(name: str, tmp_path: Path) -> None:
    """By what queries and K are: powers of two that one has and the other lacks do not matter."""
    plain, twin = variant(name).write(tmp_path / "plain.gguf"), tmp_path / "twin.gguf"
    write_twin(plain, twin, Outliers(k_pairs=3, k_strength=8, v_channels=0))
    cached = []
    for path in (plain, twin):
        gguf = open_gguf(path)
        model = load_model(path, cpu_backend())[0]
        sizes = channel_sizes(model, [IDS[:9], IDS], n_ctx=64)
        found = smoothing_of(model_spec(gguf), gguf.tensors, sizes.k, {}, q=sizes.q)
        other = engine(path, found)
        other.logits(IDS)
        cached.append(absmax(other, "k"))
    for layer, k in cached[0].items():
        factors = k / cached[1][layer]
        np.testing.assert_allclose(factors, factors[0, 0], rtol=1e-5)


def test_sizes_of_queries(tmp_path: Path) -> None:
    """Against those that the reference's attention is given."""
    path = variant("qwen3").write(tmp_path / "model.gguf")
    seen = list[np.ndarray]()

    def watched(q: torch.Tensor, *rest: object) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append(q.numpy().astype(np.float64))
        return attention_reference(q, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("localkv.kernels.reference.backend.attention_reference", watched)
        engine(path, None).logits(IDS)
    sizes = channel_sizes(load_model(path, cpu_backend())[0], [IDS], n_ctx=64)
    for layer, spec in attention_layers(model_spec(open_gguf(path))).items():
        squares = np.square(seen[layer]).mean(0)
        squares = squares.reshape(spec.n_kv_heads, -1, spec.key_dim).sum(1)
        found, pairs = np.square(sizes.q[layer]), pairs_of_channels(spec)
        np.testing.assert_allclose(found + found[:, pairs], squares + squares[:, pairs], rtol=1e-4)


@pytest.mark.parametrize("name", [n for n, f in FORMATS.items() if f.is_weight])
def test_rows_times_powers_of_two(name: str) -> None:
    fmt = FORMATS[name]
    rng = np.random.default_rng(5)
    rows = random_blocks(fmt, (6, 256 // fmt.block_size), rng).reshape(6, -1)
    set_scales(fmt, split_blocks(fmt, rows), 0.75, 0.5, rng)
    if fmt.block_size == 1:
        rows = np.concatenate(fmt.codec.encode(rng.standard_normal((6, 256), np.float32)), -1)
    tensor = PackedTensor(fmt, rows.reshape(6, -1), (6, 256))
    factors = np.exp2(rng.integers(-3, 4, (6, 1))).astype(np.float32)
    if not can_scale_rows(fmt):
        assert name in ("iq1_m", "mxfp4", "nvfp4")
        with pytest.raises(ValueError, match="can't be scaled"):
            scaled(tensor, factors)
        return
    before = tensor.rows.copy()
    product = scaled(tensor, factors)
    assert np.array_equal(tensor.rows, before)
    np.testing.assert_allclose(product.decode(), tensor.decode() * factors, rtol=1e-6, atol=2**-24)


def test_a_scale_beyond_its_range_is_an_error(tmp_path: Path) -> None:
    path = variant("llama").write(tmp_path / "model.gguf", GGMLType.Q8_0)
    config = model_spec(open_gguf(path))
    spec = attention_layers(config)[0]
    much = tuple((-30,) * spec.key_dim for _ in range(spec.n_kv_heads))
    with pytest.raises(ModelFileError, match=r"blk\.0\.attn_k\.weight.*range of fp16"):
        load_model(path, reference_backend(), smoothing=Smoothing(1.0, {0: much}, {}))


def sizes_of_inputs(path: Path) -> Importance:
    """An importance matrix in which channels of each input have sizes of their own."""
    gguf, rng, columns = open_gguf(path), np.random.default_rng(2), dict[str, np.ndarray]()
    for one in matrix_inputs(model_spec(gguf), gguf.tensors):
        width = gguf.tensors[one.readers[0]].shape[-1]
        squares = np.exp2(rng.uniform(-8, 8, width)).astype(np.float32)
        columns |= dict.fromkeys(one.readers, squares)
    return Importance("none", (), 0, columns)


def smoothed_file(path: Path, to: Path, kind: str, importance: Importance) -> Path:
    request = Request(TypeChoices(kind), importance, smooth=0.5)
    write_files(plan_quantization(open_gguf(path), request), to, 1)
    return to


@pytest.mark.parametrize("name", [*NAMES, "hunyuan_vl", "plamo", "starcoder2", "qwen35", "gemma4"])
def test_a_file_with_smoothed_inputs_has_the_same_logits(name: str, tmp_path: Path) -> None:
    model = OTHERS[name]() if name in OTHERS else variant(name)
    kind = () if isinstance(model, HybridModel) else (GGMLType.F32,)
    path = model.write(tmp_path / "model.gguf", *kind)
    importance = sizes_of_inputs(path)
    inputs = matrix_inputs(model_spec(open_gguf(path)), open_gguf(path).tensors)
    if not inputs:  # the norm of parallel blocks is read by both
        assert name in ("plamo",)
        with pytest.raises(UsageError, match="no matrix of this plamo model"):
            smoothed_file(path, tmp_path / "smooth.gguf", "F32", importance)
        return
    other = smoothed_file(path, tmp_path / "smooth.gguf", "F32", importance)
    assert open_gguf(other).metadata.number(SMOOTHED) == 0.5
    assert torch.equal(engine(path, None).logits(IDS), engine(other, None).logits(IDS))
    for one in inputs:
        for tensor in (*one.makers, *one.readers):
            before, after = (FileTensors(open_gguf(x)) for x in (path, other))
            shape = open_gguf(path).tensors[tensor].shape
            assert (
                before.packed(tensor, shape).decode() != after.packed(tensor, shape).decode()
            ).any()


def test_inputs_that_something_else_reads_stay() -> None:
    gguf = open_gguf(MODELS / "tales-4M-F16.gguf")
    config = model_spec(gguf)
    n = len(matrix_inputs(config, gguf.tensors))
    assert n == 3 * config.n_layers
    parallel = [replace(layer, parallel=True) for layer in config.layers]
    assert matrix_inputs(replace(config, layers=tuple(parallel)), gguf.tensors) == []
    clamped = [replace(x, ffn=replace(x.mlp, limit=7.0)) for x in config.layers if x.mlp]
    assert len(matrix_inputs(replace(config, layers=tuple(clamped)), gguf.tensors)) == n * 2 // 3


def test_outliers_of_inputs_cost_nothing_in_a_smoothed_file(tmp_path: Path) -> None:
    source, twin = MODELS / "tales-4M-F16.gguf", tmp_path / "twin.gguf"
    write_twin(source, twin, Outliers(k_pairs=0, v_channels=0, x_channels=4))
    cache, ids = CacheConfig("f32", "f32", n_ctx=64, kv_rotation="off"), [i + 9 for i in IDS]
    model, found = load_model(twin, cpu_backend())[0], Squares(lambda name: True)
    list(read_chunks(model, [ids], cache, found.add))
    importance = Importance("none", (), 0, {name: one.means for name, one in found.sums.items()})
    write_files(
        plan_quantization(open_gguf(twin), Request(TypeChoices("Q8_0"))), tmp_path / "q8", 1
    )
    smoothed_file(twin, tmp_path / "smooth", "Q8_0", importance)

    def logits(path: Path) -> np.ndarray:
        return np.asarray(Engine(load_model(path, cpu_backend())[0], cache).logits(ids))

    exact = logits(twin)
    np.testing.assert_array_equal(exact, logits(source))
    plain, smooth = (np.abs(logits(tmp_path / x) - exact).mean() for x in ("q8", "smooth"))
    assert smooth < plain / 2
