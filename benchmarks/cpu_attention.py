"""Attention of one layer on the CPU, by types of K and V and depth: ours and torch's.

    python benchmarks/cpu_attention.py --pairs f16/f16,q8_0/q8_0,q4_0/q8_0 --threads 2 [--json FILE]

Decode is one new token, prefill 512, after `depth` tokens. Layers are gone through in turn, so
that the cache of one has left the processor's caches when it is read again. All methods take
turns, and what is printed is each one's shortest time: other programs only make it longer.

GB/s are packed bytes of K and V, GFLOP/s count two products. `reference` is
`attention_reference`, which decodes all pages with torch; `sdpa` is torch's
scaled_dot_product_attention on K and V that already are float32, so it stands for a cache that is
not packed at all.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from localkv.arch.mixer_spec import AttentionParams
from localkv.cache.arrays import Array
from localkv.cache.batch import Batch
from localkv.cache.kv_cache import KVCache
from localkv.cache.layout import SegmentSpec
from localkv.cache.uniform_cache import uniform_cache
from localkv.formats import KV_FORMATS
from localkv.kernels.cpu.arrays import NumpyArrays
from localkv.kernels.cpu.attention.packed_attention import PackedAttention
from localkv.kernels.cpu.store.store_kv import store_kv_cpu
from localkv.kernels.reference.attention import attention_reference
from localkv.kernels.reference.store_kv import store_kv
from localkv.kernels.reference.torch_arrays import TorchArrays
from localkv.system.threads import n_threads, use_threads

PROMPT = 512


def filled(
    args: argparse.Namespace, types: tuple[str, str], depth: int, n_new: int, plain: bool
) -> tuple[KVCache, Batch]:
    """A cache whose layers hold `depth` random rows, and a batch of new tokens, stored too."""
    cache = uniform_cache(
        TorchArrays() if plain else NumpyArrays(),
        n_layers=args.layers,
        n_kv_heads=args.kv_heads,
        head_dim=args.head_dim,
        segments=[SegmentSpec(*types)],
        n_ctx=depth + n_new,
    )
    sequence = cache.new_sequence()
    store = store_kv if plain else store_kv_cpu
    for n_tokens in filter(None, (depth, n_new)):
        batch = cache.batch([(sequence, [0] * n_tokens)], generated=n_tokens == 1)
        for layer in cache.layers:
            rows = torch.randn(n_tokens, args.kv_heads, args.head_dim)
            rows = rows if plain else rows.numpy()
            store(rows, rows, layer, batch.segments)
        sequence.length += n_tokens
    sequence.length = depth
    return cache, batch


def packed_call(
    run: Callable[..., object], cache: KVCache, batch: Batch, q: Array
) -> Callable[[int], object]:
    def call(layer: int) -> object:
        segment = cache.layers[layer].segments[0]
        return run(q, segment, batch.segments[0], batch, AttentionParams(0.125))

    return call


def sdpa_call(args: argparse.Namespace, q: Tensor, depth: int) -> Callable[[int], object]:
    n_new = q.shape[0]
    shape = (args.layers, 1, args.kv_heads, depth + n_new, args.head_dim)
    k, v = torch.randn(shape), torch.randn(shape)
    queries = q.transpose(0, 1)[None]
    mask = None
    if n_new > 1:
        mask = torch.ones(n_new, depth + n_new, dtype=torch.bool).tril(depth)

    def call(layer: int) -> object:
        return torch.nn.functional.scaled_dot_product_attention(
            queries, k[layer], v[layer], attn_mask=mask, scale=0.125, enable_gqa=True
        )

    return call


def shortest(calls: dict[str, Callable[[int], object]], n_layers: int, rounds: int) -> list[float]:
    """Seconds per layer of each call, which take turns."""
    best = dict.fromkeys(calls, float("inf"))
    for call in calls.values():
        call(0)
    for _ in range(rounds):
        for name, call in calls.items():
            for layer in range(n_layers):
                start = time.perf_counter()
                call(layer)
                best[name] = min(best[name], time.perf_counter() - start)
    return list(best.values())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--pairs", default="f16/f16,q8_0/q8_0,q4_0/q8_0,q4_0/q4_0")
    parser.add_argument("--depths", default="0,4096,16384")
    parser.add_argument("--threads", type=int, default=n_threads())
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--group", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    use_threads(args.threads)
    torch.manual_seed(0)
    n_heads = args.kv_heads * args.group
    print(f"{args.kv_heads} KV heads of {args.head_dim}, {args.group} queries each, ", end="")
    print(f"{args.threads} threads")
    print(f"{'':20}| decode us{'':30}| prefill {PROMPT}, ms")
    print(f"{'K/V':14}{'depth':>6}|", end="")
    print(f"{'ours':>8}{'GB/s':>6}{'reference':>10}{'sdpa f32':>10}     |", end="")
    print(f"{'ours':>9}{'GFLOP/s':>9}{'reference':>10}{'sdpa f32':>10}")
    ours = PackedAttention()
    rows = []
    for pair in args.pairs.split(","):
        type_k, type_v = pair.split("/")
        for depth in map(int, args.depths.split(",")):
            print(f"{pair:14}{depth:6}|", end="", flush=True)
            for n_new in (1, PROMPT):
                q = torch.randn(n_new, n_heads, args.head_dim)
                make = functools.partial(filled, args, (type_k, type_v), depth, n_new)
                calls = {
                    "ours": packed_call(ours, *make(plain=False), q.numpy()),
                    "reference": packed_call(attention_reference, *make(plain=True), q),
                    "sdpa": sdpa_call(args, q, depth),
                }
                rounds = args.rounds if n_new > 1 else 10 * args.rounds
                best = shortest(calls, 1 if n_new > 1 else args.layers, rounds)
                row_bytes = sum(
                    KV_FORMATS[name].row_bytes(args.head_dim) for name in (type_k, type_v)
                )
                n_bytes = (depth + n_new) * args.kv_heads * row_bytes
                flops = 4 * n_heads * args.head_dim * n_new * (depth + (n_new + 1) / 2)
                rows.append(
                    {
                        "pair": pair,
                        "depth": depth,
                        "new tokens": n_new,
                        "seconds": dict(zip(calls, best, strict=True)),
                        "GB/s": n_bytes / best[0] / 1e9,
                        "GFLOP/s": flops / best[0] / 1e9,
                    }
                )
                if n_new == 1:
                    us = [seconds * 1e6 for seconds in best]
                    print(f"{us[0]:8.0f}{n_bytes / best[0] / 1e9:6.1f}", end="")
                    print(f"{us[1]:10.0f}{us[2]:10.0f}     |", end="", flush=True)
                else:
                    ms = [seconds * 1e3 for seconds in best]
                    print(f"{ms[0]:9.1f}{flops / best[0] / 1e9:9.0f}{ms[1]:10.1f}{ms[2]:10.1f}")
    if args.json:
        shape = {name: getattr(args, name) for name in ("kv_heads", "group", "head_dim", "threads")}
        args.json.write_text(json.dumps({**shape, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
