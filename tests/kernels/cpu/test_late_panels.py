"""Panels that are made while a model is in use: no bit of a product depends on which are there."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from localkv.arch.spec import MoeSpec
from localkv.config import CacheConfig
from localkv.engine.engine import Engine
from localkv.kernels.cpu.cpu_backend import cpu_backend
from localkv.kernels.cpu.linear.late_panels import TOKENS_TO_LAY, LateTensor
from localkv.kernels.cpu.linear.products import Product, add_products
from localkv.kernels.cpu.runtime.chain import Chain, Scratch
from localkv.kernels.layer_weights import LayerWeights, tensors_of
from localkv.loader.gguf_file import GGUFFile
from localkv.loader.weights import load_model
from support.cpu_ops import TensorProducts
from support.quick import quick
from support.random_experts import as_given, random_layer, with_each
from support.random_model import GGMLType, variant
from support.random_packed import random_packed

TYPES = ("q4_0", "q5_0", "q6_K", "q3_K", "iq1_m", "mxfp4", "nvfp4")


@pytest.mark.parametrize("name", quick(TYPES, TYPES[:3]))
@pytest.mark.parametrize("n_tokens", [1, 3, 30])
def test_products(name: str, n_tokens: int) -> None:
    """None, some and all panels are made; the rows are given back once, and then not read."""
    n_out, n_in = 16 * 9 + 5, 768
    weight, released = random_packed(name, n_out, n_in), []
    products = TensorProducts()
    x = torch.randn(n_tokens, n_in)
    want = products.matmul(x, products.prepare(weight))
    late = products.prepare(weight, lambda: released.append(1))
    assert isinstance(late, LateTensor)
    products.late.begin()
    for n_laid in (0, 1, 8, 9, 10):
        assert not released
        late.made.lay(n_laid - (10 - late.made.n_missing))
        assert torch.equal(products.matmul(x, late), want)
    products.late.finish()
    assert released == [1]
    assert not late.reads_rows
    late.rows[:] = 0
    assert torch.equal(products.matmul(x, late), want)


@pytest.mark.parametrize("n_tokens", [1, 20])
def test_several_in_a_step(n_tokens: int) -> None:
    """Matrices whose panels are there, missing and made before, with what is added."""
    products, scratch = TensorProducts(), Scratch()
    weights = [random_packed("q4_K", n_out, 512) for n_out in (40, 16 * 20, 7)]
    x = np.random.default_rng(1).standard_normal((n_tokens, 512)).astype(np.float32)
    late = [products.prepare(weight, lambda: None) for weight in weights[:2]]
    prepared = [*late, products.prepare(weights[2])]
    first = late[0]
    assert isinstance(first, LateTensor)
    first.made.lay(2)
    outs = [np.zeros((n_tokens, weight.shape[0]), np.float32) for weight in weights]
    bias = np.arange(320, dtype=np.float32)
    chain = Chain(scratch)
    addends = [None, bias, None]
    each = zip(prepared, outs, addends, strict=True)
    add_products(chain, x, n_tokens, [Product(*each_one) for each_one in each])
    chain.run()
    for weight, out, addend in zip(weights, outs, addends, strict=True):
        want = products.matmul(torch.from_numpy(x), products.prepare(weight)).numpy()
        assert np.array_equal(out, want if addend is None else want + addend)


@pytest.mark.parametrize("n_tokens", [1, 40])
@pytest.mark.parametrize("name", ["q4_0", "q4_K"])
def test_experts(name: str, n_tokens: int) -> None:
    """Experts of a token are multiplied, whose panels are there or not."""
    backend, rng = cpu_backend(), random.Random(name)
    assert backend.late is not None
    moe = MoeSpec(7, 3, n_ff=256)
    spec, layer = random_layer(rng, moe, (name, name, name), 256, halves=False)
    x = np.random.default_rng(1).standard_normal((n_tokens, 256)).astype(np.float32)

    def run(layer: LayerWeights) -> np.ndarray:
        out: np.ndarray = backend.ffns[type(spec.ffn)](x, x, layer, spec)
        return out

    prepare_late = partial(backend.late.prepare, release=lambda: None)
    want = run(with_each(layer, backend.prepare, as_given))
    late = with_each(layer, prepare_late, as_given)
    assert np.array_equal(run(late), want)
    for tensor in tensors_of(late):
        if isinstance(tensor, LateTensor):
            tensor.made.lay(tensor.made.n_missing * 4 // 7 + 1)
    assert np.array_equal(run(late), want)
    backend.late.finish()
    assert np.array_equal(run(late), want)


def test_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first evaluation makes none, a generated token a sixteenth of them, a prompt all."""
    path = variant("llama-moe", n_embd=64).write(tmp_path / "model.gguf", GGMLType.Q4_0)
    released = list[str]()
    monkeypatch.setattr(GGUFFile, "release", lambda gguf, name: released.append(name))
    engines = [
        Engine(load_model(path, cpu_backend(), late=late)[0], CacheConfig(n_ctx=256))
        for late in (False, True)
    ]
    tensors = [x for x in tensors_of(engines[1].model.weights) if isinstance(x, LateTensor)]
    assert len(tensors) > 8
    released.clear()
    for engine in engines:
        engine.warm_up()
        assert engine.model.backend.late is not None
        engine.model.backend.late.begin()
    n_all = sum(tensor.made.n_missing for tensor in tensors)

    def check(*ids: int, generated: bool) -> int:
        """Both say the same; the panels that are missing."""
        want, got = (engine.evaluate(ids, generated=generated) for engine in engines)
        assert np.array_equal(got, want)
        return sum(tensor.made.n_missing for tensor in tensors)

    assert check(*range(30), generated=False) == n_all
    left = [check(token, generated=True) for token in range(TOKENS_TO_LAY)]
    assert n_all > left[0] > left[4] > left[-2]
    assert left[-1] == 0
    assert len(released) == len(tensors)
    assert not any(tensor.reads_rows for tensor in tensors)
    assert check(3, 4, 5, generated=False) == 0
