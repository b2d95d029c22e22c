"""Models with recurrent layers: their logits, and what they are made of."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from localkv.arch.spec import DeltaNetSpec
from localkv.cache.layout import GroupLayout, SegmentSpec
from localkv.config import CacheConfig
from localkv.engine.batch_engine import BatchEngine
from localkv.engine.engine import Engine
from localkv.engine.generation import GenerationOptions
from localkv.errors import ModelFileError, UsageError
from localkv.kernels.backend import Backend
from localkv.kernels.cpu.cpu_backend import cpu_backend
from localkv.kernels.layer_weights import Linear
from localkv.kernels.reference.backend import reference_backend
from localkv.loader.weights import load_model
from localkv.model import Transformer
from localkv.quality.ranges import calibrate
from localkv.quality.scores import ExactPrefillCache
from localkv.sampling.params import SamplingParams
from localkv.sampling.sampler import Sampler
from support.f32_copy import f32_copy
from support.forward import logits, new_cache, nmse, run, run_together
from support.hybrid_models import IDS, KEYS, LAYERS, N_VOCAB, SHOWN, HybridModel, hybrid

STORED = json.loads((Path(__file__).parent / "data" / "llama_cpp_hybrids.json").read_text())
BACKENDS = [reference_backend(), cpu_backend()]


def wanted(name: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(STORED[name]), np.float32).reshape(-1, N_VOCAB)


@pytest.fixture(scope="module", params=list(KEYS))
def file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    name = request.param
    return hybrid(name).write(tmp_path_factory.mktemp("hybrid") / f"{name}.gguf")


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name)
def test_llama_cpp_logits(file: Path, backend: Backend) -> None:
    got = logits(file, backend, IDS, "f16", chunk=37)[list(SHOWN)]
    assert nmse(got, wanted(file.stem)) <= 2e-6


def model_of(file: Path) -> Transformer:
    return load_model(file, cpu_backend())[0]


F16 = SegmentSpec("f16", "f16")


def test_a_prompt_has_the_same_bits_in_any_chunks_and_in_company(file: Path) -> None:
    model = model_of(file)
    whole = run(model, new_cache(model, F16), IDS)
    for chunk in (1, 2, 7, 59):
        np.testing.assert_array_equal(run(model, new_cache(model, F16), IDS, chunk), whole)
    together = run_together(model, [F16], [IDS, IDS[:20], IDS[10:13]])
    for ids, got in zip((IDS, IDS[:20], IDS[10:13]), together, strict=True):
        np.testing.assert_array_equal(got, run(model, new_cache(model, F16), ids)[-1])


@pytest.mark.parametrize("name", ["qwen35", "kimi-linear", "bailingmoe3"])
@pytest.mark.parametrize("pair", [("q8_0", "q8_0"), ("q4_0", "q4_0"), ("q5_1", "q4_0")])
def test_packed_caches_against_float64(pair: tuple[str, str], name: str, tmp_path: Path) -> None:
    path = f32_copy(hybrid(name).write(tmp_path / "f16.gguf"), tmp_path / "f32.gguf")
    exact, fast = (
        run(model, new_cache(model, SegmentSpec(*pair)), IDS, 16)
        for model in (
            load_model(path, backend)[0]
            for backend in (reference_backend(torch.float64), cpu_backend())
        )
    )
    assert nmse(fast, exact) <= 2e-5


@pytest.mark.parametrize("name", ["kimi-linear", "bailingmoe3", "nemotron_h_super"])
def test_layers_beside_experts_in_chains(name: str, tmp_path: Path) -> None:
    """F32 matrices are steps of chains, which F16 ones beside experts are not."""
    path = f32_copy(hybrid(name).write(tmp_path / "f16.gguf"), tmp_path / "f32.gguf")
    model = model_of(path)
    reference, _ = load_model(path, reference_backend(torch.float64))
    exact = run(reference, new_cache(reference, F16), IDS)
    want = run(model, new_cache(model, F16), IDS)
    assert nmse(want, exact) <= 2e-6
    assert np.array_equal(run(model, new_cache(model, F16), IDS, 7), want)
    assert nmse(run(model, new_cache(model, F16), IDS, 1), want) <= 1e-6
    parts = [IDS[:40], IDS[5:], IDS[2:25]]
    alone = [run(model, new_cache(model, F16), part)[-1] for part in parts]
    assert np.array_equal(run_together(model, [F16], parts), np.stack(alone))


def test_q_k_and_v_of_several_types(tmp_path: Path) -> None:
    """The products of each are rows of one convolution."""
    model_file = hybrid("kimi-linear")
    model_file.in_f32 = ("blk.0.attn_v.weight", "blk.3.attn_q.weight")
    model = model_of(model_file.write(tmp_path / "model.gguf"))
    assert [isinstance(layer.mixer.attn_k, Linear) for layer in model.weights.layers[:2]] == [
        True,
        False,
    ]
    got = run(model, new_cache(model, F16), IDS)[list(SHOWN)]
    assert nmse(got, wanted("kimi-linear")) <= 2e-6


def changed(model: Transformer, change: Callable[[Any, Any], tuple[Any, Any]]) -> Transformer:
    """The model with other specifications and weights of its recurrent mixers."""
    specs, weights = [], []
    for spec, layer in zip(model.config.layers, model.weights.layers, strict=True):
        for field in ("mixer", "beside"):
            mixer = getattr(spec, field)
            if hasattr(mixer, "state"):
                made, held = change(mixer, getattr(layer, field))
                spec, layer = replace(spec, **{field: made}), replace(layer, **{field: held})
        specs.append(spec)
        weights.append(layer)
    return Transformer(
        replace(model.config, layers=tuple(specs)),
        replace(model.weights, layers=tuple(weights)),
        model.backend,
    )


def _first_tap_only(table: np.ndarray) -> np.ndarray:
    return np.concatenate((np.zeros_like(table[:, :-1]), table[:, -1:]), axis=1)


def _without(field: str, value: float = 0.0) -> Callable[[Any, Any], tuple[Any, Any]]:
    def change(spec: Any, held: Any) -> tuple[Any, Any]:
        return spec, replace(held, **{field: np.full_like(getattr(held, field), value)})

    return change


def _norm_of_ones(spec: Any, held: Any) -> tuple[Any, Any]:
    norm = replace(held.ssm_norm, weight=np.ones_like(held.ssm_norm.weight))
    return spec, replace(held, ssm_norm=norm)


def _conv(field: str) -> Callable[[Any, Any], tuple[Any, Any]]:
    def change(spec: Any, held: Any) -> tuple[Any, Any]:
        return spec, replace(held, **{field: _first_tap_only(getattr(held, field))})

    return change


def _other_heads(spec: Any, held: Any) -> tuple[Any, Any]:
    return replace(spec, heads_in_turn=not spec.heads_in_turn), held


def _one_group(spec: Any, held: Any) -> tuple[Any, Any]:
    return replace(spec, norm=None), replace(held, ssm_norm=None)


def _silu_gate(spec: Any, held: Any) -> tuple[Any, Any]:
    return replace(spec, gate_activation="silu"), held


def _other_bound(spec: Any, held: Any) -> tuple[Any, Any]:
    return replace(spec, least_log_decay=-4.0), held


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("qwen35", _other_heads),
        ("qwen35", _conv("ssm_conv1d")),
        ("qwen35", _without("ssm_a")),
        ("qwen35", _without("ssm_dt")),
        ("qwen35", _norm_of_ones),
        ("lfm2", _conv("conv")),
        ("granitehybrid", _conv("ssm_conv1d")),
        ("granitehybrid", _without("ssm_conv1d_bias")),
        ("granitehybrid", _without("ssm_a")),
        ("granitehybrid", _without("ssm_dt")),
        ("nemotron_h", _without("ssm_d")),
        ("nemotron_h", _norm_of_ones),
        ("falcon-h1", _one_group),
        ("kimi-linear", _conv("ssm_conv1d")),
        ("kimi-linear", _without("ssm_a")),
        ("kimi-linear", _without("ssm_dt")),
        ("kimi-linear", _norm_of_ones),
        ("kimi-linear", _silu_gate),
        ("bailingmoe3", _without("ssm_a")),
        ("bailingmoe3", _without("ssm_dt")),
        ("bailingmoe3", _other_bound),
    ],
)
def test_every_part_matters(name: str, change: Any, tmp_path: Path) -> None:
    model = model_of(hybrid(name).write(tmp_path / "model.gguf"))
    other = changed(model, change)
    got = run(other, new_cache(other, F16), IDS)[list(SHOWN)]
    assert nmse(got, wanted(name)) > 1e-4


@pytest.mark.parametrize("part", ["rows", "memory"])
def test_what_a_state_holds_matters(part: str, tmp_path: Path) -> None:
    model = model_of(hybrid("qwen35").write(tmp_path / "model.gguf"))
    cache = new_cache(model, F16)
    sequence = cache.new_sequence()
    for ids in (IDS[:30], IDS[30:]):
        out = model.forward(cache.batch([(sequence, ids)]), cache)
        sequence.length += len(ids)
        for layer in cache.layers:
            if layer.state is not None:
                getattr(layer.state, part)[:] = 0
    assert nmse(out[0], wanted("qwen35")[-1]) > 1e-4


def test_one_mixer_beside_another(tmp_path: Path) -> None:
    model = model_of(hybrid("falcon-h1").write(tmp_path / "model.gguf"))
    alone = replace(
        model.config, layers=tuple(replace(spec, beside=None) for spec in model.config.layers)
    )
    other = Transformer(alone, model.weights, model.backend)
    got = run(other, new_cache(model, F16), IDS)[list(SHOWN)]
    assert nmse(got, wanted("falcon-h1")) > 1e-3


def test_the_last_layer_may_be_a_block_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nemotron-H has such a layer: it stores neither rows nor a state."""
    monkeypatch.setitem(LAYERS, "nemotron_h", ["mamba", "attention", "mamba", "mlp"])
    path = hybrid("nemotron_h").write(tmp_path / "model.gguf")
    want = logits(path, reference_backend(torch.float64), IDS, "f32")
    for chunk in (1, 37):
        assert nmse(logits(path, cpu_backend(), IDS, "f32", chunk=chunk), want) < 1e-10
    engine = Engine(model_of(path), CacheConfig(n_ctx=64))
    sampler = Sampler(SamplingParams(temperature=0), n_vocab=N_VOCAB)
    drawn = list(
        BatchEngine(engine).generate(IDS[:5], GenerationOptions(sampler=sampler, max_tokens=3))
    )
    again = engine.logits([*IDS[:5], *drawn[:2]])
    assert drawn == [int(row.argmax()) for row in again[-3:]]


