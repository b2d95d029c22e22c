"""What an audit takes, beside a prompt of the same length, in turn.

    python benchmarks/audit.py --json FILE
    python benchmarks/audit.py --shape llama-1.1b:Q4_0 --tokens 300 --rounds 3

The text is a prompt, of a few tokens unless `--prompt` says how many, and as many generated tokens
as asked for. What the audit is compared with is all of it as a prompt, evaluated by the same model
with the same cache from its beginning on. With `--shape` the model has random weights. *ratio* is
the median of the rounds' ratios. *floor* is
the ratio of a prompt that computes the logits of generated tokens, as an audit does. What logits
take is no matter of audits. `--cpu-time` is for machines that others use, too:
the processor's time on one thread.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from pathlib import Path

from random_model import shape_of, write_model

from localkv import LLM

LOGIT_ROWS = 64
"""Positions whose logits are made at a time."""
MODEL = Path(__file__).parents[1] / "models" / "tales-4M-Q8_0.gguf"


def measured(
    llm: LLM, n_prompt: int, n_tokens: int, rounds: int, clock: Callable[[], float]
) -> tuple[int, list[float], list[float], list[float]]:
    """Tokens of the text; seconds of each round, of audits, of prompts of the same length, and of
    such whose logits are made where the text was generated.

    Args:
        n_prompt: tokens before the generated ones; 0 for a few words.
        n_tokens: generated ones.
        rounds: that are counted, after one that is not.
    """
    beginning = llm.tokenize("Once upon a time")
    n_prompt = n_prompt or len(beginning)
    stream = llm.stream(
        (beginning * n_prompt)[:n_prompt],
        max_tokens=n_tokens,
        temperature=0.8,
        seed=1,
        ignore_eos=True,
        audit=True,
    )
    stream.audited = None  # not by itself
    for _ in stream:
        pass
    ids = stream.generation.ids
    n_batch = llm.engine.n_batch

    def read_prompt() -> None:
        for at in range(0, len(ids), n_batch):
            llm.engine.evaluate(ids[at : at + n_batch])

    def read_with_logits() -> None:
        slot, whole = llm.engine.slot, [*range(0, len(ids), n_batch)]
        cut = [*range(0, n_prompt, n_batch), *range(n_prompt, len(ids), n_batch)]
        starts = cut if len(cut) == len(whole) else whole
        for start, end in pairwise([*starts, len(ids)]):
            part = ids[start:end]
            if end <= n_prompt:
                llm.engine.evaluate(part)
            else:
                read = partial(slot.read_logits, part, len, LOGIT_ROWS, n_prompt=len(part))
                slot.turn(read)

    works = (lambda: llm.audit(stream)), read_prompt, read_with_logits
    seconds = tuple(list[float]() for _ in works)
    for _ in range(rounds + 1):
        for work, taken in zip(works, seconds, strict=True):
            llm.engine.reset()
            started = clock()
            work()
            taken.append(clock() - started)
    audits, prompts, with_logits = (taken[1:] for taken in seconds)
    return len(ids), audits, prompts, with_logits


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--shape", help="NAME:TYPE, random weights instead of a model")
    parser.add_argument("--types", default="q4_0/q4_0", help="K/V of the cache")
    parser.add_argument("--prompt", type=int, default=0, help="tokens of it (a few words)")
    parser.add_argument("--tokens", type=int, default=1500, help="generated ones (1500)")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--cpu-time", action="store_true", help="of one thread")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() if options.shape else nullcontext() as folder:
        path = options.model
        if folder is not None:
            name, _, type_name = options.shape.partition(":")
            path = Path(folder) / "model.gguf"
            write_model(path, shape_of(name), type_name.lower(), has_words=True)
        type_k, _, type_v = options.types.partition("/")
        n_ctx = options.prompt + options.tokens + 16
        threads = 1 if options.cpu_time else None
        llm = LLM(path, n_ctx=n_ctx, cache_type_k=type_k, cache_type_v=type_v, n_threads=threads)
        sizes = options.prompt, options.tokens, options.rounds
        clock = time.thread_time if options.cpu_time else time.perf_counter
        n_tokens, audits, prompts, with_logits = measured(llm, *sizes, clock)
    ratios = [a / p for a, p in zip(audits, prompts, strict=True)]
    floors = [a / p for a, p in zip(with_logits, prompts, strict=True)]
    generated = f"{n_tokens} tokens, {options.tokens} of them generated"
    print(f"{generated}, {options.types}, medians of {options.rounds} rounds:")
    print(f"audit {statistics.median(audits):.3f} s, prompt {statistics.median(prompts):.3f} s")
    print(f"ratio {statistics.median(ratios):.2f}, {min(ratios):.2f} to {max(ratios):.2f}")
    print(f"floor {statistics.median(floors):.2f}, {min(floors):.2f} to {max(floors):.2f}")
    if options.json:
        found = {
            "tokens": n_tokens,
            "generated": options.tokens,
            "audit_s": audits,
            "prompt_s": prompts,
            "with_logits_s": with_logits,
            "ratios": ratios,
        }
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
