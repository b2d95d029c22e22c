"""Models with routed experts: logits of llama.cpp, and what each part of a model is worth."""

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

from localkv.arch.spec import AttentionParams, LayerSpec
from localkv.cache.layout import SegmentSpec
from localkv.kernels.cpu.cpu_backend import cpu_backend
from localkv.kernels.layer_weights import LayerWeights
from localkv.kernels.reference.backend import reference_backend
from localkv.loader.weights import load_model
from localkv.model import Transformer
from support.expert_models import EXPERT_MODELS, IDS, N_VOCAB, SHOWN
from support.f32_copy import f32_copy
from support.forward import CONFORMANCE_IDS, logits, new_cache, nmse, run, run_together
from support.hybrid_models import KEYS as HYBRIDS
from support.hybrid_models import hybrid

STORED = json.loads((Path(__file__).parent / "data" / "llama_cpp_experts.json").read_text())
N_IDS = 90


def stored(name: str) -> np.ndarray:
    """float32 [positions shown, n_vocab]."""
    return np.frombuffer(base64.b64decode(STORED[name]), np.float32).reshape(-1, N_VOCAB)


@pytest.mark.parametrize("name", EXPERT_MODELS)
def test_llama_cpp_logits(name: str, tmp_path: Path) -> None:
    """llama.cpp is up to 3e-6 away from float64 here."""
    path = EXPERT_MODELS[name].write(tmp_path / "model.gguf")
    for backend in (reference_backend(), cpu_backend()):
        got = logits(path, backend, IDS, "f16", chunk=37)[list(SHOWN)]
        assert nmse(got, stored(name)) <= 5e-6


