"""What guessed tokens are worth: decoding with --spec ngram and without, in turn.

    python benchmarks/speculation.py --json FILE
    python benchmarks/speculation.py --heads llama-1.1b qwen35-0.8b --threads 1 --rounds 5

The model that ships repeats what it is told, recalls notes and tells stories. The texts are the
same with guesses and without, which is checked. *faster* is the median of the rounds' ratios of
seconds for each token after the first.

With `--heads` models of these shapes (`random_model.py`) have random weights of Q4_0 and a block
that predicts a further token, of the shape of their last layer that attends. Its guesses take what
they take, but are replaced: each is right with some chance, which is also the probability that the
block is said to give it. Without a chance it is the block's own guess, which is never right.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from random_model import shape_of

from localkv import LLM
from localkv.arch.spec import AttentionSpec, NormSpec, PredictionSpec
from localkv.config import CacheConfig
from localkv.engine.batch_engine import BatchEngine
from localkv.engine.engine import Engine
from localkv.engine.generation import Generation, GenerationOptions
from localkv.engine.speculation.config import Speculation
from localkv.engine.speculation.draft_model import DraftPace
from localkv.engine.speculation.prediction_head import PredictionHead
from localkv.kernels.cpu.cpu_backend import cpu_backend
from localkv.loader.synthetic import RandomTensors
from localkv.loader.tensor_reader import TensorReader
from localkv.loader.weights import model_weights
from localkv.model import Transformer
from localkv.sampling.params import SamplingParams
from localkv.sampling.sampler import Sampler
from localkv.system.threads import default_threads, use_threads

MODEL = Path(__file__).parents[1] / "models" / "tales-4M-Q8_0.gguf"
WORDS = re.findall(
    r"\w+",
    "hill clock frog key deer melon mole book honey seal map crab lake goat forest crow "
    "harbour tower shell rope lamp fox pig rabbit candle drum basket storm roof spoon",
)
STORY = "Tell me a story about a fox named Tom."


def tasks(llm: LLM) -> dict[str, tuple[list[int], int, float]]:
    """Prompts, most tokens to generate, temperatures."""
    rng = random.Random(7)
    words = ", ".join(rng.sample(WORDS, 30))
    notes = ", ".join(f"{word} {rng.randint(10, 99)}" for word in rng.sample(WORDS, 12))

    def chat(*texts: str) -> list[int]:
        roles = ("user", "assistant")
        messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
        return list(llm.chat_prompt(messages).ids)

    again = f"Repeat after me: {words}."
    return {
        "copy": (chat(again), 120, 0.0),
        "copy again": (chat(again, f"{words}.", again), 120, 0.0),
        "recall": (llm.tokenize(f"Notes: {notes}. Recall:"), 120, 0.0),
        "story": (chat(STORY), 300, 0.0),
        "story, temperature 0.8": (chat(STORY), 300, 0.8),
    }


def rounds(
    llm: LLM, prompt: Sequence[int], n: int, temperature: float, count: int
) -> dict[str, float]:
    """Tokens per second without guesses and with them, and what came of the guesses."""
    speeds: dict[str, list[float]] = {"none": [], "ngram": []}
    texts = {}
    for _ in range(count):
        for spec, found in speeds.items():
            llm.engine.reset()
            done = llm.complete(
                prompt, max_tokens=n, temperature=temperature, seed=5, spec=spec, ignore_eos=False
            )
            texts[spec] = done.text
            found.append(done.timings.decode_per_second)
            usage = done.usage
    assert texts["none"] == texts["ngram"]
    pairs = zip(speeds["ngram"], speeds["none"], strict=True)
    return {
        "tokens": usage.completion_tokens,
        "none": statistics.median(speeds["none"]),
        "ngram": statistics.median(speeds["ngram"]),
        "faster": statistics.median(with_ / without for with_, without in pairs),
        "drafted": usage.drafted_tokens,
        "accepted": usage.accepted_tokens,
    }


TOKENS = 128
Next = Callable[[Any], tuple[Any, int, float]]


def with_head(name: str) -> Transformer:
    """A random model with a block that predicts a further token."""
    shape, backend = shape_of(name), cpu_backend()
    attending = next(
        one for one in reversed(shape.spec.layers) if isinstance(one.mixer, AttentionSpec)
    )
    norms = (
        NormSpec(f"nextn.{one}", "rms", 1e-5) for one in ("enorm", "hnorm", "shared_head_norm")
    )
    prediction = PredictionSpec(shape.spec.n_layers, attending, *norms)
    config = replace(shape.spec, prediction=prediction)
    source = RandomTensors("q4_0", np.random.default_rng(0), shape)
    weights = model_weights(TensorReader(source, backend), config, predicts=True)
    return Transformer(config, weights, backend)


def knowing(head: PredictionHead, text: list[int], chance: float) -> Next:
    """What takes `next_of`'s place: it knows the next token of the text with some chance."""
    next_of, rng = partial(PredictionHead.next_of, head), random.Random(3)

    def next_known(x: Any) -> tuple[Any, int, float]:
        hidden, token, _ = next_of(x)
        at = head.texts[-1].n_rows + 1
        if rng.random() < chance and at < len(text):
            token = text[at]
        return hidden, token, chance

    return next_known