def interleaved(model: HybridModel) -> HybridModel:
    """The tensors as files of Qwen3-Next have them: by key head."""
    keys, values, size = 2, 4, model.keys["ssm.state_size"]
    each = values // keys
    for i, kind in enumerate(model.layers):
        if kind != "delta":
            continue
        at = f"blk.{i}."
        taken = {
            name: model.tensors.pop(f"{at}{name}.weight")
            for name in ("attn_qkv", "attn_gate", "ssm_beta", "ssm_alpha")
        }
        q, k, v = np.split(taken["attn_qkv"], [keys * size, 2 * keys * size])
        wide = [part.reshape(keys, -1, part.shape[-1]) for part in (q, k, v, taken["attn_gate"])]
        model.tensors[f"{at}ssm_in.weight"] = np.concatenate(wide, 1).reshape(-1, q.shape[-1])
        pair = [taken[name].reshape(keys, each, -1) for name in ("ssm_beta", "ssm_alpha")]
        model.tensors[f"{at}ssm_ba.weight"] = np.concatenate(pair, 1).reshape(2 * values, -1)
    return model


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name)
def test_tensors_by_key_head(backend: Backend, tmp_path: Path) -> None:
    """Files of the first converter and of Qwen3-Next, whose parts lie together by key head."""
    paths = [
        hybrid("qwen35").write(tmp_path / "apart.gguf"),
        interleaved(hybrid("qwen35")).write(tmp_path / "together.gguf"),
    ]
    apart, together = (logits(path, backend, IDS, "f16") for path in paths)
    np.testing.assert_array_equal(apart, together)


