"""Attention of one layer on the CPU, by types of K and V and depth: ours and torch's.

    python benchmarks/cpu_attention.py --pairs f16/f16,q8_0/q8_0,q4_0/q8_0 --threads 2 [--json FILE]
    python benchmarks/cpu_attention.py --depths 1024,8192,32768 --only decode

Decode is one new token, prefill 512, after `depth` tokens. Layers are gone through in turn, so
that the cache of one has left the processor's caches when it is read again. Sixteen layers do, if a
core's share of the last cache is a few MB. All methods take turns, and what is printed is each
one's shortest time: other programs only make it longer.

Types that pack several tokens together have their tail in f16, and types of less than 4 bits their
sink, as they have them in a model; nothing is rotated. What ours takes then is attention in each
segment, and merging their outputs.

GB/s are packed bytes of K and V, and after them stands their share of the memory's bandwidth, which
all threads read plainly before and after. After a pair's depths comes what 1,000 more tokens of
context cost, from the smallest depth to the largest, in us, and next to the first pair.

GFLOP/s count two products. `reference` is `attention_reference`, which decodes all pages with
torch. `sdpa` is torch's scaled_dot_product_attention on K and V that already are float32: it stands
for a cache that is not packed at all. Without prefill neither is timed.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from localkv.arch.spec import AttentionParams, AttentionSpec, CacheGroup
from localkv.bench.result import bandwidth
from localkv.cache.arrays import Array, Batch, LayerCache, SegmentBatch
from localkv.cache.kv_cache import KVCache, uniform_cache
from localkv.cache.layout import cache_segments
from localkv.config import CacheConfig
from localkv.kernels.attention import (
    Merge,
    SegmentAttention,
    attention,
    merge_segments,
    pack_groups,
    store_rotated,
)
from localkv.kernels.backend import Backend
from localkv.kernels.cpu.arrays import NumpyArrays
from localkv.kernels.cpu.attention.packed_attention import PackedAttention
from localkv.kernels.cpu.cpu_backend import cpu_backend
from localkv.kernels.cpu.layers.attention import AttentionLayer
from localkv.kernels.cpu.layers.chains import LayerChains
from localkv.kernels.cpu.runtime.chain import Scratch
from localkv.kernels.cpu.store.store_kv import store_kv_cpu
from localkv.kernels.reference.backend import attention_reference, store_kv
from localkv.kernels.reference.backend import pack_groups as pack_groups_plain
from localkv.kernels.reference.torch_arrays import TorchArrays
from localkv.quant_formats import KV_FORMATS
from localkv.system.threads import n_threads, use_threads

PROMPT = 512
STEP = 1024
"""Rows that are stored at once."""
TORCH_LAYERS = 4
"""Unpacked layers are large enough for fewer to do."""


def filled(
    args: argparse.Namespace, types: tuple[str, str], depth: int, n_new: int, plain: bool
) -> tuple[KVCache, Batch]:
    """A cache whose layers hold `depth` random rows, and a batch of new tokens, stored too."""
    group = CacheGroup(args.kv_heads, args.head_dim, args.head_dim, 0, (0,))
    config = CacheConfig(*types, n_ctx=depth + n_new, kv_rotation="off")
    cache = uniform_cache(
        TorchArrays() if plain else NumpyArrays(),
        n_layers=args.layers,
        n_kv_heads=args.kv_heads,
        head_dim=args.head_dim,
        segments=cache_segments(config, group),
        n_ctx=depth + n_new,
    )
    sequence = cache.new_sequence()
    store = store_plain if plain else store_kv_cpu
    first, *others = cache.layers
    steps = [STEP] * (depth // STEP) + [depth % STEP, n_new]
    for n_tokens in filter(None, steps):
        batch = cache.batch([(sequence, [0] * n_tokens)], generated=n_tokens == 1)
        rows = torch.randn(n_tokens, args.kv_heads, args.head_dim)
        rows = rows if plain else rows.numpy()
        store(rows, rows, first, batch.segments)
        sequence.length += n_tokens
    for layer in others:
        for copy, original in zip(layer.segments, first.segments, strict=True):
            for to, plane in zip((*copy.k, *copy.v), (*original.k, *original.v), strict=True):
                to[...] = plane
    sequence.length = depth
    return cache, batch


def store_plain(k: Tensor, v: Tensor, cache: LayerCache, rows: tuple[SegmentBatch, ...]) -> None:
    """Store rows and pack the groups that they complete, in torch."""
    store_rotated(store_kv, unrotated, k, v, cache, rows)
    pack_groups(pack_groups_plain, cache, rows)


def unrotated(x: Array, block: int) -> Array:
    return x


def packed_call(
    run: SegmentAttention, cache: KVCache, batch: Batch, q: Array, merge: Merge = merge_segments
) -> Callable[[int], object]:
    def call(layer: int) -> object:
        params = AttentionParams(0.125)
        return attention(run, q, cache.layers[layer], batch, params, rotate=unrotated, merge=merge)

    return call


def sdpa_call(args: argparse.Namespace, q: Tensor, depth: int) -> Callable[[int], object]:
    n_new = q.shape[0]
    shape = (TORCH_LAYERS, 1, args.kv_heads, depth + n_new, args.head_dim)
    k, v = torch.randn(shape), torch.randn(shape)
    queries = q.transpose(0, 1)[None]
    mask = None
    if n_new > 1:
        mask = torch.ones(n_new, depth + n_new, dtype=torch.bool).tril(depth)

    def call(layer: int) -> object:
        return torch.nn.functional.scaled_dot_product_attention(
            queries,
            k[layer % len(k)],
            v[layer % len(v)],
            attn_mask=mask,
            scale=0.125,
            enable_gqa=True,
        )

    return call


def shortest(
    calls: dict[str, Callable[[int], object]], n_layers: int, rounds: int
) -> dict[str, float]:
    """Seconds per layer of each call, which take turns: the least of all rounds."""
    best = dict.fromkeys(calls, float("inf"))
    for call in calls.values():
        call(0)
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            for layer in range(n_layers):
                call(layer)
            best[name] = min(best[name], (time.perf_counter() - start) / n_layers)
    return best


def read_bandwidth(backend: Backend) -> float:
    """GB/s of a plain read by all threads."""
    return bandwidth(backend) / 1e9


@dataclass
class Table:
    """What is printed, and kept for the file."""

    args: argparse.Namespace
    memory: float
    rows: list[dict[str, Any]] = field(default_factory=list)
    costs: dict[str, float] = field(default_factory=dict)

    def head(self) -> None:
        args = self.args
        print(f"{args.kv_heads} KV heads of {args.head_dim}, {args.group} queries each, ", end="")
        print(f"{args.threads} threads; bandwidth of the memory: {self.memory:.1f} GB/s")
        with_prefill = args.only != "decode"
        others, prefill = f"{'reference':>10}{'sdpa f32':>10}", ""
        if with_prefill:
            prefill = f"     |{'ours':>9}{'GFLOP/s':>9}{others}"
            print(f"{'':20}| decode us{'':36}| prefill {PROMPT}, ms")
        print(f"{'K/V':14}{'depth':>6}|{'us':>8}{'GB/s':>6}{'share':>6}", end="")
        print(others + prefill if with_prefill else "")

    def bytes_per_token(self, pair: str) -> int:
        args = self.args
        names = pair.split("/")
        return args.kv_heads * sum(KV_FORMATS[name].row_bytes(args.head_dim) for name in names)

    def decode(self, pair: str, depth: int, best: dict[str, float]) -> None:
        us = {name: seconds * 1e6 for name, seconds in best.items()}
        rate = (depth + 1) * self.bytes_per_token(pair) / best["ours"] / 1e9
        self.keep(pair, depth, 1, best, {"GB/s": rate})
        print(f"{pair:14}{depth:6}|{us.pop('ours'):8.0f}{rate:6.1f}", end="")
        print(f"{rate / self.memory:6.0%}", end="")
        print("".join(f"{x:10.0f}" for x in us.values()), end="" if us else "\n", flush=True)

    def prefill(self, pair: str, depth: int, best: dict[str, float]) -> None:
        args = self.args
        flops = 4 * args.kv_heads * args.group * args.head_dim * PROMPT
        flops = flops * (depth + (PROMPT + 1) / 2) / best["ours"] / 1e9
        self.keep(pair, depth, PROMPT, best, {"GFLOP/s": flops})
        ours, *others = (seconds * 1e3 for seconds in best.values())
        print(f"     |{ours:9.1f}{flops:9.0f}" + "".join(f"{x:10.1f}" for x in others))

    def keep(
        self, pair: str, depth: int, n_new: int, best: dict[str, float], rates: dict[str, float]
    ) -> None:
        row = {"pair": pair, "depth": depth, "new tokens": n_new, "seconds": best, **rates}
        self.rows.append(row)

    def cost_of_context(self, pair: str) -> None:
        """Print what 1,000 more tokens cost, from the smallest depth to the largest."""
        times = {
            row["depth"]: row["seconds"]["ours"]
            for row in self.rows
            if row["pair"] == pair and row["new tokens"] == 1
        }
        if len(times) < 2:
            return
        least, most = min(times), max(times)
        cost = (times[most] - times[least]) / (most - least)
        self.costs[pair] = cost
        first, first_cost = next(iter(self.costs.items()))
        rate = self.bytes_per_token(pair) / cost / 1e9
        print(f"{pair:14} +1000|{cost * 1e9:8.1f}{rate:6.1f}{rate / self.memory:6.0%}", end="")
        print(f"   {cost / first_cost:.2f} of {first}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--pairs", default="f16/f16,q8_0/q8_0,q8_0/q4_0,q4_0/q4_0")
    parser.add_argument("--depths", default="1024,4096,16384")
    parser.add_argument("--threads", type=int, default=n_threads())
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--group", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=("decode", "all"), default="all")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    use_threads(args.threads)
    torch.manual_seed(0)
    backend = cpu_backend()
    table = Table(args, read_bandwidth(backend))
    table.head()
    ours = PackedAttention()
    merge = AttentionLayer(LayerChains(Scratch()), backend.mixers[AttentionSpec], ours).merged
    for pair in args.pairs.split(","):
        type_k, type_v = pair.split("/")
        for depth in map(int, args.depths.split(",")):
            for n_new in (1, PROMPT) if args.only == "all" else (1,):
                q = torch.randn(n_new, args.kv_heads * args.group, args.head_dim)
                make = functools.partial(filled, args, (type_k, type_v), depth, n_new)
                calls = {"ours": packed_call(ours, *make(plain=False), q.numpy(), merge)}
                if args.only == "all":
                    calls["reference"] = packed_call(attention_reference, *make(plain=True), q)
                    calls["sdpa"] = sdpa_call(args, q, depth)
                rounds = args.rounds if n_new > 1 else 4 * args.rounds
                best = shortest(calls, 1 if n_new > 1 else args.layers, rounds)
                show = table.decode if n_new == 1 else table.prefill
                show(pair, depth, best)
        table.cost_of_context(pair)
    print(f"bandwidth of the memory: {read_bandwidth(backend):.1f} GB/s")
    if args.json:
        names = ("kv_heads", "group", "head_dim", "layers", "threads")
        shape = {name: getattr(args, name) for name in names}
        figures = {**shape, "bandwidth": table.memory, "rows": table.rows}
        args.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
