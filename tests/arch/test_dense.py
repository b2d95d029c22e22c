"""Architectures without experts: each against float64, and each mechanism by leaving it out.

`support/float64_model.py` evaluates the same graphs without the package's code; on these models it
and llama.cpp agree, too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as GGMLType

from localkv.arch.spec import LayerSpec, ModelSpec, RopeSpec
from localkv.cache.layout import SegmentSpec, cache_segments
from localkv.config import CacheConfig
from localkv.engine.batch_engine import BatchEngine
from localkv.engine.engine import Engine
from localkv.engine.generation import GenerationOptions
from localkv.errors import UsageError
from localkv.kernels.backend import Backend
from localkv.kernels.cpu.cpu_backend import cpu_backend
from localkv.kernels.reference.backend import reference_backend
from localkv.loader.weights import load_model
from localkv.model import Transformer
from localkv.sampling.params import SamplingParams
from localkv.sampling.sampler import Sampler
from support.dense_variants import DENSE, MECHANISMS, dense_variant
from support.float64_model import float64_logits
from support.forward import IDS, logits, new_cache, nmse, run
from support.random_model import RandomModel

if TYPE_CHECKING:
    from support.summary import Summary

BACKENDS: list[tuple[Backend, float]] = [
    (reference_backend(torch.float64), 1e-10),
    (cpu_backend(), 1e-8),
]
FEW = IDS[:40]
SENSITIVE = ("gemma2", "olmo3")
"""One code that is rounded the other way counts up to 1.4e-4, as what blocks give is normed."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in MECHANISMS else pytest.mark.slow) for name in DENSE],
)
def test_equals_float64_evaluation(name: str, tmp_path: Path) -> None:
    random_model = dense_variant(name)
    path = random_model.write(tmp_path / "model.gguf", GGMLType.F32)
    want = float64_logits(random_model, FEW)
    for backend, limit in BACKENDS:
        assert nmse(logits(path, backend, FEW, "f32", chunk=17), want) < limit


@pytest.mark.slow
@pytest.mark.parametrize("pair", [("q8_0", "q4_0"), ("q4_0", "q8_0"), ("q5_1", "q4_1")])
@pytest.mark.parametrize("name", MECHANISMS)
def test_packed_caches_equal_float64(
    name: str, pair: tuple[str, str], tmp_path: Path, summary: Summary
) -> None:
    """float64 gives the same graph and codes: a value between two codes may get either."""
    path = dense_variant(name).write(tmp_path / "model.gguf", GGMLType.F32)
    errors = {}
    want = _with_packed(path, reference_backend(torch.float64), pair)
    for backend in (reference_backend(), cpu_backend()):
        errors[backend.name] = nmse(_with_packed(path, backend, pair), want)
    summary(f"NMSE against float64, {name}, {'-'.join(pair)}", errors)
    assert max(errors.values()) <= (1e-3 if name in SENSITIVE else 2e-5)


def _with_packed(path: Path, backend: Backend, pair: tuple[str, str]) -> np.ndarray:
    """Logits through a cache of these types, rotated where it is by default."""
    model, _ = load_model(path, backend)
    segments = cache_segments(CacheConfig(*pair), model.config.groups[0])
    return run(model, new_cache(model, *segments), FEW, chunk=33)


Change = Callable[[LayerSpec], LayerSpec]


def layers(change: Change) -> Callable[[ModelSpec], ModelSpec]:
    """All layers changed."""
    return lambda spec: replace(spec, layers=tuple(change(layer) for layer in spec.layers))


def mixers(**changes: Any) -> Callable[[ModelSpec], ModelSpec]:
    return layers(lambda layer: replace(layer, mixer=replace(layer.attention, **changes)))


def params(**changes: Any) -> Callable[[ModelSpec], ModelSpec]:
    def change(layer: LayerSpec) -> LayerSpec:
        new = replace(layer.attention.params, **changes)
        return replace(layer, mixer=replace(layer.attention, params=new))

    return layers(change)


def ropes(**changes: Any) -> Callable[[ModelSpec], ModelSpec]:
    """The windows of layers that have one."""

    def change(layer: LayerSpec) -> LayerSpec:
        rope = layer.attention.rope
        new = None if rope is None else replace(rope, **changes)
        return replace(layer, mixer=replace(layer.attention, rope=new))

    return layers(change)


