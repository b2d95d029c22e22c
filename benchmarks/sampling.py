"""The time to draw a token, by chain of samplers and size of the vocabulary.

    python benchmarks/sampling.py --json FILE

Milliseconds, the median of many draws. *flat* logits are normal with a deviation of 3, so that a
nucleus holds thousands of tokens; *peaked* ones are like a model's, whose 50 best tokens hold
nearly everything. The text before has 4,096 tokens, which the penalties look back on.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import numpy as np

from localkv.sampling.params import SamplingParams
from localkv.sampling.sampler import Sampler

N_TEXT = 4096

CHAINS: dict[str, dict[str, object]] = {
    "greedy": {"temperature": 0.0},
    "default": {},
    "default, top_k 0": {"top_k": 0},
    "none": {"samplers": ()},
    "temperature": {"samplers": ("temperature",)},
    "top_k 40": {"samplers": ("top_k",)},
    "top_p 0.95": {"samplers": ("top_p",)},
    "min_p 0.05": {"samplers": ("min_p",)},
    "typ_p 0.9": {"samplers": ("typ_p",), "typ_p": 0.9},
    "xtc 1.0": {"samplers": ("xtc",), "xtc_probability": 1.0},
    "top_n_sigma 1": {"samplers": ("top_n_sigma",), "top_n_sigma": 1.0},
    "dynatemp 0.5": {"samplers": ("temperature",), "dynatemp_range": 0.5},
    "penalties 64": {"samplers": ("penalties",), "repeat_penalty": 1.1},
    "penalties -1": {"samplers": ("penalties",), "repeat_penalty": 1.1, "repeat_last_n": -1},
    "dry 0.8": {"samplers": ("dry",), "dry_multiplier": 0.8},
    "logit_bias": {"samplers": (), "logit_bias": {5: 1.0, 9: -np.inf}},
}


def rows(n_vocab: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    flat = random.normal(0, 3, n_vocab)
    peaked = random.normal(0, 2, n_vocab)
    peaked[random.choice(n_vocab, 50, replace=False)] += np.linspace(3, 14, 50)
    return {"flat": flat.astype(np.float32), "peaked": peaked.astype(np.float32)}


def milliseconds(sampler: Sampler, logits: np.ndarray, draws: int) -> float:
    """The median time to draw a token and to take note of one, another one each time."""
    times = []
    for number in range(draws + 2):
        started = time.perf_counter()
        sampler.sample(logits)
        sampler.accept(number % 7)
        times.append(time.perf_counter() - started)
    return 1000 * statistics.median(times[2:])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--vocabulary", type=int, nargs="+", default=[32_000, 128_256, 262_144])
    parser.add_argument("--draws", type=int, default=31)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    columns = [f"{kind} {n}" for n in options.vocabulary for kind in ("flat", "peaked")]
    print("| ms | " + " | ".join(columns) + " |\n|---|" + "---:|" * len(columns))
    figures = {}
    for name, chain in CHAINS.items():
        found = {}
        for n_vocab in options.vocabulary:
            text = np.random.default_rng(1).integers(n_vocab, size=N_TEXT).tolist()
            for kind, logits in rows(n_vocab).items():
                params = SamplingParams(seed=1, **chain)  # type: ignore[arg-type]
                sampler = Sampler(params, n_vocab=n_vocab, n_ctx=N_TEXT)
                for token in text:
                    sampler.accept(token)
                found[f"{kind} {n_vocab}"] = milliseconds(sampler, logits, options.draws)
        figures[name] = found
        print(f"| {name} | " + " | ".join(f"{found[column]:.2f}" for column in columns) + " |")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
