"""The logits of generated tokens: in the chain of their layers, against layers one by one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from localkv.config import CacheConfig
from localkv.engine.engine import Engine
from localkv.kernels.backend import run_one_by_one
from localkv.kernels.cpu.cpu_backend import cpu_backend
from localkv.loader.synthetic import synthetic_model
from localkv.model import Transformer


@pytest.mark.parametrize("in_chain", [True, False], ids=["in the chain", "by themselves"])
def test_logits_of_a_token(in_chain: bool) -> None:
    """Alone and three together, with a scale and a cap of logits; also where no chain has the last
    product."""
    backend = cpu_backend()
    model = synthetic_model("llama-tiny", "f16", backend)
    config = replace(model.config, logit_scale=0.5, logit_softcap=30.0)
    output = model.weights.output
    weight = replace(output.weight, halves_activations=not in_chain)
    weights = replace(model.weights, output=replace(output, weight=weight))
    results = []
    for each in (backend, replace(backend, run_layers=run_one_by_one)):
        engine = Engine(Transformer(config, weights, each), CacheConfig(n_ctx=64))
        engine.evaluate([1, 2, 3])
        parts = [4], [5], [6, 7, 8], [9, 1, 2]
        tokens = [engine.evaluate(part, "all", generated=True) for part in parts]
        results.append([logits.tobytes() for logits in tokens])
    assert results[0] == results[1]
    kept = backend.run_layers.kept.values()  # type: ignore[attr-defined]
    assert [one.program.places.n_tokens for one in kept] == [1, 3]
    assert [one.program.head is not None for one in kept] == [in_chain] * 2
