"""What it costs that an operation has no CPU kernel, next to a like one that has.

    python benchmarks/missing_kernels.py [--threads 2] [--rounds 5] [--json FILE]

Which operations these are, the backend says. For each, on one token and on a prompt of 512: how
many times as long it takes as its counterpart, both in turn, with the median of the rounds.

- products: a 32768x4096 matrix, larger than caches, next to the same shape in Q4_K;
- storing: rows of 8 KV heads of 128 channels that NumPy encodes, next to Q8_0.

`localkv/kernels/cpu/methods.py` has the figures, rounded.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from localkv.arch.ffn_spec import MlpSpec
from localkv.arch.mixer_spec import AttentionParams, AttentionSpec
from localkv.arch.norm_spec import NormSpec
from localkv.arch.spec import LayerSpec, ModelSpec
from localkv.cache.layout import SegmentSpec
from localkv.cache.uniform_cache import uniform_cache
from localkv.formats import FORMATS, KV_FORMATS, WEIGHT_FORMATS
from localkv.formats.packed_tensor import PackedTensor
from localkv.kernels.cpu.arrays import Floats, NumpyArrays
from localkv.kernels.cpu.cpu_backend import cpu_backend
from localkv.kernels.cpu.store.store_kv import store_kv_cpu, store_source
from localkv.kernels.layer_weights import Linear, Norm
from localkv.loader.synthetic import random_rows
from localkv.system.threads import use_threads

N_OUT, N_IN, N_HEADS, HEAD_DIM = 32768, 4096, 8, 128
NORM = NormSpec("norm", "rms", 1e-5)
TOKENS = (1, 512)

Run = Callable[[], object]
random = np.random.default_rng(0)


def normal(*shape: int) -> Floats:
    return random.standard_normal(shape, np.float32)


def matrix(name: str, *shape: int) -> PackedTensor:
    rows = [random_rows(FORMATS[name], *shape[-2:]) for _ in range(shape[0] if shape[2:] else 1)]
    packed = np.stack(rows) if shape[2:] else rows[0]
    return cpu_backend().prepare(PackedTensor(FORMATS[name], packed, shape))


def layer_spec(ffn: MlpSpec) -> LayerSpec:
    return LayerSpec(AttentionSpec(1, 1, 64, 64, AttentionParams(0.125)), ffn, NORM, NORM)


def product(name: str) -> Callable[[int], Run]:
    backend, layer, norm = (
        cpu_backend(),
        Linear(matrix(name, N_OUT, N_IN)),
        Norm(NORM, np.ones(N_IN, np.float32)),
    )

    layers = (layer_spec(MlpSpec(N_IN)),)
    model = ModelSpec("llama", "", N_IN, N_OUT, 512, layers, NORM)

    def of(n_tokens: int) -> Run:
        x = normal(n_tokens, N_IN)
        return lambda: backend.logits(x, norm, layer, model)

    return of


def storing(name: str) -> Callable[[int], Run]:
    cache = uniform_cache(
        NumpyArrays(),
        n_layers=1,
        n_kv_heads=N_HEADS,
        head_dim=HEAD_DIM,
        segments=[SegmentSpec(name, name)],
        n_ctx=2 * TOKENS[-1],
    )

    def of(n_tokens: int) -> Run:
        k, v = normal(2, n_tokens, N_HEADS, HEAD_DIM)
        segments = cache.batch([(cache.new_sequence(), [0] * n_tokens)]).segments
        return lambda: store_kv_cpu(k, v, cache.layers[0], segments)

    return of


def times(slow: Run, fast: Run, rounds: int) -> float:
    """How many times as long `slow` takes, in turn."""
    ratios = []
    for turn in range(-1, rounds):
        seconds = []
        for run in (slow, fast):
            started = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - started)
        if turn >= 0:  # the first compiles
            ratios.append(seconds[0] / seconds[1])
    return statistics.median(ratios)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    options = parser.parse_args()
    use_threads(options.threads)
    methods = cpu_backend().methods
    rows = []
    cases = []
    for fmt in WEIGHT_FORMATS.values():
        if methods.product(matrix(fmt.name, 16, 256)).slowdown:
            cases.append((f"product with {fmt.name}", product(fmt.name), product("q4_K")))
    for fmt in KV_FORMATS.values():
        if store_source(fmt) is None:
            cases.append((f"storing {fmt.name}", storing(fmt.name), storing("q8_0")))
    print("| operation | times as long, 1 token | 512 tokens |\n|---|---|---|")
    for title, slow, fast in cases:
        one, many = (times(slow(n), fast(n), options.rounds) for n in TOKENS)
        print(f"| {title} | {one:.1f} | {many:.1f} |", flush=True)
        rows.append({"operation": title, "1 token": one, "512 tokens": many})
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
