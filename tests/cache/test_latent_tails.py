"""Models with latent attention whose cache has a tail and a sink, as a whole."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from localkv.config import CacheConfig
from localkv.engine.engine import Engine
from localkv.kernels.cpu.cpu_backend import cpu_backend
from localkv.kernels.reference.backend import reference_backend
from localkv.loader.weights import load_model
from localkv.model import Transformer
from support.forward import IDS, nmse
from support.held_bytes import storages
from support.latent_models import latent_tensors, write_latent
from support.program import Program

LONG = [*IDS, *IDS[::-1], *IDS[::3]]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("latents")
    return write_latent(folder / "plm.gguf", "plm", latent_tensors("plm"))


@pytest.fixture(scope="module")
def model(path: Path) -> Transformer:
    return load_model(path, cpu_backend())[0]


@pytest.mark.parametrize(
    "cache",
    [
        CacheConfig("q4_1c", n_ctx=256, kv_tail=8, kv_sink=3),
        pytest.param(CacheConfig("kv2_1", n_ctx=256, kv_tail=5), marks=pytest.mark.slow),
        pytest.param(CacheConfig("nuq3", n_ctx=256), marks=pytest.mark.slow),
    ],
    ids=lambda cache: cache.type_k,
)
def test_logits(path: Path, model: Transformer, cache: CacheConfig) -> None:
    """The reference's results come out, in any chunks, and after a text was cut back."""
    once = Engine(model, cache).logits(LONG)
    other = Engine(load_model(path, reference_backend())[0], cache).logits(LONG)
    assert nmse(once, other.numpy()) < 1e-6
    packed = Engine(model, CacheConfig("q4_0", n_ctx=256)).logits(LONG)
    assert nmse(once, packed) > 1e-5
    engine = Engine(model, cache, n_batch=37)
    engine.logits([*LONG[:150], 1, 2, 3])
    engine.logits(LONG[:101])
    assert np.array_equal(engine.logits(LONG)[-100:], once[-100:])


def test_what_is_planned_is_allocated(program: Program, path: Path, model: Transformer) -> None:
    flags = ("-c", "1000", "--kv-tail", "8", "--kv-sink", "3", "-ctk", "q4_1c")
    (planned,) = json.loads(program("plan", path, *flags, "-ub", "64", "--json").out)["pairs"]
    cache = CacheConfig("q4_1c", n_ctx=1000, kv_tail=8, kv_sink=3)
    allocated = Engine(model, cache, n_batch=64).cache
    assert planned["cache_k"] == storages(allocated, "k")
    assert planned["cache_v"] == storages(allocated, "v")