@pytest.mark.parametrize(
    ("name", "keys", "message"),
    [
        ("qwen35", {"ssm.inner_size": 128}, "4 heads of 64 channels are not 128 channels"),
        ("qwen35", {"ssm.group_count": 3}, "4 value heads can't share 3 key heads evenly"),
        ("qwen35", {"ssm.conv_kernel": 1}, "conv_kernel.* is 1"),
        ("qwen35", {"full_attention_interval": 9}, "a model of recurrent layers only"),
        ("qwen35", {"ssm.state_size": 0}, "state_size.* is 0"),
        ("lfm2", {"attention.head_count_kv": [0, 0, 0, 0]}, "a model of recurrent layers only"),
        ("lfm2", {"shortconv.l_cache": 4}, r"shortconv.conv.weight.* shape \[128, 3\]"),
        ("granitehybrid", {"ssm.group_count": 3}, "4 heads and 3 groups don't divide"),
        ("nemotron_h_moe", {"moe_latent_size": 64}, r"ffn_up_exps.weight.* shape \[8, 96, 128\]"),
    ],
)
def test_contradictory_files(name: str, keys: Any, message: str, tmp_path: Path) -> None:
    model = hybrid(name)
    model.keys = {**model.keys, **keys}
    with pytest.raises(ModelFileError, match=message):
        load_model(model.write(tmp_path / "model.gguf"), cpu_backend())