@pytest.mark.parametrize("name", ["gpt-oss", "bailingmoe2", "step35", "laguna", "mimo2"])
@pytest.mark.parametrize("pair", [("q8_0", "q4_0"), ("iq4_nl", "q5_1"), ("fp8_e4m3", "q6_0")])
def test_packed_caches(pair: tuple[str, str], name: str, conformance: Path, tmp_path: Path) -> None:
    """Sinks, windows and experts on packed K and V, against float64 on the same codes."""
    source, ids = conformance / f"archs2/{name}.gguf", CONFORMANCE_IDS[:100]
    if name in EXPERT_MODELS:
        source, ids = EXPERT_MODELS[name].write(tmp_path / "f16.gguf"), IDS
    path = f32_copy(source, tmp_path / "f32.gguf")
    backends = reference_backend(torch.float64), cpu_backend()
    exact, fast = (load_model(path, backend)[0] for backend in backends)
    want, got = (
        run(model, new_cache(model, SegmentSpec(*pair)), ids, chunk=60 * len(ids) // 100)
        for model in (exact, fast)
    )
    assert nmse(got, want) <= 2e-5


@pytest.mark.parametrize(
    "name",
    [
        "dbrx",
        "muse-glimmer",
        "phimoe",
        "step35",
        "laguna",
        "laguna-m",
        "mimo2",
        "maple",
        "spark2_5",
    ],
)
def test_tokens_one_by_one_and_in_company(name: str, tmp_path: Path) -> None:
    model, _ = load_model(EXPERT_MODELS[name].write(tmp_path / "model.gguf"), cpu_backend())
    f16 = SegmentSpec("f16", "f16")
    want = run(model, new_cache(model, f16), IDS)
    assert nmse(run(model, new_cache(model, f16), IDS, chunk=1), want) <= 1e-5
    parts = [IDS[:40], IDS[5:], IDS[2:25]]
    alone = [run(model, new_cache(model, f16), part)[-1] for part in parts]
    assert np.array_equal(run_together(model, [f16], parts), np.stack(alone))


def spec_with(**changes: Any) -> Callable[[LayerSpec, LayerWeights], tuple[Any, Any]]:
    """The experts' specification with other fields."""

    def change(spec: LayerSpec, layer: LayerWeights) -> tuple[LayerSpec, LayerWeights]:
        return replace(spec, ffn=(spec.moe and replace(spec.moe, **changes)) or spec.ffn), layer

    return change


def weights_without(*names: str) -> Callable[[LayerSpec, LayerWeights], tuple[Any, Any]]:
    """The experts' weights but for some."""

    def change(spec: LayerSpec, layer: LayerWeights) -> tuple[LayerSpec, LayerWeights]:
        moe = layer.moe and replace(layer.moe, **dict.fromkeys(names))
        return spec, replace(layer, ffn=moe or layer.ffn)

    return change


def attention_with(**changes: Any) -> Callable[[LayerSpec, LayerWeights], tuple[Any, Any]]:
    def change(spec: LayerSpec, layer: LayerWeights) -> tuple[LayerSpec, LayerWeights]:
        return replace(spec, mixer=replace(spec.attention, **changes)), layer

    return change


def without_gate(spec: LayerSpec, layer: LayerWeights) -> tuple[LayerSpec, LayerWeights]:
    """A sigmoid of 0 for every channel."""
    q = layer.attention.attn_q
    rows = np.asarray(q.weight.rows).reshape(spec.attention.n_heads, 2, -1).copy()
    rows[:, 1] = 0
    weight = replace(q.weight, rows=rows.reshape(q.weight.rows.shape))
    return spec, replace(layer, mixer=replace(layer.attention, attn_q=replace(q, weight=weight)))


def without_router_bias(spec: LayerSpec, layer: LayerWeights) -> tuple[LayerSpec, LayerWeights]:
    assert layer.moe is not None
    router = replace(layer.moe.ffn_gate_inp, bias=None)
    return spec, replace(layer, ffn=replace(layer.moe, ffn_gate_inp=router))


def without_head_gates(spec: LayerSpec, layer: LayerWeights) -> tuple[LayerSpec, LayerWeights]:
    mixer = replace(layer.attention, attn_gate=None)
    return attention_with(head_gated=False)(spec, replace(layer, mixer=mixer))


def without_sinks(spec: LayerSpec, layer: LayerWeights) -> tuple[LayerSpec, LayerWeights]:
    mixer = replace(layer.attention, sinks=None)
    return attention_with(sinks=None)(spec, replace(layer, mixer=mixer))


def without_norm_biases(spec: LayerSpec, layer: LayerWeights) -> tuple[LayerSpec, LayerWeights]:
    norms = {name: getattr(layer, name) for name in ("attn_norm", "ffn_norm")}
    return spec, replace(layer, **{name: replace(norm, bias=None) for name, norm in norms.items()})


PARTS = {
    "dbrx": {"bound on q, k and v": attention_with(clamp=0.0)},
    "grok": {
        "dense block": weights_without("shared"),
        "scale": attention_with(params=AttentionParams(0.125, softcap=6.0)),
    },
    "phimoe": {"biases of norms": without_norm_biases},
    "gpt-oss": {
        "sinks": without_sinks,
        "softmax of the chosen": spec_with(gating="softmax"),
        "clamped SwiGLU": spec_with(activation="silu"),
        "biases of experts": weights_without("gate_bias", "up_bias", "down_bias"),
        "bias of the router": without_router_bias,
    },
    "glm4moe": {
        "factor": spec_with(weights_scale=1.0),
        "sum of 1": spec_with(renormalise=False),
        "sigmoid": spec_with(gating="softmax"),
        "selection bias": weights_without("exp_probs_b"),
        "shared expert": weights_without("shared"),
    },
    "bailingmoe2": {"groups": spec_with(n_groups=1, n_groups_used=1)},
    "olmoe": {"weights as they are": spec_with(renormalise=True)},
    "granitemoe": {"shared expert": weights_without("shared")},
    "hunyuan-moe": {"norms after RoPE": attention_with(norms_after_rope=False)},
    "llama4": {"weight of the input": spec_with(weighs_input=False)},
    "smallthinker": {
        "router of the input": spec_with(router_reads_input=False),
        "ReLU": spec_with(activation="silu"),
    },
    "cohere2moe": {"half of the shared expert": spec_with(shared_scale=1.0)},
    "afmoe": {"gate": without_gate},
    "step35": {
        "limits": spec_with(limit=0.0),
        "limits of the shared expert": spec_with(shared_limit=0.0),
        "gates of heads": without_head_gates,
    },
    "laguna": {
        "softplus": attention_with(gate_activation="sigmoid"),
        "gates of heads": without_head_gates,
    },
    "laguna-m": {"softplus": attention_with(gate_activation="sigmoid")},
    "maple": {"limits": spec_with(limit=0.0), "gate": spec_with(limits_gate=False)},
    "mimo2": {"sinks": without_sinks, "factor": attention_with(output_scale=1.0)},
    "deepseek": {"factor": spec_with(weights_scale=1.0)},
    "deepseek2-ocr": {"shared expert": weights_without("shared")},
    "nemotron_h_moe": {
        "squared ReLU": spec_with(activation="gelu"),
        "sigmoid": spec_with(gating="softmax"),
        "selection bias": weights_without("exp_probs_b"),
        "shared expert": weights_without("shared"),
    },
}
"""By model, what leaves out a part of it."""


@pytest.mark.parametrize("name", PARTS)
def test_every_part_matters(name: str, conformance: Path, tmp_path: Path) -> None:
    """Without one the logits are far from what they are with it."""
    path, ids = conformance / f"archs2/{name}.gguf", CONFORMANCE_IDS[:N_IDS]
    if name in EXPERT_MODELS or name in HYBRIDS:
        model_file = EXPERT_MODELS.get(name) or hybrid(name)
        path, ids = model_file.write(tmp_path / "model.gguf"), IDS
    backend = cpu_backend()
    model, _ = load_model(path, backend)
    f16 = SegmentSpec("f16", "f16")
    want = run(model, new_cache(model, f16), ids)
    assert np.array_equal(run(model, new_cache(model, f16), ids, chunk=7), want)
    for part, change in PARTS[name].items():
        changed = [
            change(spec, layer) if spec.moe else (spec, layer)
            for spec, layer in zip(model.config.layers, model.weights.layers, strict=True)
        ]
        specs, layers = zip(*changed, strict=True)
        other = Transformer(
            replace(model.config, layers=specs), replace(model.weights, layers=layers), backend
        )
        assert nmse(run(other, new_cache(other, f16), ids), want) > 5e-3, part
