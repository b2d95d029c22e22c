"""Prefix reuse and decoding where layers with a window have given pages back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from localkv.cache.kv_cache import KVCache
from localkv.cache.layout import cache_bytes, group_layouts
from localkv.cache.pages import Sequence
from localkv.config import CacheConfig
from localkv.engine.batch_engine import BatchEngine
from localkv.engine.engine import Engine
from localkv.engine.generation import GenerationOptions
from localkv.engine.recorded import DecodeLoop
from localkv.kernels.cpu.cpu_backend import cpu_backend
from localkv.kernels.reference.backend import reference_backend
from localkv.loader.weights import load_model
from localkv.model import Transformer
from localkv.sampling.params import SamplingParams
from localkv.sampling.sampler import Sampler
from support.random_model import variant

WINDOW = 7
IDS = np.random.default_rng(8).integers(96, size=1600).tolist()
LONG_AGO = 5 * 256
"""Rows of a layer with a window that a sequence holds at most."""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return variant("gemma3").write(tmp_path_factory.mktemp("windows") / "model.gguf")


@pytest.fixture(scope="module")
def model(path: Path) -> Transformer:
    return load_model(path, cpu_backend())[0]


def new_engine(model: Transformer, **cache: Any) -> Engine:
    return Engine(model, CacheConfig("q8_0", "q8_0", n_ctx=2048, **cache), n_batch=64)


def generated(engine: Engine, ids: list[int], n: int) -> tuple[list[int], int, int]:
    """The tokens drawn, the prompt's tokens that were reused, and the ones that were lost."""
    sampler = Sampler(SamplingParams(temperature=0.0), n_vocab=96)
    generation = BatchEngine(engine).generate(ids, GenerationOptions(sampler=sampler, max_tokens=n))
    drawn = list(generation)
    return drawn, generation.stats.n_reused, generation.stats.n_lost


def test_an_answer_is_made_again_after_a_long_one(model: Transformer) -> None:
    """From the end of the prompt and from shortly before, to the same tokens as ever."""
    engine = new_engine(model)
    prompt = IDS[:400]
    first, reused, lost = generated(engine, prompt, 950)
    assert (reused, lost) == (0, 0)
    assert any(engine.sequence.gone)
    again, reused, lost = generated(engine, prompt, 10)
    assert (again, reused, lost) == (first[:10], 399, 0)
    other = [*prompt[:350], 1, 2, 3]
    assert generated(engine, other, 10) == (generated(new_engine(model), other, 10)[0], 350, 0)


def test_what_was_given_back_is_read_again_and_counted(model: Transformer) -> None:
    for cache, expected in (({}, (0, 300)), ({"swa_full": True}, (300, 0))):
        engine = new_engine(model, **cache)
        generated(engine, IDS, 2)
        assert any(engine.sequence.gone) != bool(cache)
        other = [*IDS[:300], 5, 6]
        drawn, *counts = generated(engine, other, 8)
        assert tuple(counts) == expected
        assert drawn == generated(new_engine(model), other, 8)[0]


def test_truncating_says_how_many_tokens_are_left(model: Transformer) -> None:
    engine = new_engine(model)
    for at in range(0, 1600, 64):
        engine.evaluate(IDS[at : at + 64])
    assert engine.truncate(1550) == 1550 == len(engine.cached_ids)
    assert engine.truncate(100) == 0 == len(engine.cached_ids)
    for at in range(0, 1600, 64):
        engine.evaluate(IDS[at : at + 64])
        if at == 320:
            engine.checkpoint()
    assert engine.truncate(384) == 384


def test_logits_of_all_positions_are_the_same_bytes(model: Transformer) -> None:
    few, all_rows = new_engine(model), new_engine(model, swa_full=True)
    assert few.logits(IDS).tobytes() == all_rows.logits(IDS).tobytes()
    for engine, config in ((few, CacheConfig), (all_rows, CacheConfig)):
        cache = config("q8_0", "q8_0", swa_full=engine is all_rows)
        layouts = group_layouts(cache, model.config.groups)
        wanted = cache_bytes(layouts, n_ctx=2048, n_batch=64)
        assert (engine.cache.n_bytes("k"), engine.cache.n_bytes("v")) == wanted
    assert few.cache.n_bytes("k") < all_rows.cache.n_bytes("k")


def test_types_of_windows_are_their_own(model: Transformer) -> None:
    """The third layer of three sees all."""
    engine = new_engine(model, type_k_swa="f16", type_v_swa="q4_0")
    types = [
        (s.format_k.name, s.format_v.name) for (s,) in (x.segments for x in engine.cache.layers)
    ]
    assert types == [("f16", "q4_0"), ("f16", "q4_0"), ("q8_0", "q8_0")]
    assert np.isfinite(engine.logits(IDS[:80])).all()


# -- fixed buffers


def greedy(logits: Tensor, random: Tensor) -> Tensor:
    return logits.argmax(-1)


def finite_cache(model: Transformer) -> KVCache:
    """The reference reads rows behind the last, which must be finite."""
    layouts = group_layouts(CacheConfig("q8_0", "q4_0"), model.config.groups)
    cache = KVCache(layouts, n_ctx=2048, n_batch=256, arrays=model.backend.arrays)
    for layer in cache.layers:
        for plane in (*layer.segments[0].k, *layer.segments[0].v):
            plane.fill_(0x3C)
    return cache


def read(model: Transformer, cache: KVCache, ids: list[int]) -> Sequence:
    sequence = cache.new_sequence()
    for at in range(0, len(ids), 256):
        part = ids[at : at + 256]
        model.forward(cache.batch([(sequence, part)]), cache)
        sequence.length += len(part)
    return sequence


def test_decoding_from_fixed_buffers_gives_pages_back(path: Path) -> None:
    """Over the bound where the oldest page goes; a reader who stops can go on where it was."""
    model = load_model(path, reference_backend())[0]
    prompt = IDS[: LONG_AGO - 6]
    cache = finite_cache(model)
    sequence, token, wanted = read(model, cache, prompt), 3, list[int]()
    for _ in range(14):
        out = model.forward(cache.batch([(sequence, [token])]), cache)
        sequence.length += 1
        token = int(out.argmax())
        wanted.append(token)
    assert any(sequence.gone)

    cache = finite_cache(model)
    loop = DecodeLoop(model, cache)
    sequence = cache.new_sequence()
    loop.warm_up(sequence)
    assert [len(pool.free) for pool in cache.pools] == [pool.n_pages for pool in cache.pools]
    sequence = read(model, cache, prompt)
    got, last = list[int](), 3
    for n in (9, 5):  # a reader stops, with a row more in the cache than it has counted
        tokens = loop.tokens(sequence, last, greedy, seed=0, number=0, limit=20)
        for _ in range(n):
            last = next(tokens)
            got.append(last)
            sequence.length += 1
    assert got == wanted
    assert any(sequence.gone)
    assert max(len(sequence.held(pool.index)) for pool in cache.pools if pool.layout.reach) == 5
