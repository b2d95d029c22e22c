"""Generating with a tail and a sink: pages come and go, and text is cut back and goes on."""

from __future__ import annotations

from dataclasses import replace

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

IDS = np.random.default_rng(3).integers(96, size=1300).tolist()
CACHES = {
    "one by one": CacheConfig("q4_0", "q8_0", n_ctx=1536, kv_tail=40, kv_sink=3),
    "in groups": CacheConfig("q4_1c", "q4_1", n_ctx=1536, kv_sink=3),
    "open groups only": CacheConfig("q8_0c", "q4_0", n_ctx=1536, kv_tail=0, kv_sink=0),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Transformer]:
    """One without windows, and one with layers of both kinds."""
    folder = tmp_path_factory.mktemp("tail")
    paths = {name: variant(name).write(folder / f"{name}.gguf") for name in ("llama", "gemma3")}
    return {name: load_model(path, cpu_backend())[0] for name, path in paths.items()}


@pytest.mark.parametrize("cache", CACHES.values(), ids=CACHES)
@pytest.mark.parametrize("name", ["llama", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_bytes_and_bits(models: dict[str, Transformer], name: str, cache: CacheConfig) -> None:
    """What is allocated is what is counted, and small batches give the bits of large ones."""
    model = models[name]
    engine, whole = Engine(model, cache, n_batch=64), Engine(model, cache, n_batch=1300)
    counted = cache_bytes(group_layouts(cache, model.config.groups), n_ctx=1536, n_batch=64)
    assert (engine.cache.n_bytes("k"), engine.cache.n_bytes("v")) == counted
    assert engine.logits(IDS).tobytes() == whole.logits(IDS).tobytes()
    assert any(engine.sequence.gone)


@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_cut_back_anywhere(models: dict[str, Transformer], data: st.DataObject) -> None:
    """Text goes on as in a cache of its own; or almost, and sooner, if that will do."""
    cache, exact = CACHES[data.draw(st.sampled_from(sorted(CACHES)))], data.draw(st.booleans())
    engine = Engine(models["llama"], cache, n_batch=96, exact=exact)
    ids, is_same, group = list[int](), True, 32 if cache.type_k.endswith("c") else 1
    for _ in range(4):
        new = IDS[len(ids) :][: data.draw(st.integers(1, 300))]
        for at in range(0, len(new), 96):
            engine.evaluate(new[at : at + 96])
        ids += new
        length = data.draw(st.integers(0, len(ids)) | st.integers(max(0, len(ids) - 40), len(ids)))
        left = engine.truncate(length)
        assert left <= length
        if not exact:
            assert left > length - group
            is_same &= not any(engine.sequence.exact_from)
        del ids[left:]
    more = IDS[len(ids) :][:70]
    got = [np.asarray(engine.evaluate(more[i : i + 35])) for i in (0, 35)]
    fresh = Engine(models["llama"], cache, n_batch=96)
    for at in range(0, len(ids), 96):
        fresh.evaluate(ids[at : at + 96])
    for i, logits in zip((0, 35), got, strict=True):
        want = np.asarray(fresh.evaluate(more[i : i + 35]))
        assert logits.tobytes() == want.tobytes() or not is_same
        assert np.linalg.norm(logits - want) < 0.5 * np.linalg.norm(want)


def test_an_answer_is_made_again_with_the_tail_of_its_prompt(
    models: dict[str, Transformer],
) -> None:
    """However long it was: what the end of the prompt saw is given back last."""
    cache = replace(CACHES["in groups"], n_ctx=2048)
    engine = Engine(models["llama"], cache, n_batch=64)
    for at in range(0, 384, 64):
        engine.evaluate(IDS[at : at + 64])
    engine.checkpoint()
    for at in range(0, 1300, 4):
        engine.evaluate(IDS[at % 1200 :][:4])
    assert engine.sequence.gone[1]
    assert engine.truncate(384) == 384


def test_a_tail_that_nothing_reads_is_refused(models: dict[str, Transformer]) -> None:
    from localkv.cache.cache_checks import check_cache

    groups = models["llama"].config.groups
    with pytest.raises(UsageError, match="--kv-tail 8 keeps rows in f16"):
        check_cache(CacheConfig("f16", "bf16", kv_tail=8), groups)
    with pytest.raises(UsageError, match="kv_sink is -1"):
        CacheConfig("q4_0", kv_sink=-1)