@pytest.mark.parametrize(
    "tensor",
    ["blk.0.ssm_a", "blk.0.ssm_conv1d.weight", "blk.0.ssm_out.weight", "blk.0.ssm_dt.bias"],
)
def test_missing_tensors(tensor: str, tmp_path: Path) -> None:
    for name in ("qwen35", "granitehybrid"):
        model = hybrid(name)
        del model.tensors[tensor]
        with pytest.raises(ModelFileError, match=f"missing tensor '{tensor}'"):
            load_model(model.write(tmp_path / f"{name}.gguf"), cpu_backend())


def test_sizes_without_a_kernel_are_composed(tmp_path: Path) -> None:
    """Heads that are no whole vectors."""
    model = hybrid("qwen35")
    odd = HybridModel("qwen35", {**model.keys, "ssm.state_size": 24, "ssm.inner_size": 96})
    path = odd.write(tmp_path / "model.gguf")
    spec = load_model(path, cpu_backend())[0].config.layers[0].mixer
    assert isinstance(spec, DeltaNetSpec)
    assert spec.head_dim == 24
    slow, fast = (logits(path, backend, IDS[:20], "f16") for backend in BACKENDS)
    assert nmse(fast, slow) <= 1e-10


def test_a_measurement_that_shows_prompts_unpacked_rows(tmp_path: Path) -> None:
    """Its cache has the states, too."""
    model = model_of(hybrid("qwen35").write(tmp_path / "model.gguf"))
    layouts = [GroupLayout(group, (SegmentSpec("q4_0", "q4_0"),)) for group in model.config.groups]
    cache = ExactPrefillCache(
        layouts, n_batch=64, n_ctx=64, arrays=model.backend.arrays, states=model.config.states
    )
    got = run(model, cache, IDS)
    exact = run(model, new_cache(model, SegmentSpec("f32", "f32")), IDS)
    assert nmse(got, exact) <= 1e-10


def test_scales_by_head_are_refused(tmp_path: Path) -> None:
    """Layers are not alike: most have no heads of K and V."""
    model = model_of(hybrid("qwen35").write(tmp_path / "model.gguf"))
    with pytest.raises(UsageError, match="layers"):
        next(calibrate(model, [IDS], n_ctx=64, kv_rotation="off", n_batch=32))
