"""What requests wait for when others are there: `python benchmarks/many_requests.py --json FILE`.

A random Llama of 1.1 billion weights (Q4_0) and a q8_0/q4_0 cache, without an environment of its
own; two minutes on 2 cores:

- a prompt of 4,096 tokens comes while four sequences generate: the times between their tokens,
  before and while it is read, and when its first token comes;
- the same prompt with 4,000 tokens that are known: the time to its first token, beside that of its
  new tokens;
- 1,000 requests of random lengths, one of twenty cancelled, in a cache that holds a tenth of their
  tokens (the model that ships): all end, all pages come back, and the memory of the process.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from random_model import shape_of, write_model

from localkv import LLM
from localkv.engine.generation import Generation, GenerationOptions
from localkv.sampling.params import SamplingParams
from localkv.sampling.sampler import Sampler
from localkv.system.processor import processor_name

SHIPPED = Path(__file__).parents[1] / "models" / "tales-4M-F16.gguf"


def start(llm: LLM, ids: list[int], n: int) -> Generation:
    sampler = Sampler(SamplingParams(temperature=0.0), n_vocab=llm.config.n_vocab)
    return llm.batch.generate(ids, GenerationOptions(sampler=sampler, max_tokens=n))


def random_ids(llm: LLM, rng: random.Random, n: int) -> list[int]:
    return [rng.randrange(llm.config.n_vocab) for _ in range(n)]


def read(generation: Generation) -> int:
    """Take the tokens that are there; how many there were."""
    n = generation.n_ready
    for _ in range(n):
        next(generation)
    return n


def long_prompt_beside_others(llm: LLM, n_prompt: int) -> dict[str, float]:
    """Milliseconds between two tokens of four sequences, alone and while a prompt is read."""
    rng = random.Random(1)
    talking = [start(llm, random_ids(llm, rng, 64), 2000) for _ in range(4)]
    gaps: dict[str, list[float]] = {"alone": [], "beside": []}

    def step(name: str) -> None:
        started = time.perf_counter()
        llm.batch.step()
        taken = 1e3 * (time.perf_counter() - started)
        if min([read(one) for one in talking]):
            gaps[name].append(taken)

    while len(gaps["alone"]) < 40:
        step("alone")
    for _ in range(2):  # the first one teaches what a prompt costs
        gaps["beside"].clear()
        began = time.perf_counter()
        long = start(llm, random_ids(llm, rng, n_prompt), 2)
        while not long.n_ready:
            step("beside")
        first = time.perf_counter() - began
        list(long)
    for one in talking:
        one.close()
    llm.engine.reset()
    began = time.perf_counter()
    next(start(llm, random_ids(llm, rng, n_prompt), 1))
    alone = time.perf_counter() - began
    return {
        "step budget, ms": llm.batch.scheduler.config.step_ms,
        "gap alone, median ms": median(gaps["alone"]),
        "gap beside the prompt, median ms": median(gaps["beside"]),
        "gap beside the prompt, longest ms": max(gaps["beside"]),
        "first token of the prompt, s": first,
        "the same with nobody else, s": alone,
    }


def known_prefix(llm: LLM, n_known: int, n_new: int) -> dict[str, float]:
    """Seconds to the first token of a prompt that is known but for its last tokens.

    Beside it are the seconds that its new tokens take behind the same rows, without a scheduler,
    and as a text of their own.
    """
    rng = random.Random(2)
    known = random_ids(llm, rng, n_known)
    next(start(llm, known, 1))
    seconds: dict[str, list[float]] = {"known": [], "behind": [], "alone": []}
    for _ in range(5):
        for name, before in (("known", known), ("alone", [])):
            generation = start(llm, [*before, *random_ids(llm, rng, n_new)], 1)
            began = time.perf_counter()
            next(generation)
            seconds[name].append(time.perf_counter() - began)
    engine = llm.engine
    for start_at in range(0, n_known, llm.engine.n_batch):
        engine.evaluate(known[start_at : start_at + engine.n_batch])
    for _ in range(5):
        began = time.perf_counter()
        engine.evaluate(random_ids(llm, rng, n_new))
        seconds["behind"].append(time.perf_counter() - began)
        engine.truncate(n_known)
    return {
        f"first token, {n_known} known and {n_new} new, ms": 1e3 * median(seconds["known"]),
        f"those {n_new} evaluated behind the others, ms": 1e3 * median(seconds["behind"]),
        "ratio": median(seconds["known"]) / median(seconds["behind"]),
        f"first token, {n_new} as a text of their own, ms": 1e3 * median(seconds["alone"]),
    }


def resident() -> float:
    """MiB of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


