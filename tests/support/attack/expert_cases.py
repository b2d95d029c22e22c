"""Random layers with routed experts on guarded memory; see `kernel_cases.py`."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from localkv.kernels.cpu.cpu_backend import cpu_backend
from localkv.kernels.cpu.layers.layer import ExpertLayer
from localkv.quant_formats.packed_tensor import PackedTensor
from localkv.system.threads import use_threads
from support.guarded_memory import GuardedMemory
from support.random_experts import TYPES, random_layer, random_moe, with_each


def expert_case(rng: random.Random, memory: GuardedMemory, say: Callable[[str], None]) -> None:
    """A block with experts, and the same put together from products."""
    moe, n_embd = random_moe(rng), rng.choice((256, 512))
    names = (rng.choice(TYPES), rng.choice(TYPES), rng.choice(TYPES))
    n_tokens, n_threads = rng.choice((1, 1, 2, 3, 5, 9, 17, 40)), rng.choice((1, 1, 2, 3, 8))
    use_threads(n_threads)
    say(f"{moe} {names} x {n_embd}, {n_tokens} tokens, threads {n_threads}")
    spec, layer = random_layer(rng, moe, names, n_embd, halves=rng.random() < 0.5)
    backend = cpu_backend()

    def prepared(weight: PackedTensor) -> PackedTensor:
        rows = memory.array(weight.rows, f"rows of {weight.format.name}")
        return backend.prepare(replace(weight, rows=rows))

    layer = with_each(layer, prepared, lambda x: memory.array(x, "a vector"))
    values = np.random.default_rng(rng.randrange(1 << 30)).standard_normal((2, n_tokens, n_embd))
    x, before = (memory.array(rows.astype(np.float32), "rows") for rows in values)
    operation = backend.ffns[type(spec.ffn)]
    assert isinstance(operation, ExpertLayer)
    for _ in range(2):
        got = operation(x, before, layer, spec)
        assert not np.isnan(got).any(), "an output was not written, or scratch was read"
    want = operation.composed[type(spec.ffn)](x, before, layer, spec)
    assert np.linalg.norm(got - want) <= 2e-4 * np.linalg.norm(want - x)
