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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from random_model import shape_of

from localkv import LLM
from localkv.arch.spec import AttentionSpec, NormSpec, PredictionSpec
from localkv.config import CacheConfig
from localkv.engine.batch_engine import BatchEngine
from localkv.engine.engine import Engine
from localkv.engine.generation import Generation, GenerationOptions
from localkv.engine.speculation.config import Speculation
from localkv.engine.speculation.draft_model import DraftPace
from localkv.engine.speculation.prediction_head import HeadText
from localkv.errors import counted
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
SAMPLED = SamplingParams(temperature=1.0, top_k=40, seed=5)
"""Greedy texts of random models go round in circles, which n-grams would guess."""


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
    source = RandomTensors("q4_0", 0, shape)
    weights = model_weights(TensorReader(source, backend), config, predicts=True)
    return Transformer(config, weights, backend)


@contextmanager
def knowing(known: dict[int, list[int]], chance: float) -> Iterator[None]:
    """While it lasts heads know the next token of texts with some chance.

    Args:
        known: texts by their first token.
    """
    rng, likeliest = random.Random(3), HeadText.likeliest

    def next_known(self: HeadText, logits: NDArray[np.float32]) -> tuple[int, float]:
        token, _ = likeliest(self, logits)
        text, at = known[self.text.ids[0]], self.n_rows + 1
        if rng.random() < chance and at < len(text):
            token = text[at]
        return token, chance

    HeadText.likeliest = next_known  # type: ignore[method-assign]
    try:
        yield
    finally:
        HeadText.likeliest = likeliest  # type: ignore[method-assign]


def head_rounds(
    model: Transformer,
    count: int,
    clock: Callable[[], float],
    chances: Sequence[float],
    n_texts: int,
) -> dict[str, dict[str, float]]:
    """By chance, how many times as fast texts are as without guesses; and what was guessed."""
    n_vocab = model.config.n_vocab
    prompts = [[(i * 37 + 11 + n) % n_vocab for i in range(64)] for n in range(n_texts)]
    speculation = Speculation("mtp")
    cache = CacheConfig(n_ctx=512, n_sequences=n_texts)
    engine = Engine(model, cache, n_between=speculation.n_between)
    engine.add_head(CacheConfig())
    head = engine.head
    assert head is not None
    batch = BatchEngine(engine, clock=clock)

    def generated(spec: Speculation) -> tuple[float, list[Generation]]:
        """Tokens per second while all texts go on."""
        engine.reset()
        several = list[Generation]()
        for prompt in prompts:
            sampler = Sampler(SAMPLED, n_vocab=n_vocab, n_ctx=512)
            options = GenerationOptions(sampler, max_tokens=TOKENS, speculation=spec)
            several.append(batch.generate(prompt, options))
        while not all(one.n_drawn for one in several):
            several[0].advance() if n_texts == 1 else batch.step()
        began, before = clock(), sum(one.n_drawn for one in several)
        while not any(one.has_ended for one in several):
            one = min(several, key=lambda one: one.n_drawn)
            next(one)
            for other in several:
                while other.n_ready:
                    next(other)
        n = sum(one.n_drawn for one in several) - before
        speed = n / (clock() - began)
        for one in several:
            list(one)
        return speed, several

    _, several = generated(Speculation())
    known = {prompt[0]: list(one.ids) for prompt, one in zip(prompts, several, strict=True)}
    figures = dict[str, dict[str, float]]()
    for chance in chances:
        ratios, guessed, right, n = list[float](), 0, 0, 0
        head.pace = DraftPace(engine.prices)
        for _ in range(count):
            speeds = []
            for spec in (Speculation(), speculation):
                with knowing(known, chance):
                    speed, several = generated(spec)
                assert [known[one.ids[0]] for one in several] == [one.ids for one in several]
                speeds.append(speed)
            ratios.append(speeds[1] / speeds[0])
            guessed += sum(one.stats.n_drafted for one in several)
            right += sum(one.stats.n_accepted for one in several)
            n += sum(one.stats.n_generated for one in several)
        found = figures[f"{100 * chance:.0f} %"] = {
            "faster": statistics.median(ratios),
            "least": min(ratios),
            "most": max(ratios),
            "guessed": guessed / n,
            "right": right / n,
        }
        values = " | ".join(f"{value:.2f}" for value in found.values())
        print(f"| {100 * chance:.0f} % | {values} |", flush=True)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("-m", "--model", type=Path, default=MODEL)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--heads", nargs="+", metavar="SHAPE")
    parser.add_argument("--chances", type=float, nargs="+", default=(0.0, 0.3, 0.5, 0.7, 0.9, 1.0))
    parser.add_argument("--texts", type=int, nargs="+", default=(1,), help="that share steps")
    parser.add_argument("--threads", type=int, default=default_threads())
    parser.add_argument(
        "--cpu-time", action="store_true", help="of one thread, where others use the machine"
    )
    options = parser.parse_args()
    if options.heads:
        use_threads(options.threads)
        clock = time.process_time if options.cpu_time else time.perf_counter
        found = {}
        for name in options.heads:
            model = with_head(name)
            for n_texts in options.texts:
                print(f"\n{name}, {counted(n_texts, 'text')} at a time\n")
                print("| right | faster | least | most | guessed | right of these |")
                print("|---|---:|---:|---:|---:|---:|")
                found[f"{name}, {n_texts}"] = head_rounds(
                    model, options.rounds, clock, options.chances, n_texts
                )
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
