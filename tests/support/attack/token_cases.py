"""All layers for one token as one chain, in guarded memory."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from localkv.cache.layout import SegmentSpec, Tail
from localkv.kernels.backend import run_one_by_one
from localkv.kernels.cpu.cpu_backend import cpu_backend
from localkv.loader.synthetic import synthetic_model
from localkv.model import Transformer
from support.cache_types import GROUPED_PAIRS, PAIRS
from support.forward import new_cache
from support.guarded_memory import GuardedMemory
from support.latent_layers import any_options, check_latents
from support.tail_checks import segments as tail_rows


def token_case(rng: random.Random, memory: GuardedMemory, say: Callable[[str], None]) -> None:
    """A few tokens, with the bits of layers that run one by one."""
    shape = rng.choice(("llama-tiny", "moe-tiny"))
    weights = rng.choice(("q4_0", "q8_0", "f16", "q4_K"))
    turn, pair = rng.choice((0, 32)), rng.choice((*PAIRS, *GROUPED_PAIRS))
    specs = [SegmentSpec(*pair, 0, turn, turn)]
    if pair in GROUPED_PAIRS:
        specs = list(tail_rows(Tail(rng.choice((0, 3)), rng.choice((0, 2)), 32), *pair, turn))
    say(f"{shape} {weights}, {specs}")
    model = synthetic_model(shape, weights, cpu_backend())
    ids = [rng.randrange(90) for _ in range(9 if len(specs) == 1 else 40)]
    results = []
    for backend in (model.backend, replace(model.backend, run_layers=run_one_by_one)):
        one = Transformer(model.config, model.weights, backend)
        cache = new_cache(one, *specs, n_ctx=256)
        sequence, out = cache.new_sequence(), list[np.ndarray]()
        for part in (ids[:5], *([token] for token in ids[5:])):
            batch = cache.batch([(sequence, part)], generated=len(part) == 1)
            out.append(one.forward(batch, cache).copy())
            sequence.length += len(part)
        results.append(np.concatenate(out))
    assert np.isfinite(results[0]).all()
    assert results[0].tobytes() == results[1].tobytes()


def latent_case(rng: random.Random, memory: GuardedMemory, say: Callable[[str], None]) -> None:
    """Latent attention, as chains and as composed."""
    options = any_options(rng)
    say(str(options))
    check_latents(options, cpu_backend())
