"""How far a cache moves attention, against attention in float64 with rows that gguf-py packs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as GGMLType

from localkv.config import CacheConfig
from localkv.kernels.cpu.cpu_backend import cpu_backend
from localkv.loader.weights import load_model
from localkv.model import Transformer
from localkv.quality.attention_shift import attention_shift
from support.float64_model import affine, norm, rotate
from support.hybrid_models import hybrid
from support.latent_models import latent_tensors, write_latent
from support.random_model import RandomModel

IDS = [(7 * i + i * i) % 96 for i in range(40)]
CACHE = CacheConfig("q8_0", "q4_0", n_ctx=64, kv_rotation="off")


@pytest.fixture(scope="module")
def source() -> RandomModel:
    return RandomModel(n_layers=3)


@pytest.fixture(scope="module")
def model(source: RandomModel, tmp_path_factory: pytest.TempPathFactory) -> Transformer:
    path = source.write(tmp_path_factory.mktemp("shift") / "model.gguf", GGMLType.F32)
    return load_model(path, cpu_backend())[0]


def packed(x: np.ndarray, kind: GGMLType) -> np.ndarray:
    if kind == GGMLType.F16:
        return x.astype(np.float16).astype(np.float64)
    rows = gguf.quants.quantize(x.astype(np.float32), kind)
    return gguf.quants.dequantize(rows, kind).astype(np.float64)


def outputs(source: RandomModel, type_k: GGMLType, type_v: GGMLType) -> np.ndarray:
    """The outputs of the first layer's attention: [heads, tokens, channels]."""
    (n_heads, n_kv), dim = source.heads(0), source.head_dim
    h = [norm(source, "blk.0.attn_norm", source.tensors["token_embd.weight"][i]) for i in IDS]
    q, k, v = (
        np.stack([affine(source, f"blk.0.attn_{name}", x) for x in h]).reshape(len(IDS), -1, dim)
        for name in "qkv"
    )
    for at in range(len(IDS)):
        for rows in (q, k):
            rows[at] = [rotate(row, at, source, 0) for row in rows[at]]
    k, v = packed(k, type_k), packed(v, type_v)
    found = np.empty((n_heads, len(IDS), dim))
    for head in range(n_heads):
        of = head * n_kv // n_heads
        for at in range(len(IDS)):
            scores = k[: at + 1, of] @ q[at, head] / np.sqrt(dim)
            weights = np.exp(scores - scores.max())
            found[head, at] = weights @ v[: at + 1, of] / weights.sum()
    return found


def test_the_first_layer_moves_as_in_float64(source: RandomModel, model: Transformer) -> None:
    first = attention_shift(model, IDS, CACHE)[0]
    assert first is not None
    base = outputs(source, GGMLType.F16, GGMLType.F16)
    moved = outputs(source, GGMLType.Q8_0, GGMLType.Q4_0)
    wanted = np.linalg.norm(moved - base, axis=-1) / np.linalg.norm(base, axis=-1)
    assert wanted.mean() > 0.05
    np.testing.assert_allclose(first, wanted, rtol=0.1)
    np.testing.assert_allclose(first.mean(1), wanted.mean(1), rtol=0.01)


def test_a_layer_moves_by_its_own_rows_alone(model: Transformer) -> None:
    """However far those below it move; and in batches of any size to the same bits."""
    exact, packed = ("f16", "f16"), ("q8_0", "q4_0")
    one = replace(CACHE, type_k="f16", type_v="f16", layer_types=(exact, packed, exact))
    alone, whole = attention_shift(model, IDS, one), attention_shift(model, IDS, CACHE)
    assert [bool(np.any(moved)) for moved in alone] == [False, True, False]
    assert alone[1] is not None
    assert alone[1].shape == (4, len(IDS))
    np.testing.assert_array_equal(alone[1], whole[1])
    for ours, other in zip(whole, attention_shift(model, IDS, CACHE, n_batch=16), strict=True):
        np.testing.assert_array_equal(ours, other)


def test_latents_are_moved_too(tmp_path: Path) -> None:
    path = write_latent(tmp_path / "model.gguf", "minicpm3", latent_tensors("minicpm3"))
    model = load_model(path, cpu_backend())[0]
    found = [attention_shift(model, IDS, replace(CACHE, type_k=name)) for name in ("q8_0", "q4_0")]
    means = [[float(one.mean()) for one in moved if one is not None] for moved in found]
    assert len(means[0]) == model.config.n_layers
    assert all(0 < few < 0.2 * many for few, many in zip(*means, strict=True))


def test_layers_without_attention_have_none(tmp_path: Path) -> None:
    path = hybrid("lfm2").write(tmp_path / "model.gguf")
    moved = attention_shift(load_model(path, cpu_backend())[0], IDS, CACHE)
    assert [None if one is None else one.shape for one in moved] == [None, (2, 40), None, (2, 40)]
