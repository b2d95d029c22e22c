"""Generating with a tail and a sink: pages come and go, and text is cut back and goes on."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localkv.cache.layout import cache_bytes, group_layouts
from localkv.config import CacheConfig
from localkv.engine.engine import Engine
from localkv.errors import UsageError
from localkv.kernels.cpu.cpu_backend import cpu_backend
from localkv.loader.weights import load_model
from localkv.model import Transformer
from support.random_model import variant

IDS = np.random.default_rng(3).integers(96, size=1100).tolist()
CACHES = {
    "one by one": CacheConfig("q4_0", "q8_0", n_ctx=1280, kv_tail=40, kv_sink=3),
    "in groups": CacheConfig("q4_1c", "q4_1", n_ctx=1280, kv_sink=3),
    "open groups only": CacheConfig("q8_0c", "q4_0", n_ctx=1280, kv_tail=0, kv_sink=0),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Transformer]:
    """One without windows, and one with layers of both kinds."""
    folder = tmp_path_factory.mktemp("tail")
    paths = {name: variant(name).write(folder / f"{name}.gguf") for name in ("llama", "gemma3")}
    return {name: load_model(path, cpu_backend())[0] for name, path in paths.items()}


def exact_from(engine: Engine) -> int:
    """Behind which all tokens have their tails; those before it read less as f16."""
    return max(engine.sequence.exact_from)


@pytest.mark.parametrize("cache", CACHES.values(), ids=CACHES)
@pytest.mark.parametrize("name", ["llama", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_bytes_and_bits(models: dict[str, Transformer], name: str, cache: CacheConfig) -> None:
    """What is allocated is what is counted, and small batches give the bits of large ones."""
    model = models[name]
    engine, whole = Engine(model, cache, n_batch=64), Engine(model, cache, n_batch=1100)
    counted = cache_bytes(group_layouts(cache, model.config.groups), n_ctx=1280, n_batch=64)
    assert (engine.cache.n_bytes("k"), engine.cache.n_bytes("v")) == counted
    assert engine.logits(IDS).tobytes() == whole.logits(IDS).tobytes()
    assert any(engine.sequence.gone)


@settings(max_examples=6, deadline=None)
@given(data=st.data())
def test_cut_back_anywhere(models: dict[str, Transformer], data: st.DataObject) -> None:
    """Where the tail is still there, text goes on as in a cache of its own, and elsewhere almost:
    only the tokens of an open group are evaluated again."""
    cache = CACHES[data.draw(st.sampled_from(sorted(CACHES)))]
    engine = Engine(models["llama"], cache, n_batch=96)
    ids = list[int]()
    for _ in range(4):
        new = IDS[len(ids) :][: data.draw(st.integers(1, 300))]
        for at in range(0, len(new), 96):
            engine.evaluate(new[at : at + 96])
        ids += new
        length = data.draw(st.integers(0, len(ids)) | st.integers(max(0, len(ids) - 40), len(ids)))
        left = engine.truncate(length)
        group = 32 if "c" in cache.type_k else 1
        assert length - group < left <= length
        if left < length:
            assert exact_from(engine) == left
        del ids[left:]
    more = IDS[len(ids) :][:70]
    got = [np.asarray(engine.evaluate(more[i : i + 35])) for i in (0, 35)]
    fresh = Engine(models["llama"], cache, n_batch=96)
    for at in range(0, len(ids), 96):
        fresh.evaluate(ids[at : at + 96])
    want = [np.asarray(fresh.evaluate(more[i : i + 35])) for i in (0, 35)]
    if exact_from(engine) == 0:
        assert got[0].tobytes() == want[0].tobytes()
        assert got[1].tobytes() == want[1].tobytes()
    else:
        difference = np.linalg.norm(got[1] - want[1]) / np.linalg.norm(want[1])
        assert difference < 0.5


def test_a_tail_that_nothing_reads_is_refused(models: dict[str, Transformer]) -> None:
    from localkv.cache.layout import check_cache

    groups = models["llama"].config.groups
    with pytest.raises(UsageError, match="--kv-tail 8 keeps rows in f16"):
        check_cache(CacheConfig("f16", "bf16", kv_tail=8), groups)
    with pytest.raises(UsageError, match="kv_sink is -1"):
        CacheConfig("q4_0", kv_sink=-1)