def thousand_requests(n: int) -> dict[str, float]:
    """Random lengths in random order, some cancelled."""
    rng = random.Random(3)
    lengths = [1 + min(1500, int(rng.expovariate(1 / 200))) for _ in range(n)]
    tokens = [rng.randint(1, 64) for _ in range(n)]
    n_cache = (sum(lengths) + sum(tokens)) // 10
    llm = LLM(
        SHIPPED,
        n_ctx=2048,
        cache_type_k="q8_0",
        cache_type_v="q4_0",
        n_parallel=16,
        n_cache_tokens=max(2048, n_cache),
    )
    batch, memory, going = llm.batch, [0.0, 0.0], dict[int, Generation]()
    began, n_ended, n_drawn, n_cancelled = time.perf_counter(), 0, 0, 0
    waiting = list(range(n))
    rng.shuffle(waiting)
    while waiting or going:
        while waiting and len(going) < 64 and rng.random() < 0.7:
            number = waiting.pop()
            going[number] = start(llm, random_ids(llm, rng, lengths[number]), tokens[number])
        batch.step()
        for number, one in list(going.items()):
            n_drawn += read(one)
            if rng.random() < 0.0005:
                one.close()
                n_cancelled += 1
            if one.has_ended and not one.n_ready:
                del going[number]
                n_ended += 1
                if n_ended == n // 5:
                    memory[0] = resident()
    memory[1], seconds = resident(), time.perf_counter() - began
    stats = batch.stats
    n_pages = sum(pool.n_pages for pool in llm.engine.cache.pools)
    llm.engine.reset()
    free = sum(len(pool.free) for pool in llm.engine.cache.pools)
    llm.close()
    return {
        "requests that ended": n_ended,
        "of them cancelled": n_cancelled,
        "tokens generated": n_drawn,
        "seconds": seconds,
        "times that one gave way": stats.n_preempted,
        "pages that did not come back": n_pages - free,
        "MiB after a fifth": memory[0],
        "MiB at the end": memory[1],
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--small", action="store_true", help="small models, to try this program")
    return parser.parse_args()


def main() -> None:
    options = parse()
    shape = shape_of("llama-tiny" if options.small else "llama-1.1b")
    n_prompt = 512 if options.small else 4096
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        write_model(path, shape, "q4_0")
        with LLM(
            path,
            n_ctx=n_prompt + 64,
            cache_type_k="q8_0",
            cache_type_v="q4_0",
            n_parallel=6,
            n_cache_tokens=6 * (n_prompt + 256),
        ) as llm:
            figures["a long prompt beside four"] = long_prompt_beside_others(llm, n_prompt)
            llm.engine.reset()
            figures["a known beginning"] = known_prefix(llm, n_prompt - 96, 96)
    figures["a thousand requests"] = thousand_requests(60 if options.small else 1000)
    print(f"{processor_name()}\n")
    for name, values in figures.items():
        print(f"{name}:\n\n| | |\n|---|---:|")
        for title, value in values.items():
            print(f"| {title} | {value:,.2f} |".replace(".00 ", " "))
        print()
    if options.json:
        options.json.write_text(json.dumps({"cpu": processor_name(), **figures}, indent=1))


if __name__ == "__main__":
    sys.exit(main())