def mlps(**changes: Any) -> Callable[[ModelSpec], ModelSpec]:
    return layers(lambda layer: replace(layer, ffn=replace(layer.mlp, **changes)))


def of_model(**changes: Any) -> Callable[[ModelSpec], ModelSpec]:
    return lambda spec: replace(spec, **changes)


def as_in_first_layer(spec: ModelSpec) -> ModelSpec:
    return replace(spec, layers=(spec.layers[0],) * spec.n_layers)


def rotating_everywhere(spec: ModelSpec) -> ModelSpec:
    return mixers(rope=spec.ropes[0])(spec)


def norms_of_kind(kind: str) -> Callable[[ModelSpec], ModelSpec]:
    def change(layer: LayerSpec) -> LayerSpec:
        assert layer.attn_norm is not None
        return replace(layer, attn_norm=replace(layer.attn_norm, kind=kind))

    return layers(change)


LEFT_OUT: dict[str, tuple[str, Callable[[ModelSpec], ModelSpec]]] = {
    "softcap of attention": ("gemma2", params(softcap=0.0)),
    "softcap of logits": ("gemma2", of_model(logit_softcap=0.0)),
    "scale of the embedding": ("gemma2", of_model(embedding_scale=1.0)),
    "windows": ("gemma2", params(window=0)),
    "a window's last position": ("gemma2", params(window=8)),
    "GELU": ("gemma2", mlps(activation="silu")),
    "short divisors": ("phi3-short", ropes(divisors="")),
    "long divisors": ("phi3-long", ropes(long_divisors="")),
    "magnitude": ("phi3-long", ropes(magnitude=1.0)),
    "RoPE on a part of a head": ("phi2", ropes(n_dims=64)),
    "blocks side by side": ("phi2", layers(lambda layer: replace(layer, parallel=False))),
    "scale of the residual": ("granite", layers(lambda x: replace(x, residual_scale=1.0))),
    "scale of the softmax": ("granite", params(softmax_scale=0.125)),
    "scale of the logits": ("granite", of_model(logit_scale=1.0)),
    "no RoPE at all": ("granite-no-rope", mixers(rope=RopeSpec(64))),
    "no YaRN in windows": ("olmo3", as_in_first_layer),
    "no RoPE in full layers": ("cohere2", rotating_everywhere),
    "norms after RoPE": ("hunyuan-dense", mixers(norms_after_rope=False)),
    "NTK alpha": ("hunyuan-dense", ropes(theta=10000.0)),
    "relu squared": ("nemotron", mlps(activation="relu")),
    "bias by distance": ("bloom", params(alibi=0.0)),
    "slopes": ("bloom", params(alibi=4.0)),
    "bound on q, k and v": ("olmo-clamped", mixers(clamp=0.0)),
    "LayerNorm": ("nemotron", norms_of_kind("rms")),
    "xIELU of each layer": ("apertus", as_in_first_layer),
    "pairs of channels": ("glm4", ropes(interleaved=False)),
}
"""What is left out: of which model, and how."""


def _changed(model: Transformer, change: Callable[[ModelSpec], ModelSpec]) -> Transformer:
    spec = change(model.config)
    changed = [
        replace(weights, attn_norm=replace(weights.attn_norm, spec=layer.attn_norm))
        if weights.attn_norm is not None and layer.attn_norm is not None
        else weights
        for weights, layer in zip(model.weights.layers, spec.layers, strict=True)
    ]
    return Transformer(spec, replace(model.weights, layers=tuple(changed)), model.backend)


