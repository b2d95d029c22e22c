"""Caches whose layers have types of their own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from localkv.arch.spec import CacheGroup
from localkv.cache.cache_checks import check_cache
from localkv.cache.layout import (
    cache_bytes,
    group_layouts,
    in_words,
    mean_bits,
    mean_bits_of,
    pairs_of,
    typed_groups,
)
from localkv.config import CacheConfig
from localkv.engine.batch_engine import BatchEngine
from localkv.engine.engine import Engine, allocated_cache
from localkv.engine.generation import GenerationOptions
from localkv.engine.state_file import cache_identity
from localkv.errors import UsageError
from localkv.kernels.cpu.cpu_backend import cpu_backend
from localkv.kernels.reference.backend import reference_backend
from localkv.loader.weights import load_model
from localkv.model import Transformer
from localkv.sampling.params import SamplingParams
from localkv.sampling.sampler import Sampler
from support.forward import nmse
from support.random_model import RandomModel, variant

PAIRS = (("q8_0", "q4_0"), ("f16", "q5_1"), ("q4_1", "fp8_e4m3_token"))
IDS = np.random.default_rng(5).integers(96, size=300).tolist()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return RandomModel(n_layers=3).write(tmp_path_factory.mktemp("by_layer") / "model.gguf")


@pytest.fixture(scope="module")
def model(path: Path) -> Transformer:
    return load_model(path, cpu_backend())[0]


def config(**changes: object) -> CacheConfig:
    return replace(CacheConfig(n_ctx=512, layer_types=PAIRS), **changes)  # type: ignore[arg-type]


def drawn(engine: Engine, n: int) -> list[int]:
    sampler = Sampler(SamplingParams(temperature=0.0), n_vocab=engine.model.config.n_vocab)
    return list(
        BatchEngine(engine).generate(IDS[:80], GenerationOptions(sampler=sampler, max_tokens=n))
    )


def test_each_layer_has_its_types_on_every_backend(path: Path, model: Transformer) -> None:
    """The CPU's logits are as near to float64's as with one pair for all layers."""
    exact = Engine(load_model(path, reference_backend(torch.float64))[0], config()).logits(IDS)
    engine = Engine(model, config(), n_batch=100)
    assert [layer.types for layer in engine.cache.layers] == [(pair,) for pair in PAIRS]
    assert nmse(engine.logits(IDS), exact.numpy()) < 1e-4
    plain = Engine(load_model(path, reference_backend())[0], config()).logits(IDS)
    assert nmse(plain.numpy(), exact.numpy()) < 1e-4


def test_the_same_bits_in_any_chunks_and_for_generated_tokens(model: Transformer) -> None:
    """Pages are shared by layers of all pairs, so there is one page table."""
    engine = Engine(model, config(), n_batch=64)
    assert len(engine.cache.pools) == 1
    assert len(engine.cache.layouts) == 3
    whole = Engine(model, config(), n_batch=512).logits(IDS)
    assert engine.logits(IDS).tobytes() == whole.tobytes()
    first = drawn(engine, 20)
    engine.reset()
    assert drawn(engine, 20) == first


def test_one_pair_for_all_layers_is_the_plain_cache(model: Transformer) -> None:
    by_layer = Engine(model, config(layer_types=(PAIRS[0],) * 3))
    plain = Engine(model, CacheConfig(*PAIRS[0], n_ctx=512))
    assert by_layer.logits(IDS).tobytes() == plain.logits(IDS).tobytes()
    assert drawn(by_layer, 20) == drawn(plain, 20)


def test_bytes_are_those_that_are_allocated(model: Transformer) -> None:
    cache = config()
    layouts = group_layouts(cache, model.config.groups)
    allocated = allocated_cache(model, cache, 64)
    assert cache_bytes(layouts, n_ctx=512, n_batch=64) == (
        allocated.n_bytes("k"),
        allocated.n_bytes("v"),
    )
    bits = sum(mean_bits(pair, model.config) for pair in PAIRS) / 3
    assert mean_bits_of(cache, model.config) == pytest.approx(bits)
    assert cache.shown_types == ("mixed", "mixed")
    assert config(layer_types=(("f16", "q8_0"), None, ("f16", "q4_0"))).shown_types[0] == "f16"
    assert cache.types == ("q8_0", "f16", "q4_1", "q4_0", "q5_1", "fp8_e4m3_token")


def test_a_state_knows_the_types_of_all_layers(model: Transformer) -> None:
    """Not only of the first, whose page table the others share: q4_0's bytes are no iq4_nl's."""
    other = (PAIRS[0], ("q4_0", "q4_0"), ("q4_0", "iq4_nl"))
    found = [
        cache_identity(Engine(model, config(layer_types=types)).cache)
        for types in (other, (other[0], other[1], other[1]))
    ]
    assert [facts["types"] for facts in found] == [
        "0 q8_0/q4_0, 1 q4_0/q4_0, 2 q4_0/iq4_nl",
        "0 q8_0/q4_0, 1-2 q4_0/q4_0",
    ]
    assert found[0]["layers"] != found[1]["layers"]


def test_layers_with_windows_keep_their_pools(tmp_path: Path) -> None:
    """Two layers with a window, and one without: two page tables, whatever the types."""
    model, _ = load_model(variant("gemma3").write(tmp_path / "model.gguf"), cpu_backend())
    cache = CacheConfig(n_ctx=2048, layer_types=PAIRS)
    engine = Engine(model, cache, n_batch=64)
    assert len(engine.cache.pools) == 2
    assert len(pairs_of(cache, model.config.groups)) == 3
    full = Engine(model, replace(cache, swa_full=True), n_batch=64)
    ids = [*IDS, *IDS]
    assert engine.logits(ids).tobytes() == full.logits(ids).tobytes()


def test_groups_are_split_by_pair_in_order() -> None:
    groups = (CacheGroup(1, 64, 64, 0, (0, 2, 3)), CacheGroup(1, 64, 64, 8, (1,)))
    types = (("q8_0", "q8_0"), ("f16", "f16"), ("q4_0", "q4_0"), ("q8_0", "q8_0"))
    split = typed_groups(CacheConfig(layer_types=types), groups)
    assert [group.layers for group in split] == [(0, 3), (2,), (1,)]
    assert in_words([types[0], types[0], None, types[2]]) == "0-1 q8_0/q8_0, 3 q4_0/q4_0"


def test_a_tail_is_for_those_layers_that_are_packed() -> None:
    """The first ones may not be."""
    groups = (CacheGroup(1, 64, 64, 0, (0, 1)),)
    exact, packed = ("f16", "f16"), ("q8_0", "q8_0")
    check_cache(CacheConfig(layer_types=(exact, packed), kv_tail=64, kv_sink=4), groups)
    with pytest.raises(UsageError, match="--kv-tail 64 keeps rows in f16"):
        check_cache(CacheConfig(layer_types=(exact, exact), kv_tail=64), groups)


def test_types_of_another_model_are_refused() -> None:
    groups = (CacheGroup(1, 64, 64, 0, (0, 2)),)
    pair = ("q8_0", "q8_0")
    for types, said in (((pair, pair), "layer 1"), ((pair, None, pair, pair), "layer 3")):
        with pytest.raises(UsageError, match=f"of another model: {said}"):
            check_cache(CacheConfig(layer_types=types), groups)
    with pytest.raises(UsageError, match="unknown K cache type 'q9'"):
        check_cache(CacheConfig(layer_types=(("q9", "f16"), None, pair)), groups)
