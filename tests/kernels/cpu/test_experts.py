"""Routed experts on the CPU against the plain operation, and against themselves in company."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localkv.arch.spec import LayerSpec, MlpAndMoeSpec, MoeSpec
from localkv.config import CacheConfig
from localkv.engine.engine import Engine
from localkv.kernels.backend import Backend
from localkv.kernels.cpu.cpu_backend import cpu_backend
from localkv.kernels.cpu.layers import layer as layers
from localkv.kernels.cpu.moe.experts import add_routing
from localkv.kernels.cpu.runtime.chain import Chain, Memory, Scratch
from localkv.kernels.layer_weights import LayerWeights, Linear, MoeWeights
from localkv.kernels.moe import route
from localkv.loader.synthetic import synthetic_model
from localkv.system.threads import n_threads, use_threads
from support.other_cpus import HASWELL, NEHALEM, runs_here
from support.quick import quick
from support.random_experts import TYPES, as_given, random_layer, random_moe, with_each
from support.random_packed import random_packed

GATINGS = ("softmax", "sigmoid", "softmax_of_chosen", "sqrt_softplus")


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = n_threads()
    yield
    use_threads(before)


def run(backend: Backend, spec: LayerSpec, layer: LayerWeights, x: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        out: np.ndarray = backend.ffns[type(spec.ffn)](x, -0.5 * x[:, ::-1], layer, spec)
    return out


def composed(backend: Backend, spec: LayerSpec, layer: LayerWeights, x: np.ndarray) -> np.ndarray:
    """What `kernels/moe.py` computes with the CPU's products."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layers, "experts_run", lambda weights: False)
        return run(backend, spec, layer, x)


def check(got: np.ndarray, want: np.ndarray, x: np.ndarray) -> None:
    """Exponentials are not NumPy's, so a value here and there is rounded to another code."""
    size = np.abs(want - x).max()
    assert np.abs(got - want).max() <= 1e-3 * size
    assert np.linalg.norm(got - want) <= 2e-4 * np.linalg.norm(want - x)


@settings(max_examples=4, deadline=None)
@given(seed=st.integers(0, 1 << 30))
def test_random_layers(seed: int) -> None:
    """Every part of the specification, types of weights and numbers of tokens."""
    check_random_layer(seed)


@pytest.mark.slow
@pytest.mark.long
@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 1 << 30))
def test_many_random_layers(seed: int) -> None:
    check_random_layer(seed)


