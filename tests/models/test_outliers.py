"""Outlier twins: another cache, the same function."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as GGMLType

from localkv.config import CacheConfig
from localkv.engine.engine import Engine
from localkv.errors import LocalKVError, ModelFileError, UsageError
from localkv.kernels.cpu.cpu_backend import cpu_backend
from localkv.kernels.reference.backend import reference_backend
from localkv.loader.gguf_file import open_gguf
from localkv.loader.model_header import model_spec
from localkv.loader.weights import load_model
from support.paths import MODELS
from support.random_model import variant
from support.tiny_model import write_vocabulary

sys.path.insert(0, str(MODELS))

from outliers import Outliers, k_factors, v_factors, write_twin

IDS = [(7 * i + i * i) % 96 for i in range(40)]
STRONG = Outliers(k_pairs=3, k_strength=16, v_channels=5, v_strength=4, seed=3)
NAMES = [
    "llama",
    "llama-tied",
    "llama-mha",
    "llama-mqa",
    "llama-partial-rope",
    "llama-biases",
    "llama-fused-qkv",
    "llama-moe",
    "mistral3",
    "smollm3",
    "qwen2",
    "qwen2moe",
    "qwen3",
    "qwen3moe",
]


def written(name: str, folder: Path, kind: GGMLType = GGMLType.F16) -> tuple[Path, Path]:
    """A random model and its strong twin.

    Mixtures of experts are F32: what meets an F16 weight there is rounded to f16, as ggml does it.
    """
    kind = GGMLType.F32 if "moe" in name else kind
    source = variant(name).write(folder / "plain.gguf", kind)
    twin = folder / "twin.gguf"
    write_twin(source, twin, STRONG)
    return source, twin


def engine(path: Path, dtype: torch.dtype = torch.float32) -> Engine:
    model, unused = load_model(path, reference_backend(dtype))
    assert not unused
    return Engine(model, CacheConfig("f32", "f32", n_ctx=64, kv_rotation="off"))


def rows(engine: Engine, layer: int, side: str) -> np.ndarray:
    """What an f32 cache holds of K or V: [n_kv_heads, tokens, head_dim]."""
    (planes,) = getattr(engine.cache.layers[layer].segments[0], side)
    values = planes.view(torch.float32)[0, :, : len(IDS), :, 0]
    return values.numpy().copy()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("name", NAMES)
def test_logits_are_the_same_to_the_last_bit(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    plain, twin = (engine(path, dtype).logits(IDS) for path in written(name, tmp_path))
    assert plain.std() > 0.5
    assert torch.equal(plain, twin)


@pytest.mark.parametrize("name", NAMES)
def test_rows_in_the_cache_have_the_outliers(name: str, tmp_path: Path) -> None:
    source, path = written(name, tmp_path)
    gguf = open_gguf(source)
    config = model_spec(gguf)
    plain, twin = engine(source), engine(path)
    plain.logits(IDS)
    twin.logits(IDS)
    for layer in range(config.n_layers):
        k, v = k_factors(STRONG, config, layer), v_factors(STRONG, config, layer)
        for factors, n_channels, strength in ((k, 6, 16), (v, 5, 4)):
            assert ((factors == strength).sum(1) == n_channels).all()
            assert (np.unique(factors) == [1, strength]).all()
        for side, factors in (("k", k), ("v", v)):
            expected = rows(plain, layer, side) * factors[:, None]
            np.testing.assert_array_equal(rows(twin, layer, side), expected)


def test_layers_and_heads_have_channels_of_their_own_unless_a_norm_is_shared(
    tmp_path: Path,
) -> None:
    for name, shared in (("llama", False), ("qwen3", True)):
        gguf = open_gguf(variant(name).write(tmp_path / f"{name}.gguf"))
        config = model_spec(gguf)
        first, second = (k_factors(STRONG, config, layer) for layer in range(2))
        assert np.array_equal(first[0], first[1]) == shared
        assert not np.array_equal(first, second)
        other = Outliers(k_pairs=3, k_strength=16, seed=4)
        assert not np.array_equal(first, k_factors(other, config, 0))


@pytest.mark.parametrize("kind", [GGMLType.Q8_0, GGMLType.Q4_0], ids=lambda kind: kind.name)
def test_packed_weights_are_unpacked_where_they_are_scaled(kind: GGMLType, tmp_path: Path) -> None:
    source, path = written("llama-fused-qkv", tmp_path, kind)
    # sums over a row may be taken in another order where its type is another
    error = engine(path).logits(IDS) - engine(source).logits(IDS)
    assert error.abs().max() < 1e-4
    plain, twin = open_gguf(source), open_gguf(path)
    for name, info in twin.tensors.items():
        scaled = any(part in name for part in ("attn_qkv", "attn_output.weight"))
        assert info.format.name == ("f32" if scaled else plain.tensors[name].format.name)
        assert info.shape == plain.tensors[name].shape
        if not scaled:
            np.testing.assert_array_equal(twin.data(name), plain.data(name))


def test_compiled_kernels_agree(tmp_path: Path) -> None:
    engines = [
        Engine(load_model(path, cpu_backend())[0], CacheConfig("f16", "f16", n_ctx=64))
        for path in written("llama", tmp_path)
    ]
    plain, twin = (one.logits(IDS) for one in engines)
    assert np.linalg.norm(plain - twin) < 1e-5 * np.linalg.norm(plain)


def test_shipped_model_keeps_its_metadata(tmp_path: Path) -> None:
    source, path = MODELS / "tales-4M-F16.gguf", tmp_path / "twin.gguf"
    write_twin(source, path, Outliers())
    plain, twin = open_gguf(source).metadata, open_gguf(path).metadata
    assert list(plain) == list(twin)
    for key in plain:
        if key != "general.name":
            assert twin.get(key) == plain.get(key)
    assert twin.string("general.name") == "tales-4M, outlier twin"


def test_what_cannot_be_done_is_refused(tmp_path: Path) -> None:
    source = variant("llama-partial-rope").write(tmp_path / "model.gguf")
    twin = tmp_path / "twin.gguf"
    for outliers, message in (
        (Outliers(k_pairs=17), "17 pairs of K channels, but RoPE has 16 in a head"),
        (Outliers(v_channels=65), "65 V channels, but a head has 64"),
    ):
        with pytest.raises(UsageError, match=message):
            write_twin(source, twin, outliers)
    with pytest.raises(UsageError, match="is the model itself"):
        write_twin(source, source, Outliers())
    with pytest.raises(ModelFileError, match="holds no weights"):
        write_twin(write_vocabulary(tmp_path / "vocabulary.gguf"), twin, Outliers())
    for bad in ({"k_strength": 9}, {"v_strength": 0}, {"k_pairs": -1}):
        with pytest.raises(UsageError, match=next(iter(bad))):
            Outliers(**bad)
    with pytest.raises(LocalKVError, match="no such file"):
        write_twin(tmp_path / "none.gguf", twin, Outliers())
    assert not twin.exists()


def test_program(tmp_path: Path) -> None:
    source = variant("qwen2").write(tmp_path / "model.gguf")

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, MODELS / "outliers.py", source, "--out", tmp_path / "twin.gguf"]
        return subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=60)

    done = run("--k-strength", "32", "--seed", "1")
    assert done.returncode == 0, done.stderr
    plain, twin = (
        open_gguf(tmp_path / name).data("blk.0.attn_k.bias").view(np.float32)
        for name in ("model.gguf", "twin.gguf")
    )
    assert sorted(set((twin / plain).tolist())) == [1, 32]
    refused = run("--k-strength", "3")
    assert refused.returncode == 1
    assert refused.stderr.count("\n") == 1
    assert refused.stderr.startswith("error: k_strength is 3")
