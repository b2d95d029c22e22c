"""Speed of the CPU's products with packed weights, next to torch's bfloat16 product.

    python benchmarks/cpu_linear.py [--types q4_0 q8_0 ...] [--threads 2] [--rounds 6]
        [--json FILE]

For each type and shape: GB/s of weights with 1 and 4 tokens, GFLOP/s with 512. Weights of several
hundred MB take turns, so that none is in a cache. Times are the best of all rounds; on a machine
with other work, `--threads 1` counts this thread's own time only.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch

from localkv.kernels.cpu.linear.products import CpuProducts
from localkv.quant_formats import FORMATS
from localkv.quant_formats.packed_tensor import PackedTensor
from localkv.system.threads import use_threads

N_OUT = 8192
TYPES = ("q4_0", "q8_0", "q4_K", "q6_K", "q5_K", "q5_0", "q5_1", "q4_1", "iq4_nl", "f16")
WEIGHT_BYTES = 256 << 20


def random_weight(name: str, n_in: int) -> PackedTensor:
    """Any bytes will do: the kernels do not look at what they multiply."""
    fmt = FORMATS[name]
    generator = np.random.default_rng(0)
    size = (N_OUT, fmt.row_bytes(n_in))
    rows = generator.integers(64, size=size, dtype=np.uint8)
    return PackedTensor(fmt, rows, (N_OUT, n_in))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--types", nargs="+", default=TYPES, choices=TYPES)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    use_threads(options.threads)
    clock = time.thread_time if options.threads == 1 else time.perf_counter
    rows = []
    print("type    n_in   1 token GB/s   4 tokens GB/s   512 tokens GFLOP/s")
    for n_in in (2048, 8192):
        for name in (*options.types, "torch"):
            products = CpuProducts()
            if name == "torch":
                matrix = torch.randn(N_OUT, n_in, dtype=torch.bfloat16)
                n_bytes = matrix.nbytes
                weights = [matrix.clone() for _ in range(max(2, WEIGHT_BYTES // n_bytes))]
                multiply = lambda x, w: x.bfloat16() @ w.T  # noqa: E731
            else:
                weight = random_weight(name, n_in)
                n_bytes = weight.n_bytes
                weights = [products.prepare(weight) for _ in range(max(2, WEIGHT_BYTES // n_bytes))]
                multiply = lambda x, w: products.matmul(x.numpy(), w)  # noqa: B023, E731
            best = {1: np.inf, 4: np.inf, 512: np.inf}
            for n_tokens in best:
                x = torch.randn(n_tokens, n_in)
                for _ in range(options.rounds):
                    for w in weights if n_tokens < 512 else weights[:1]:
                        started = clock()
                        multiply(x, w)
                        best[n_tokens] = min(best[n_tokens], clock() - started)
            one, four = (n_bytes / best[n] / 1e9 for n in (1, 4))
            gflops = 2 * 512 * N_OUT * n_in / best[512] / 1e9
            print(f"{name:6} {n_in:5}  {one:13.1f}  {four:14.1f}  {gflops:19.0f}", flush=True)
            figures = {"1 token GB/s": one, "4 tokens GB/s": four, "512 tokens GFLOP/s": gflops}
            rows.append({"type": name, "n_in": n_in, "threads": options.threads, **figures})
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
