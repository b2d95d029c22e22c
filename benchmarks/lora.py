"""What an adapter of rank 16 costs: tokens and prompts of a model with random weights, in turn.

    python benchmarks/lora.py
    python benchmarks/lora.py --shape llama-1.1b --types q4_0 q8_0 --rank 16 --json FILE

The adapter changes all products of all layers. Tokens with it and without are evaluated in turn, so
that whatever else the machine does comes to both; then prompts. On a machine that does other things
`--threads 1` counts the thread's time on a processor, and not what it waits for.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
from random_model import shape_of

from localkv.config import CacheConfig
from localkv.engine.engine import Engine
from localkv.engine.prefix import Text
from localkv.kernels.cpu.cpu_backend import cpu_backend
from localkv.kernels.layer_weights import Linear
from localkv.kernels.low_rank import Adapters, LowRank, TokenScales
from localkv.loader.adapters import with_products
from localkv.loader.synthetic import RandomTensors
from localkv.loader.tensor_reader import TensorReader
from localkv.loader.weights import model_weights
from localkv.model import AdaptedTransformer, Transformer
from localkv.system.processor import processor_name
from localkv.system.threads import default_threads, n_threads, use_threads

PROMPT = 256


def clock() -> float:
    """Seconds: of this thread alone, if there is no other."""
    return time.thread_time() if n_threads() == 1 else time.perf_counter()


def add_adapter(model: Transformer, rank: int) -> int:
    """Give a model an adapter of random values; its bytes."""
    generator, scales, n_bytes = np.random.default_rng(1), TokenScales(1), 0

    def change(linear: Linear, _: Linear) -> Linear:
        nonlocal n_bytes
        n_out, n_in = linear.weight.shape
        a = generator.standard_normal((rank, n_in), np.float32) / np.float32(n_in**0.5)
        b = generator.standard_normal((n_out, rank), np.float32) / np.float32(10)
        part = LowRank.of(0, a, b, 1.0)
        n_bytes += part.a.nbytes + part.b.nbytes
        return replace(linear, adapters=Adapters((part,), scales))

    layers = with_products(model.weights.layers, model.weights.layers, change)
    weights = replace(model.weights, layers=layers)
    model.adapted = AdaptedTransformer(model.config, weights, model.backend, scales, ())
    model.scales = (0.0,)
    return n_bytes


def tokens(engine: Engine, scale: float) -> Iterator[float]:
    """Seconds of one token after the other."""
    slot = engine.slot
    text = Text([1, 2, 3], 3, salt=int(scale), scales=(scale,))
    slot.take(text, reuses=False)
    slot.logits(text)
    while True:
        text.ids.append(1 + len(text.ids) % 1000)
        started = clock()
        slot.advance(text, 1)
        yield clock() - started


def prompt(engine: Engine, scale: float) -> float:
    """Seconds of a prompt."""
    ids = np.random.default_rng(2).integers(1, 1000, PROMPT).tolist()
    text = Text(ids, PROMPT, scales=(scale,))
    engine.slot.take(text, reuses=False)
    started = clock()
    engine.slot.logits(text)
    return clock() - started


def measured(shape: str, type_name: str, rank: int, n_tokens: int, rounds: int) -> dict[str, float]:
    """Medians of milliseconds, and how much longer the adapter takes."""
    known, backend = shape_of(shape), cpu_backend()
    source = RandomTensors(type_name, 0, known)
    read = TensorReader(source, backend)
    model = Transformer(known.spec, model_weights(read, known.spec), backend)
    n_bytes = add_adapter(model, rank)
    cache = CacheConfig(n_ctx=1024)
    plain, adapted = (Engine(model, cache, n_batch=PROMPT) for _ in range(2))
    both = tokens(plain, 0.0), tokens(adapted, 1.0)
    times = [[next(one) for one in both] for _ in range(n_tokens + 8)][8:]
    ratios = [b / a for a, b in times]
    prompts = [[prompt(plain, 0.0), prompt(adapted, 1.0)] for _ in range(rounds + 1)][1:]
    return {
        "adapter_mib": n_bytes / 2**20,
        "token_ms": 1e3 * statistics.median(a for a, _ in times),
        "adapted_ms": 1e3 * statistics.median(b for _, b in times),
        "least_ms": 1e3 * min(a for a, _ in times),
        "adapted_least_ms": 1e3 * min(b for _, b in times),
        "token_ratio": statistics.median(ratios),
        "prompt_ratio": statistics.median(b / a for a, b in prompts),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", default="llama-1.1b")
    parser.add_argument("--types", nargs="+", default=["q4_0", "q8_0"])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=default_threads())
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    use_threads(options.threads, None)
    found = {"cpu": processor_name(), "shape": options.shape, "rank": options.rank}
    print(f"{options.shape}, rank {options.rank}, {options.threads} threads, {found['cpu']}")
    print("weights   adapter  a token  with it   more   prompt, more")
    for name in options.types:
        row = measured(options.shape, name, options.rank, options.tokens, options.rounds)
        found[name] = row
        token, prompt_more = row["token_ratio"] - 1, row["prompt_ratio"] - 1
        print(
            f"{name:9} {row['adapter_mib']:3.0f} MiB {row['token_ms']:6.1f} ms"
            f" {row['adapted_ms']:6.1f} ms {token:6.1%} {prompt_more:10.1%}"
        )
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
