"""Gemma 3n and 4 against a float64 evaluation of their own, and what their layers share."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as GGMLType

from localkv.arch.spec import ModelSpec
from localkv.cache.kv_cache import KVCache
from localkv.cache.layout import SegmentSpec, group_layouts
from localkv.commands.show import model_rows
from localkv.config import CacheConfig
from localkv.engine.recorded import DecodeLoop
from localkv.errors import ModelFileError
from localkv.kernels.backend import Backend
from localkv.kernels.cpu.cpu_backend import cpu_backend
from localkv.kernels.reference.backend import reference_backend
from localkv.loader.gguf_file import open_gguf
from localkv.loader.known_models import KNOWN_MODELS
from localkv.loader.model_header import model_spec
from localkv.loader.weights import load_model
from localkv.memory.plan import ModelMemory
from localkv.model import Transformer
from localkv.sampling.params import SamplingParams
from support.float64_gemma import Evaluation
from support.forward import IDS, logits, new_cache, nmse, run, run_together
from support.random_gemma import RandomGemma

VARIANTS: dict[str, dict[str, Any]] = {
    "gemma4": {},
    "gemma4-moe": {"experts": True, "v_from_k": True, "shared": 0, "per_layer": False},
    "gemma3n": {"arch": "gemma3n"},
}
BOTH = ("norm of V", "shared K and V", "window", "window's RoPE", "scale of 1", "softcap")
EMBEDDED = ("per-layer input", "projected embedding", "token's row")
PARTS = {
    "gemma4": (*BOTH, *EMBEDDED, "proportional RoPE", "output scale"),
    "gemma4-moe": ("V before K's norm", "norm of V", "router's scale", "experts' scale"),
    "gemma3n": (
        *(*BOTH, *EMBEDDED, "Laurel", "prediction", "correction", "correct_scale", "sparsity"),
    ),
}
SOME = IDS[:16]
F32 = SegmentSpec("f32", "f32")
BACKENDS = pytest.mark.parametrize(
    "backend", [reference_backend(), cpu_backend()], ids=lambda b: b.name
)


def model_of(name: str) -> RandomGemma:
    return RandomGemma(**VARIANTS[name])


@functools.cache
def whole(name: str) -> np.ndarray:
    """Logits of the whole graph."""
    return Evaluation(model_of(name)).logits(SOME)


@pytest.mark.parametrize("name", VARIANTS)
def test_equals_float64_evaluation(name: str, tmp_path: Path) -> None:
    path = model_of(name).write(tmp_path / "model.gguf")
    want = whole(name)
    assert nmse(logits(path, reference_backend(torch.float64), SOME, "f32"), want) < 1e-11
    for backend in (reference_backend(), cpu_backend()):
        assert nmse(logits(path, backend, SOME, "f32", chunk=7), want) < 1e-8


@pytest.mark.parametrize(("name", "part"), [(n, part) for n in PARTS for part in PARTS[n]])
def test_every_part_matters(name: str, part: str) -> None:
    assert nmse(Evaluation(model_of(name), part).logits(SOME), whole(name)) > 1e-4


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize(
    "kind", [GGMLType.F32, pytest.param(GGMLType.Q8_0, marks=pytest.mark.slow)]
)
def test_bits_do_not_depend_on_company(name: str, kind: GGMLType, tmp_path: Path) -> None:
    model, _ = load_model(model_of(name).write(tmp_path / "model.gguf", kind), cpu_backend())
    ids = IDS[:30]
    once = run(model, new_cache(model, F32), ids)
    for chunk in (1, 13):
        assert np.array_equal(run(model, new_cache(model, F32), ids, chunk), once)
    parts = [ids, ids[:5], ids[3:20]]
    together = run_together(model, [F32], parts)
    alone = [run(model, new_cache(model, F32), part)[-1] for part in parts]
    assert np.array_equal(together, np.stack(alone))


@pytest.mark.parametrize("name", ["gemma4", "gemma3n"])
@pytest.mark.parametrize(
    "pair",
    [
        ("q8_0", "q4_0"),
        pytest.param(("q4_0", "q8_0"), marks=pytest.mark.slow),
        pytest.param(("f16", "q5_1"), marks=pytest.mark.slow),
    ],
)
def test_packed_caches(name: str, pair: tuple[str, str], tmp_path: Path) -> None:
    path = model_of(name).write(tmp_path / "model.gguf")

    def through(backend: Backend) -> np.ndarray:
        model, _ = load_model(path, backend)
        layouts = group_layouts(CacheConfig(*pair), model.config.groups)
        cache = KVCache(layouts, arrays=backend.arrays, n_ctx=256)
        return run(model, cache, IDS[:40], 11)

    assert nmse(through(cpu_backend()), through(reference_backend(torch.float64))) < 2e-5


@pytest.mark.parametrize("name", ["gemma4", "gemma3n"])
def test_layers_that_share_take_no_cache(name: str, tmp_path: Path) -> None:
    model, _ = load_model(model_of(name).write(tmp_path / "model.gguf"), cpu_backend())
    assert [layer.attention.kv_from for layer in model.config.layers] == [None, None, None, 1, 2]
    assert [group.layers for group in model.config.groups] == [(0, 1), (2,)]
    cache = new_cache(model, F32)
    assert [len(layer.segments) for layer in cache.layers[:3]] == [1, 1, 1]
    assert (
        cache.n_bytes("k")
        == cache.n_bytes("v")
        == 4
        * 1024
        * sum(group.n_kv_heads * group.key_dim * len(group.layers) for group in model.config.groups)
    )


@pytest.mark.parametrize("name", VARIANTS)
@BACKENDS
def test_a_cut_model_runs(name: str, backend: Backend, tmp_path: Path) -> None:
    """Layers that share K and V come after those that have them, so the first ones do without."""
    model, _ = load_model(model_of(name).write(tmp_path / "model.gguf"), backend)
    for some in (model.first_layers(1), model.first_layers(4), model.one_of_each_layer()):
        got = run(some, new_cache(model, F32), SOME[:3])
        assert got.shape == (3, 96)
        assert np.isfinite(got).all()


def test_a_factor_makes_no_other_kind_of_layer(tmp_path: Path) -> None:
    random_model = RandomGemma(shared=0)
    model, _ = load_model(random_model.write(tmp_path / "model.gguf"), cpu_backend())
    assert len({layer.output_scale for layer in model.weights.layers}) == 5
    assert model.one_of_each_layer().config.n_layers == 4  # 0 and 2 differ, and one more


REFUSED = {
    "attention__shared_kv_layers": [(5, "5 of 5 layers can't share"), (4, "layer 2 is to share")],
    "attention__head_count_kv": [
        ([2, 2, 1, 1, 1], "layer 3 is to share K and V of layer 1, but has 1 KV heads of 64, not 2")
    ],
    "attention__key_length_swa": [(None, "missing key"), (32, "K .32. and V .64.")],
    "embedding_length_per_layer_input": [(None, "missing key"), (16, "inp_gate.weight' has shape")],
    "rope__dimension_count_swa": [(66, "rotate 66 channels")],
    "attention__sliding_window": [(None, "missing key")],
    "attention__sliding_window_pattern": [([True] * 4, "has 4 items for 5 layers")],
    "feed_forward_length": [([96, 0, 96, 96, 96], "layer 1 has no feed-forward block")],
}


@pytest.mark.parametrize(
    ("key", "value", "message"), [(key, *case) for key in REFUSED for case in REFUSED[key]]
)
def test_contradictory_keys(key: str, value: object, message: str, tmp_path: Path) -> None:
    path = RandomGemma().write(tmp_path / "model.gguf", **{key: value})
    with pytest.raises(ModelFileError, match=message):
        load_model(path, cpu_backend())


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("attention__sliding_window", None, "missing key"),
        ("altup__active_idx", 1, "only the first stream"),
        ("altup__num_inputs", 3, "altup_router.weight' has shape"),
        ("activation_sparsity_scale", [1.0, 1.0], "2 items for 5 layers"),
    ],
)
def test_contradictory_keys_of_3n(key: str, value: object, message: str, tmp_path: Path) -> None:
    path = RandomGemma("gemma3n").write(tmp_path / "model.gguf", **{key: value})
    with pytest.raises(ModelFileError, match=message):
        load_model(path, cpu_backend())


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_every_tensor_is_needed(name: str, tmp_path: Path) -> None:
    tensors = model_of(name).tensors
    names = {tensor.split(".", 2)[-1]: tensor for tensor in reversed(tensors)}
    # the rest can be absent, or in one tensor with others, or makes V of K
    optional = ("layer_output_scale", "ffn_down_exps.scale", "ffn_gate", "blk.2.attn_v")
    for tensor in names.values():
        if any(part in tensor for part in optional):
            continue
        model = model_of(name)
        del model.tensors[tensor]
        with pytest.raises(ModelFileError, match=f"missing tensor '{tensor}'"):
            load_model(model.write(tmp_path / "model.gguf"), cpu_backend())


@BACKENDS
def test_rows_of_tokens_are_read_in_the_file(backend: Backend, tmp_path: Path) -> None:
    model, _ = load_model(RandomGemma().write(tmp_path / "model.gguf", GGMLType.Q8_0), backend)
    assert model.weights.per_layer is not None
    rows = model.weights.per_layer.token_embd.rows
    assert isinstance(rows, np.ndarray)
    assert not rows.flags.owndata
    assert not rows.flags.writeable


@pytest.mark.parametrize("name", ["gemma4", "gemma3n"])
def test_a_step_gets_its_token_s_rows_from_the_host(name: str, tmp_path: Path) -> None:
    model, _ = load_model(model_of(name).write(tmp_path / "model.gguf"), reference_backend())
    caches = [new_cache(model, F32) for _ in range(2)]
    for cache in caches:  # rows behind the last are masked, but finite
        for plane in (p for layer in cache.layers for s in layer.segments for p in (*s.k, *s.v)):
            plane[:] = 0
    sequence, other = (cache.new_sequence() for cache in caches)
    loop = DecodeLoop(model, caches[0])
    for token in SOME[:5]:
        got = loop.logits([sequence], [token])
        batch = caches[1].batch([(other, [token])], generated=True)
        assert nmse(got, model.forward(batch, caches[1])) < 1e-10
        sequence.length += 1
        other.length += 1
    drawing = replace(model.backend, draw=lambda params: lambda logits, random: logits)
    assert Transformer(model.config, model.weights, drawing).draw(SamplingParams()) is None
    assert any(use.operation == "per-layer embeddings" for use in model.uses([("f32", "f32")]))


def test_a_plan_counts_rows_of_tokens_apart(tmp_path: Path) -> None:
    gguf = open_gguf(RandomGemma().write(tmp_path / "model.gguf"))
    table = gguf.tensors["per_layer_token_embd.weight"].n_bytes
    tensors = tuple(gguf.tensors.values())
    rest = sum(tensor.n_bytes for tensor in tensors) - table
    for device in ("cpu", "reference", "cuda"):
        memory = ModelMemory(tensors, model_spec(gguf), device, 512, 1)
        plan = memory.plan(CacheConfig(n_ctx=256))
        assert (plan.weights, plan.weights_by_row) == (rest, table)
        assert plan.weights_mapped == (0 if device == "cuda" else rest)
        in_memory = replace(memory, is_file=False).plan(CacheConfig(n_ctx=256))
        assert in_memory.weights == rest + (0 if device == "cuda" else table)
        assert in_memory.weights_by_row == 0
        shares = replace(memory.config, layers=memory.config.layers[:3])
        cut = replace(memory, config=shares).plan(CacheConfig(n_ctx=256))
        assert (cut.cache_k, cut.cache_v) == (plan.cache_k, plan.cache_v)


def test_show_says_what_layers_share() -> None:
    def rows(config: ModelSpec) -> list[str]:
        return [f"{label}: {text}" for label, text in model_rows(config)]

    gemma4 = rows(KNOWN_MODELS["gemma4-e2b"].spec)
    assert ": 8 of 256, with K and V of layer 13 (16 layers)" in gemma4
    assert ": 8 of 512, with K and V of layer 14 (4 layers)" in gemma4
    assert "embeddings: of each layer, 256 values, read by row" in gemma4
    assert ": 16, 2 for K, from which V is, of 512 (5 layers)" in rows(
        KNOWN_MODELS["gemma4-26b-a4b"].spec
    )