def head_rounds(
    model: Transformer, count: int, clock: Callable[[], float], chances: Sequence[float]
) -> dict[str, dict[str, float]]:
    """By chance, how many times as fast texts are as without guesses; and what was guessed."""
    prompt = [(i * 37 + 11) % model.config.n_vocab for i in range(64)]
    speculation, cache = Speculation("mtp"), CacheConfig(n_ctx=512)
    engine = Engine(model, cache, n_between=speculation.n_between)
    engine.add_head(CacheConfig())
    head = engine.head
    assert head is not None
    text = list[int]()

    def generation(spec: Speculation) -> Generation:
        sampler = Sampler(SamplingParams(temperature=0.0), n_vocab=model.config.n_vocab, n_ctx=512)
        options = GenerationOptions(sampler, max_tokens=TOKENS, speculation=spec)
        found = BatchEngine(engine, clock=clock).generate(prompt, options)
        text[:] = [*prompt, *found]
        return found

    generation(Speculation())
    known, figures = list(text), dict[str, dict[str, float]]()
    for chance in chances:
        ratios, guessed, right = list[float](), 0, 0
        head.next_of = knowing(head, known, chance)
        head.pace = DraftPace(engine.prices)
        for _ in range(count):
            seconds = []
            for spec in (Speculation(), speculation):
                engine.reset()
                done = generation(spec)
                assert text == known
                seconds.append(done.stats.decode_seconds)
            ratios.append(seconds[0] / seconds[1])
            guessed, right = guessed + done.stats.n_drafted, right + done.stats.n_accepted
        n = count * TOKENS
        name = f"{100 * chance:.0f} %"
        found = figures[name] = {
            "faster": statistics.median(ratios),
            "least": min(ratios),
            "most": max(ratios),
            "guessed": guessed / n,
            "right": right / n,
        }
        print(
            f"| {name} |", " | ".join(f"{value:.2f}" for value in found.values()), "|", flush=True
        )
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("-m", "--model", type=Path, default=MODEL)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--heads", nargs="+", metavar="SHAPE")
    parser.add_argument("--chances", type=float, nargs="+", default=(0.0, 0.3, 0.5, 0.7, 0.9, 1.0))
    parser.add_argument("--threads", type=int, default=default_threads())
    parser.add_argument(
        "--cpu-time", action="store_true", help="of one thread, where others use the machine"
    )
    options = parser.parse_args()
    if options.heads:
        use_threads(options.threads)
        found = {}
        for name in options.heads:
            print(f"\n{name}\n\n| right | faster | least | most | guessed | right of these |")
            print("|---|---:|---:|---:|---:|---:|")
            clock = time.process_time if options.cpu_time else time.perf_counter
            found[name] = head_rounds(with_head(name), options.rounds, clock, options.chances)
        if options.json:
            options.json.write_text(json.dumps(found, indent=1) + "\n")
        return
    llm = LLM(options.model, spec="ngram", n_ctx=2048)
    print("| | tokens | tokens/s | with guesses | faster | drafted | accepted |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    figures = {}
    for name, (prompt, n, temperature) in tasks(llm).items():
        found = figures[name] = rounds(llm, prompt, n, temperature, options.rounds)
        print(
            f"| {name} | {found['tokens']} | {found['none']:.0f} | {found['ngram']:.0f} "
            f"| {found['faster']:.2f} | {found['drafted']} | {found['accepted']} |"
        )
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