@pytest.mark.parametrize("what", LEFT_OUT)
def test_each_mechanism_matters(what: str, tmp_path: Path) -> None:
    name, change = LEFT_OUT[what]
    path = dense_variant(name).write(tmp_path / "model.gguf", GGMLType.F32)
    model, _ = load_model(path, cpu_backend())
    want = run(model, new_cache(model, SegmentSpec("f32", "f32")), FEW)
    without = _changed(model, change)
    got = run(without, new_cache(without, SegmentSpec("f32", "f32")), FEW)
    assert nmse(got, want) > 1e-3


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("gemma2", "post_attention_norm.weight"),
        ("gemma2", "post_ffw_norm.weight"),
        ("granite_swa", "attn_sinks.weight"),
        ("olmo3", "attn_q_norm.weight"),
        ("command-r-plus", "attn_k_norm.weight"),
        ("phi2", "ffn_up.bias"),
        ("phi2", "attn_norm.bias"),
        ("phi2", "output.bias"),
        ("phi2", "output_norm.bias"),
        ("stablelm-parallel", "attn_q_norm.weight"),
        ("gpt2", "position_embd.weight"),
        ("bloom", "token_embd_norm.weight"),
        ("bitnet", "attn_sub_norm.weight"),
        ("bitnet", "ffn_sub_norm.weight"),
    ],
)
def test_each_vector_matters(name: str, tensor: str, tmp_path: Path) -> None:
    """Weights of 1, biases of 0 and sinks of -1000 in its place give other logits."""
    random_model = dense_variant(name)
    want = float64_logits(random_model, FEW[:12])
    flat = -1000.0 if "sinks" in tensor else float(tensor.endswith("weight"))
    for full_name, values in random_model.tensors.items():
        if full_name == tensor or full_name.endswith(f".{tensor}"):
            random_model.tensors[full_name] = np.full_like(values, flat)
    path = random_model.write(tmp_path / "model.gguf", GGMLType.F32)
    assert nmse(logits(path, cpu_backend(), FEW[:12], "f32"), want) > 1e-4


def test_a_text_has_a_learned_position_for_each_token(tmp_path: Path) -> None:
    """Generated tokens have them, too; and no context has more tokens than there are positions."""
    path = dense_variant("gpt2").write(tmp_path / "model.gguf", GGMLType.Q8_0)
    model, _ = load_model(path, cpu_backend())
    engine = Engine(model, CacheConfig(n_ctx=600), n_batch=64)
    sampler = Sampler(SamplingParams(temperature=0.0), n_vocab=model.config.n_vocab)
    ids, options = FEW[:30], GenerationOptions(sampler=sampler, max_tokens=20)
    drawn = list(BatchEngine(engine).generate(ids, options))
    whole = run(model, new_cache(model, SegmentSpec("f16", "f16")), [*ids, *drawn])
    assert whole[len(ids) - 1 : -1].argmax(1).tolist() == drawn
    with pytest.raises(UsageError, match="601 tokens is not possible: the model has 600 positions"):
        Engine(model, CacheConfig(n_ctx=601))


@pytest.mark.parametrize("change", [{"kv_tail": 64}, {"kv_sink": 4}, {"type_k": "q4_1c"}])
def test_a_bias_by_distance_needs_one_segment(change: dict[str, Any], tmp_path: Path) -> None:
    path = dense_variant("bloom").write(tmp_path / "model.gguf", GGMLType.Q8_0)
    model, _ = load_model(path, cpu_backend())
    cache = CacheConfig(**{"type_k": "q4_0", "type_v": "q8_0", "n_ctx": 512, **change})
    with pytest.raises(UsageError, match="biased by distance"):
        Engine(model, cache)


def test_fused_weights_beside_separate_biases(tmp_path: Path) -> None:
    """Some files have `attn_qkv.weight` and `attn_q.bias`."""
    biases = ("attn_q", "attn_k", "attn_v")
    random_model = RandomModel("qwen2", fused_qkv=True, biases=biases)
    want = float64_logits(random_model, FEW)
    for layer in range(random_model.n_layers):
        del random_model.tensors[f"blk.{layer}.attn_qkv.bias"]
    random_model.separate_biases = True
    path = random_model.write(tmp_path / "model.gguf", GGMLType.F32)
    assert nmse(logits(path, cpu_backend(), FEW, "f32"), want) < 1e-10


def test_blocks_that_predict_further_tokens_are_left_alone(tmp_path: Path) -> None:
    """`nextn_predict_layers` of `block_count` are no layers; whatever they hold is not read."""
    random_model = RandomModel("glm4", biases=("attn_q",))
    want = float64_logits(random_model, FEW)
    random_model.settings = {"block_count": 3, "nextn_predict_layers": 1}
    for name in ("attn_norm.weight", "nextn.eh_proj.weight", "nextn.shared_head_norm.weight"):
        random_model.tensors[f"blk.2.{name}"] = np.ones(4)
    path = random_model.write(tmp_path / "model.gguf", GGMLType.F32)
    assert nmse(logits(path, cpu_backend(), FEW, "f32"), want) < 1e-10
