"""Layers' operations on the CPU against the same layers put together from primitives."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from localkv.arch.spec import (
    AttentionParams,
    AttentionSpec,
    LayerSpec,
    MlpSpec,
    NormSpec,
    RopeSpec,
    XieluParams,
)
from localkv.cache.kv_cache import uniform_cache
from localkv.cache.layout import SegmentSpec
from localkv.kernels.backend import Backend, StackLayer, TokenBatch, TokenInputs, run_one_by_one
from localkv.kernels.cpu.attention import packed_attention
from localkv.kernels.cpu.attention.plan import Plan
from localkv.kernels.cpu.cpu_backend import cpu_backend
from localkv.kernels.layer_weights import AttentionWeights, LayerWeights, Linear, MlpWeights, Norm
from localkv.kernels.reference.backend import reference_backend
from localkv.kernels.rope import rope_frequencies, rope_table
from localkv.quant_formats import FORMATS
from localkv.quant_formats.packed_tensor import PackedTensor
from localkv.system.threads import n_threads, use_threads

N_EMBD, N_HEADS, N_KV_HEADS, HEAD_DIM, N_FF, N_TOKENS = 64, 4, 2, 32, 96, 5
ROPE = RopeSpec(16, interleaved=False)
RMS = NormSpec("norm", "rms", 1e-5)
LAYER_NORM = NormSpec("norm", "layer", 1e-5)
ATTENTION = AttentionSpec(
    N_HEADS, N_KV_HEADS, HEAD_DIM, HEAD_DIM, AttentionParams(HEAD_DIM**-0.5), ROPE
)
PLAIN = LayerSpec(ATTENTION, MlpSpec(N_FF), RMS, RMS)


def with_attention(**changes: Any) -> LayerSpec:
    return replace(PLAIN, mixer=replace(ATTENTION, **changes))


def with_norms(norm: NormSpec, **changes: Any) -> LayerSpec:
    return with_attention(q_norm=norm, k_norm=norm, **changes)


LAYERS = {
    "plain": PLAIN,
    "no norms": replace(PLAIN, attn_norm=None, ffn_norm=None),
    "post norms": replace(PLAIN, post_attn_norm=RMS, post_ffn_norm=RMS),
    "scale": replace(PLAIN, residual_scale=0.3),
    "post norms and scale": replace(
        PLAIN, post_attn_norm=RMS, post_ffn_norm=RMS, residual_scale=0.3
    ),
    "parallel": replace(PLAIN, parallel=True),
    "layer norms": replace(PLAIN, attn_norm=LAYER_NORM, ffn_norm=LAYER_NORM),
    "head norms": with_norms(RMS),
    "head norms after RoPE": with_norms(RMS, norms_after_rope=True),
    "norms of each head": with_norms(replace(LAYER_NORM, span="heads")),
    "row norms": with_norms(replace(RMS, span="row")),
    "V normed": with_attention(v_norm=replace(RMS, tensor="")),
    "V from K": with_attention(v_norm=replace(RMS, tensor=""), value_from_key=True),
    "gated": with_attention(gated=True),
    "no RoPE": with_attention(rope=None),
    **{
        f"{name}, {'gated' if gated else 'no gate'}": replace(
            PLAIN, ffn=MlpSpec(N_FF, name, gated=gated)
        )
        for name in ("silu", "gelu", "relu", "relu2")
        for gated in (True, False)
    },
    "swiglu_oai": replace(PLAIN, ffn=MlpSpec(N_FF, "swiglu_oai")),
    "xielu": replace(
        PLAIN, ffn=MlpSpec(N_FF, "xielu", gated=False, xielu=XieluParams(0.8, 0.6, 0.5, -1e-6))
    ),
    "sparse gelu": replace(PLAIN, ffn=MlpSpec(N_FF, "gelu", sparsity=0.5)),
}


def random_layer(spec: LayerSpec, biases: bool, seed: int = 0) -> LayerWeights:
    """In plain NumPy, as a file has it."""
    rng = np.random.default_rng(seed)

    def matrix(n_out: int, n_in: int, gain: float = 1.5) -> Linear:
        values = (rng.standard_normal((n_out, n_in)) * gain / n_in**0.5).astype(np.float32)
        rows = values.view(np.uint8).reshape(n_out, -1)
        bias = rng.standard_normal(n_out).astype(np.float32) if biases else None
        return Linear(PackedTensor(FORMATS["f32"], rows, (n_out, n_in)), bias)

    def norm(of: NormSpec | None, *shape: int) -> Norm | None:
        if of is None:
            return None
        weight = (1 + 0.3 * rng.standard_normal(shape)).astype(np.float32)
        bias = rng.standard_normal(shape[-1]).astype(np.float32)
        return Norm(of, weight, bias if of.kind == "layer" and of.span == "head" else None)

    attn, mlp = spec.attention, spec.ffn
    assert isinstance(mlp, MlpSpec)

    def head_norm(of: NormSpec | None, n_heads: int) -> Norm | None:
        shapes = {"head": (HEAD_DIM,), "heads": (n_heads, HEAD_DIM), "row": (n_heads * HEAD_DIM,)}
        return None if of is None else norm(of, *shapes[of.span])

    kv = N_KV_HEADS * HEAD_DIM
    return LayerWeights(
        mixer=AttentionWeights(
            matrix(N_HEADS * HEAD_DIM * (2 if attn.gated else 1), N_EMBD),
            matrix(kv, N_EMBD),
            None if attn.value_from_key else matrix(kv, N_EMBD),
            matrix(N_EMBD, N_HEADS * HEAD_DIM),
            head_norm(attn.q_norm, N_HEADS),
            head_norm(attn.k_norm, N_KV_HEADS),
            head_norm(attn.v_norm, N_KV_HEADS),
        ),
        ffn=MlpWeights(
            matrix(N_FF, N_EMBD) if mlp.gated else None, matrix(N_FF, N_EMBD), matrix(N_EMBD, N_FF)
        ),
        attn_norm=norm(spec.attn_norm, N_EMBD),
        ffn_norm=norm(spec.ffn_norm, N_EMBD),
        post_attn_norm=norm(spec.post_attn_norm, N_EMBD),
        post_ffn_norm=norm(spec.post_ffn_norm, N_EMBD),
    )


def on(backend: Backend, part: Any) -> Any:
    """Weights as a backend wants them."""
    arrays = backend.arrays
    match part:
        case PackedTensor():
            return backend.prepare(part)
        case np.ndarray():
            return arrays.floating(arrays.from_numpy(part))
        case LayerWeights() | AttentionWeights() | MlpWeights() | Linear() | Norm():
            names = part.__dataclass_fields__
            return replace(part, **{name: on(backend, getattr(part, name)) for name in names})
    return part


def run(backend: Backend, spec: LayerSpec, weights: LayerWeights, x: np.ndarray) -> np.ndarray:
    """The layer's output for a prompt: float64 [tokens, n_embd]."""
    arrays = backend.arrays
    cache = uniform_cache(
        arrays,
        n_layers=1,
        n_kv_heads=N_KV_HEADS,
        head_dim=HEAD_DIM,
        segments=[SegmentSpec("f32", "f32")],
        n_ctx=256,
    )
    batch = cache.batch([(cache.new_sequence(), [0] * len(x))])
    rope, layer = spec.attention.rope, on(backend, weights)
    table = None
    if rope is not None:
        freqs = arrays.from_numpy(rope_frequencies(rope))
        table = rope_table(freqs, batch.positions, rope, arrays)
    before = arrays.floating(arrays.from_numpy(x))
    mix, ffn = backend.mixers[AttentionSpec], backend.ffns[MlpSpec]
    mixed = mix(before, layer, spec, TokenInputs(table, None), cache.layers[0], batch)
    h = backend.out_residual(before, mixed, layer, spec)
    return arrays.to_numpy(ffn(h, before, layer, spec)).astype(np.float64)