def check_random_layer(seed: int) -> None:
    rng = random.Random(seed)
    moe, n_embd = random_moe(rng), rng.choice((256, 768))
    names = (rng.choice(TYPES), rng.choice(TYPES), rng.choice(TYPES))
    if rng.random() < 0.7:
        names = (names[0], names[0], names[2])
    spec, layer = random_layer(rng, moe, names, n_embd, halves=rng.random() < 0.5)
    backend = cpu_backend()
    layer = with_each(layer, backend.prepare, as_given)
    n_tokens = rng.choice((1, 1, 2, 3, 5, 9, 17, 40))
    x = np.random.default_rng(seed).standard_normal((n_tokens, n_embd)).astype(np.float32)
    use_threads(rng.choice((1, 2, 3, 8)))
    got = run(backend, spec, layer, x)
    if layers.experts_run(layer.moe):
        check(got, composed(backend, spec, layer, x), x)
    for i in {0, n_tokens // 2, n_tokens - 1}:
        assert np.array_equal(run(backend, spec, layer, x[i : i + 1])[0], got[i])


@pytest.mark.slow
@pytest.mark.parametrize("cpu", [NEHALEM, HASWELL], ids=["128 bits", "AVX2"])
@pytest.mark.long
def test_other_cpus(cpu: dict[str, str]) -> None:
    """In a process that believes to be on one: words of float32 are put together, or of bytes."""
    if not runs_here(cpu):
        pytest.skip("the CPU lacks some instructions")
    tests = "64-8-300 or 128-8-3 or test_all_tokens"
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", tests, __file__],
        env={**os.environ, **cpu},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout
    assert "passed" in result.stdout


def plain_layer(
    name: str, n_experts: int, n_used: int, **changes: Any
) -> tuple[Backend, LayerSpec, LayerWeights]:
    moe = replace(MoeSpec(n_experts, n_used, n_ff=256), **changes)
    rng = random.Random(name)
    spec, layer = random_layer(rng, moe, (name, name, name), 256, halves=False)
    spec = replace(spec, ffn_norm=None, post_ffn_norm=None, parallel=False)
    layer = replace(layer, ffn_norm=None, post_ffn_norm=None)
    if not isinstance(layer.ffn, MoeWeights):
        spec, layer = replace(spec, ffn=moe), replace(layer, ffn=layer.moe)
    backend = cpu_backend()
    return backend, spec, with_each(layer, backend.prepare, as_given)


@pytest.mark.parametrize("name", ["q4_0", "q8_0", "f32"])
@pytest.mark.parametrize(
    ("n_experts", "n_used", "n_tokens"),
    quick(
        [(1, 1, 1), (1, 1, 40), (8, 8, 1), (8, 8, 300), (64, 8, 300), (128, 8, 3), (512, 10, 2)],
        {(1, 1, 1), (8, 8, 1)},
    ),
)
def test_shapes(n_experts: int, n_used: int, n_tokens: int, name: str) -> None:
    """And any number of threads, of which there are more than cores."""
    backend, spec, layer = plain_layer(name, n_experts, n_used)
    x = np.random.default_rng(1).standard_normal((n_tokens, 256)).astype(np.float32)
    results = []
    for n in (1, 2, 3, 8, 64):
        use_threads(n)
        results.append(run(backend, spec, layer, x))
    check(results[0], composed(backend, spec, layer, x), x)
    assert all(np.array_equal(result, results[0]) for result in results)


def test_all_tokens_of_one_expert() -> None:
    """Whatever the router says, its bias says more."""
    backend, spec, layer = plain_layer("q4_0", 16, 1)
    assert layer.moe is not None
    bias = np.zeros(16, np.float32)
    bias[5] = 1000.0
    router = replace(layer.moe.ffn_gate_inp, bias=bias)
    layer = replace(layer, ffn=replace(layer.moe, ffn_gate_inp=router))
    x = np.random.default_rng(1).standard_normal((300, 256)).astype(np.float32)
    got = run(backend, spec, layer, x)
    check(got, composed(backend, spec, layer, x), x)
    assert np.array_equal(run(backend, spec, layer, x[7:8])[0], got[7])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("gating", GATINGS)
def test_rows_that_are_no_numbers_harm_no_others(gating: str, value: float) -> None:
    backend, spec, layer = plain_layer("q4_0", 16, 4, gating=gating)
    x = np.random.default_rng(1).standard_normal((9, 256)).astype(np.float32)
    want = run(backend, spec, layer, x)
    x[4, 100] = value
    got = run(backend, spec, layer, x)
    assert np.isnan(got[4]).all()
    others = [0, 1, 2, 3, 5, 6, 7, 8]
    assert np.array_equal(got[others], want[others])


def test_a_nan_of_the_router_shows() -> None:
    backend, spec, layer = plain_layer("q4_0", 16, 4)
    assert layer.moe is not None
    bias = np.full(16, np.nan, np.float32)
    router = replace(layer.moe.ffn_gate_inp, bias=bias)
    layer = replace(layer, ffn=replace(layer.moe, ffn_gate_inp=router))
    x = np.ones((2, 256), np.float32)
    assert np.isnan(run(backend, spec, layer, x)).all()


def test_what_has_no_kernel_is_composed() -> None:
    """Rows of floats that are no whole number of vectors."""
    backend = cpu_backend()
    router = Linear(random_packed("f32", 4, 40))
    stacks = (random_packed("f32", 4, *shape) for shape in ((24, 40), (24, 40), (40, 24)))
    weights = MoeWeights(router, *stacks)
    moe = MoeSpec(4, 2, n_ff=24)
    spec, layer = LayerSpec(None, moe, None, None), LayerWeights(None, weights, None, None)
    layer = with_each(layer, backend.prepare, as_given)
    assert not layers.experts_run(layer.moe)
    method = backend.methods.experts(layer.moe)
    assert "composed" in method.words
    x = np.random.default_rng(1).standard_normal((3, 40)).astype(np.float32)
    assert np.array_equal(run(backend, spec, layer, x), composed(backend, spec, layer, x))


def routed(logits: np.ndarray, moe: MoeSpec, bias: np.ndarray | None) -> tuple[Any, Any]:
    """Experts and weights of the worker, a token's by expert."""
    n_tokens = len(logits)
    chain = Chain(Scratch())
    scale = Memory(np.array([moe.weights_scale], np.float32), 4)
    routing = add_routing(chain, logits, n_tokens, moe, bias, scale)
    chain.run()
    shape = n_tokens, moe.n_experts_used
    parts = []
    for memory, kind in ((routing.experts, np.int64), (routing.weights, np.float32)):
        start = chain.scratch.address - chain.scratch.data.ctypes.data + memory.where.offset
        part = chain.scratch.data[start : start + memory.n_bytes]
        parts.append(part.view(kind).reshape(shape).copy())
    return tuple(parts)


@pytest.mark.parametrize("gating", GATINGS)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"renormalise": False, "weights_scale": 2.5},
        {"selection_bias": True},
        {"n_groups": 4, "n_groups_used": 2},
        {"n_groups": 12, "n_groups_used": 5, "renormalise": False},
        {"selection_bias": True, "n_groups": 3, "n_groups_used": 1, "weights_scale": 0.5},
    ],
    ids=str,
)
def test_routing(changes: dict[str, Any], gating: Any) -> None:
    """Random logits; equal ones; large ones; infinite ones and NaN."""
    rng = np.random.default_rng(1)
    moe = replace(MoeSpec(12, 3, n_ff=8, gating=gating), **changes)
    logits = (rng.normal(size=(40, 12)) * 3).astype(np.float32)
    logits[10:20] = rng.integers(-1, 2, size=(10, 12))
    logits[20:23] *= 40
    logits[24, 5], logits[25, 3], logits[26, :2] = np.nan, np.inf, -np.inf
    logits[27], logits[28], logits[29, 2:] = np.nan, 0, np.nan
    bias = rng.normal(size=12).astype(np.float32) if moe.selection_bias else None
    experts, weights = routed(logits, moe, bias)
    with np.errstate(all="ignore"):
        want, want_weights = route(logits, moe, bias)
    order = np.argsort(want, axis=1)
    assert np.array_equal(experts, np.take_along_axis(want, order, 1))
    want_weights = np.take_along_axis(want_weights, order, 1)
    np.testing.assert_allclose(weights, want_weights, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("n_tokens", [1, 3])
def test_only_the_experts_of_a_token_are_read(n_tokens: int) -> None:
    """Weights of all others are NaN."""
    backend, spec, layer = plain_layer("f32", 16, 2)
    moe = layer.moe
    assert moe is not None
    x = np.random.default_rng(1).standard_normal((n_tokens, 256)).astype(np.float32)
    want = run(backend, spec, layer, x)
    logits = backend.linear(x, moe.ffn_gate_inp)
    seen = set(route(logits, spec.moe, moe.exp_probs_b)[0].reshape(-1).tolist())
    changes = {}
    for name in ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps", "ffn_gate_up_exps"):
        stack = getattr(moe, name)
        if stack is not None:
            rows = stack.rows.copy()
            rows[[i for i in range(16) if i not in seen]] = 0xFF
            changes[name] = replace(stack, rows=rows)
    layer = replace(layer, ffn=replace(moe, **changes))
    assert np.array_equal(run(backend, spec, layer, x), want)


def test_a_token_runs_through_all_layers_at_once() -> None:
    """Nothing is called between steps; the bits are compared in `test_same_bits.py`."""
    backend = cpu_backend()
    engine = Engine(synthetic_model("moe-tiny", "q4_0", backend), CacheConfig(n_ctx=64))
    engine.evaluate([1, 2, 3])
    engine.evaluate([4], generated=True)
    (kept,) = backend.run_layers.kept.values()  # type: ignore[attr-defined]
    assert len(kept.program.places.stages) == 1


def test_both_blocks_are_fused() -> None:
    backend = cpu_backend()
    assert {MoeSpec, MlpAndMoeSpec} <= set(backend.ffns)
    assert isinstance(backend.ffns[MlpAndMoeSpec], layers.ExpertLayer)
