"""How long a token waits for pages that change their types, without a model's weights.

    python benchmarks/ladder_pauses.py --shape llama-1b --context 8192 --share 0.333

lets a text grow token by token in a cache of a shape's layers, within a share of what an f16 cache
of the context takes. It prints the pages that changed, and the longest wait between two tokens (in
processor time). It also prints which share all waits have of tokens that take `--token-ms`.
"""

from __future__ import annotations

import argparse
import time

from localkv.cache.kv_cache import KVCache
from localkv.cache.ladder import DEFAULT_LADDER, ladder_text, parse_ladder
from localkv.cache.layout import cache_bytes, group_layouts
from localkv.config import CacheConfig
from localkv.kernels.cpu.arrays import NumpyArrays
from localkv.loader.known_models import KNOWN_MODELS


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--shape", choices=KNOWN_MODELS, default="llama-1b")
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--share", type=float, default=1 / 3)
    parser.add_argument("--ladder", default=ladder_text(DEFAULT_LADDER))
    parser.add_argument("--token-ms", type=float, default=30.0)
    options = parser.parse_args()
    groups = KNOWN_MODELS[options.shape].spec.groups
    whole = sum(cache_bytes(group_layouts(CacheConfig(), groups), n_ctx=options.context))
    ladder = parse_ladder(options.ladder)
    config = CacheConfig(
        *ladder[0], n_ctx=options.context, kv_budget=int(options.share * whole), kv_ladder=ladder
    )
    cache = KVCache(group_layouts(config, groups), n_ctx=options.context, arrays=NumpyArrays())
    cache.warm_up_ladder()  # as an engine does before its first text
    for layer in cache.layers:
        for plane in (*layer.segments[0].k, *layer.segments[0].v):
            plane[:: cache.ladder.sizes.units[0]] = 0x3C  # 1.06: numbers, as text has them
    sequence, waits = cache.new_sequence(), list[float]()
    first = 0
    for _ in range(min(options.context, cache.ladder.n_pages * 256)):
        started, before = time.process_time(), cache.requantised.n_pages
        cache.reserve(sequence, sequence.length + 1)
        if cache.requantised.n_pages > before:
            waits.append(time.process_time() - started)
            first = first or sequence.length
        sequence.length += 1
    n_after = sequence.length - first
    print(f"{options.shape}, {sequence.length} tokens within {config.kv_budget >> 20} MiB")
    print(
        f"pages that changed: {cache.requantised.n_pages}, at {len(waits)} tokens, from {first} on"
    )
    print(
        f"wait: at most {1e3 * max(waits):.1f} ms, {1e3 * sum(waits) / len(waits):.1f} on average"
    )
    share = 1e3 * sum(waits) / (n_after * options.token_ms)
    print(f"of the time of tokens since then, {options.token_ms:g} ms each: {100 * share:.2f} %")


if __name__ == "__main__":
    main()