@pytest.mark.parametrize("biases", [False, True], ids=["", "biases"])
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_gives_what_the_reference_gives(name: str, biases: bool) -> None:
    spec = LAYERS[name]
    weights = random_layer(spec, biases)
    x = np.random.default_rng(1).standard_normal((N_TOKENS, N_EMBD)).astype(np.float32)
    backend = cpu_backend()
    got = run(backend, spec, weights, x)
    want = run(reference_backend(torch.float64), spec, weights, x)
    assert np.sum((got - want) ** 2) < 1e-11 * np.sum(want**2)
    if spec != PLAIN:  # what sets it apart shows
        other = run(backend, PLAIN, random_layer(PLAIN, biases), x)
        assert np.sum((other - want) ** 2) > 1e-3 * np.sum(want**2)
    alone = run(backend, spec, weights, x[:1])
    assert np.array_equal(alone, got[:1])


def test_no_layer_is_composed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of these has chains of compiled workers."""
    backend = cpu_backend()
    attention = backend.mixers[AttentionSpec]
    layer = backend.out_residual.__self__  # type: ignore[attr-defined]

    def composed(*_: object) -> None:
        raise AssertionError("put together from primitives")

    monkeypatch.setattr(attention, "composed", composed)
    monkeypatch.setattr(
        layer, "composed", replace(layer.composed, out_residual=composed, ffns={MlpSpec: composed})
    )
    x = np.ones((1, N_EMBD), np.float32)
    for spec in LAYERS.values():
        run(backend, spec, random_layer(spec, biases=True), x)


def decoded(backend: Backend, specs: list[LayerSpec], segment: SegmentSpec) -> list[bytes]:
    """What layers make of a few generated tokens, one after the other."""
    arrays = backend.arrays
    shape = {"n_kv_heads": N_KV_HEADS, "head_dim": HEAD_DIM, "n_ctx": 256}
    cache = uniform_cache(arrays, n_layers=len(specs), segments=[segment], **shape)
    sequence, results = cache.new_sequence(), list[bytes]()
    stack = tuple(
        StackLayer(spec, layer, ((AttentionSpec, spec, layer),), 0, i)
        for i, spec in enumerate(specs)
        if (layer := on(backend, random_layer(spec, biases=True, seed=i)))
    )
    for position in range(3):
        batch = cache.batch([(sequence, [position])], generated=True)
        freqs = arrays.from_numpy(rope_frequencies(ROPE))
        inputs = TokenInputs(rope_table(freqs, batch.positions, ROPE, arrays), None)
        x = np.random.default_rng(position).standard_normal((1, N_EMBD)).astype(np.float32)
        out = backend.run_layers(x, stack, TokenBatch([inputs], cache.layers, batch, None))
        if out is None:
            for layer, rows in zip(stack, cache.layers, strict=True):
                mix, ffn = backend.mixers[AttentionSpec], backend.ffns[MlpSpec]
                mixed = mix(x, layer.weights, layer.spec, inputs, rows, batch)
                h = backend.out_residual(x, mixed, layer.weights, layer.spec)
                x = ffn(h, x, layer.weights, layer.spec)
            out = x
        results.append(out.tobytes())
        sequence.length += 1
    return results


@pytest.mark.parametrize("rotation", [0, HEAD_DIM], ids=["", "rotated"])
def test_a_token_runs_through_all_layers_at_once(rotation: int) -> None:
    """With the same bits as through one after the other; no step is composed."""
    specs = [spec for spec in LAYERS.values() if spec.attention.rope]
    backend, segment = cpu_backend(), SegmentSpec("q8_0", "q4_0", 0, rotation, rotation)
    at_once = decoded(backend, specs, segment)
    (kept,) = backend.run_layers.kept.values()  # type: ignore[attr-defined]
    assert len(kept.program.places.stages) == 1
    assert at_once == decoded(replace(backend, run_layers=run_one_by_one), specs, segment)
    use_threads(n_threads() + 1)
    try:
        assert at_once == decoded(backend, specs, segment)
    finally:
        use_threads(n_threads() - 1)


def test_plans_are_kept_until_a_token_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plans of all layers hold, though attention forgets them while it plans for others."""
    monkeypatch.setattr(packed_attention, "MANY_PLANS", 1)
    made, make_plan = list[weakref.ref[Plan]](), packed_attention.make_plan

    def noted(*args: Any, in_blocks: bool) -> Plan:
        plan = make_plan(*args, in_blocks=in_blocks)
        made.append(weakref.ref(plan))
        return plan

    monkeypatch.setattr(packed_attention, "make_plan", noted)
    windows = [replace(ATTENTION.params, window=n) for n in (0, 2, 3)]
    specs = [with_attention(params=params) for params in windows]
    backend = cpu_backend()
    decoded(backend, specs, SegmentSpec("f16", "f16"))
    assert len(made) == 3  # and are those of the tokens that follow
    assert all(plan() is not None for plan in made[-3:])
