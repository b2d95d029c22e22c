"""Several sequences decoded from fixed buffers: the same logits as in a new batch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from localkv.config import CacheConfig
from localkv.engine.batch_engine import BatchEngine
from localkv.engine.engine import Engine
from localkv.engine.generation import GenerationOptions
from localkv.engine.recorded import DecodeLoop
from localkv.kernels.reference.backend import reference_backend
from localkv.loader.weights import load_model
from localkv.model import Transformer
from localkv.sampling.params import SamplingParams
from localkv.sampling.sampler import Sampler
from support.hybrid_models import hybrid
from support.random_model import variant

CACHES = {
    "packed": CacheConfig("q8_0", "q4_0", n_ctx=600),
    "sink": CacheConfig("q4_0", "q8_0", n_ctx=600, kv_tail=40, kv_sink=6),
    "groups": CacheConfig("q4_1c", "q4_1", n_ctx=600),
}


def loaded(name: str, folder: Path) -> Transformer:
    path = folder / f"{name}.gguf"
    (hybrid if name == "qwen35" else variant)(name).write(path)
    return load_model(path, reference_backend())[0]


def new_engine(model: Transformer, cache: CacheConfig, n_batch: int) -> Engine:
    """Rows behind the last must not matter but be finite."""
    engine = Engine(model, cache, n_batch=n_batch)
    for layer in engine.cache.layers:
        for segment in layer.segments:
            for plane in (*segment.k, *segment.v):
                plane.fill_(0x3C)
    return engine


@pytest.mark.parametrize(
    ("name", "cache"),
    [
        ("llama", "packed"),
        pytest.param("llama", "sink", marks=pytest.mark.slow),
        pytest.param("llama", "groups", marks=pytest.mark.slow),
        pytest.param("gemma3", "packed", marks=pytest.mark.slow),
        pytest.param("qwen35", "packed", marks=pytest.mark.slow),
    ],
)
def test_logits_are_those_of_a_batch(tmp_path: Path, name: str, cache: str) -> None:
    """One to five sequences come and go, across pages, and in any order."""
    model = loaded(name, tmp_path)
    config = CACHES[cache]
    engine = new_engine(model, replace(config, n_sequences=11), 256)
    loop, kv = DecodeLoop(model, engine.cache), engine.cache
    lengths = [3, 254, 40, 255, 130]
    rows = []
    for length in lengths:
        ids = [(i * 37 + length) % 96 for i in range(length)]
        first = kv.new_sequence()
        model.forward(kv.batch([(first, ids)]), kv)
        first.length = length
        rows.append((first, kv.fork(first, length)))
    for step, chosen in enumerate(
        [[0, 1, 2], [1], [3, 1, 4, 0, 2], [2, 4], [1, 3], [0], [4, 3, 1]]
    ):
        tokens = [(7 * step + i) % 96 for i in chosen]
        ours = [rows[i][0] for i in chosen]
        theirs = [rows[i][1] for i in chosen]
        got = loop.logits(ours, tokens)
        batch = kv.batch(
            [(one, [token]) for one, token in zip(theirs, tokens, strict=True)], generated=True
        )
        want = model.forward(batch, kv)
        if got is None:  # rows of a sink beside others
            assert cache in ("sink", "groups")
            assert len({one.length < 6 for one in ours}) == 2
            again = kv.batch([(one, [t]) for one, t in zip(ours, tokens, strict=True)])
            got = model.forward(again, kv)
        torch.testing.assert_close(got, want, rtol=1e-3, atol=2e-4)
        for one in (*ours, *theirs):
            one.length += 1


def test_a_batch_engine_decodes_so_where_steps_are_recorded(tmp_path: Path) -> None:
    """With tokens drawn where the logits are; each text is the one that it is alone."""
    model = loaded("llama", tmp_path)
    cache = CacheConfig("q8_0", "q4_0", n_ctx=600, n_sequences=3)
    batch = BatchEngine(new_engine(model, cache, 64))
    batch._model_steps.loop = DecodeLoop(model, batch.engine.cache)
    texts = [list(range(3)), list(range(90)), list(range(50))]

    def sampler(seed: int) -> Sampler:
        return Sampler(SamplingParams(seed=seed, temperature=0.8), n_vocab=96)

    generations = [
        batch.generate(ids, GenerationOptions(sampler=sampler(i), max_tokens=6))
        for i, ids in enumerate(texts)
    ]
    tokens = [list(one) for one in generations]
    alone = Engine(model, CacheConfig("q8_0", "q4_0", n_ctx=600), n_batch=64)
    for i, ids in enumerate(texts):
        assert tokens[i] == list(
            BatchEngine(alone).generate(ids, GenerationOptions(sampler=sampler(i), max_tokens=6))
        )
    assert len(batch._model_steps.loop._buckets) >= 1
