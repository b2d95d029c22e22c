"""What guesses of a trained model are worth: stories with them and without, in turn.

    python benchmarks/draft.py
    python benchmarks/draft.py -m models/tales-hybrid-Q8_0.gguf --head

A small model drafts for the one that ships; or, with `--head`, the block of a file that predicts a
further token. *n at a time* has the block guess as many tokens each time, whatever they cost.

Each way of drawing, and each share of guesses, begins with models that were just loaded. *faster*
compares the times of all tokens after the first; *a story* is the median of the stories' ratios.
The texts are the same with guesses and without, which is checked. *right in p %* has each guess
replaced by a wrong one with probability 1 - p, while the draft is as sure of it as before.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path

from localkv import LLM
from localkv.engine.prefix import Text
from localkv.engine.speculation.draft_model import Guess
from localkv.kernels.backend import Guessing
from localkv.system.threads import default_threads

MODELS = Path(__file__).parents[1] / "models"
HEROES = (
    *(("fox", "Tom"), ("bear", "Mia"), ("owl", "Leo"), ("crow", "Ida")),
    *(("hen", "Omar"), ("mole", "Anna"), ("sheep", "Jack"), ("rabbit", "Otto")),
)
N_TOKENS = 200


def as_it_is(llm: LLM) -> None:
    """Leave a model as it is."""


def make_wrong(share: float, llm: LLM) -> None:
    """Have only this share of a draft's guesses stay as they are."""
    draft = llm.engine.draft
    assert draft is not None
    rng, guesses = random.Random(3), draft.guesses

    def changed(text: Text, guessing: Guessing) -> list[Guess]:
        found = guesses(text, guessing)
        return [
            one if rng.random() < share else Guess(one.token ^ 1, one.confidence) for one in found
        ]

    draft.guesses = changed  # type: ignore[method-assign]


def always(n: int, llm: LLM) -> None:
    """Have the block guess `n` tokens each time."""
    head = llm.engine.head
    assert head is not None
    guessing = Guessing(n, head.n_vocab, 0.0, (), (1.0,), (0.0,) * n)
    head.pace.may_draft = lambda *_: True  # type: ignore[method-assign]
    head.pace.worthy = lambda found, *_: [len(one) for one in found]  # type: ignore[method-assign]
    head.pace.guessing = lambda *_, **__: guessing  # type: ignore[method-assign]


WAYS: dict[str, tuple[float, Callable[[LLM], None]]] = {
    "greedy": (0.0, as_it_is),
    "temperature 0.8": (0.8, as_it_is),
}
WORSE = {f"right in {n} %": (0.0, partial(make_wrong, n / 100)) for n in (0, 20, 40, 60, 80)}
ALWAYS = {f"{n} at a time": (0.0, partial(always, n)) for n in (1, 2, 3, 4)}
"""By name, how text is drawn and what is changed: of all, of drafts, and of heads."""


def row(llm: LLM, guesser: str, temperature: float, rounds: int) -> str:
    """Tokens per second without guesses and with them, and what came of the guesses."""
    seconds, ratios = {"none": 0.0, guesser: 0.0}, []
    n_tokens = n_drafted = n_accepted = 0
    for number in range(rounds * len(HEROES)):
        animal, name = HEROES[number % len(HEROES)]
        content = f"Tell me a story about a {animal} named {name}."
        prompt = llm.chat_prompt([{"role": "user", "content": content}])
        texts, of_story = {}, {}
        for spec in ("none", guesser) if number % 2 else (guesser, "none"):
            llm.engine.reset()
            done = llm.complete(
                prompt, max_tokens=N_TOKENS, temperature=temperature, seed=number, spec=spec
            )
            n = done.usage.completion_tokens - 1
            texts[spec], of_story[spec] = done.text, n / done.timings.decode_per_second
            seconds[spec] += of_story[spec]
            n_drafted += done.usage.drafted_tokens
            n_accepted += done.usage.accepted_tokens
        assert texts["none"] == texts[guesser]
        n_tokens += n
        ratios.append(of_story["none"] / of_story[guesser])
    without, with_ = (n_tokens / seconds[spec] for spec in ("none", guesser))
    return (
        f"{without:.0f} | {with_:.0f} | {with_ / without:.2f} | {statistics.median(ratios):.2f} "
        f"| {n_drafted / n_tokens:.2f} | {n_accepted / n_tokens:.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("-m", "--model", type=Path, default=MODELS / "tales-4M-Q8_0.gguf")
    parser.add_argument("-md", "--draft", type=Path, default=MODELS / "tales-draft-Q8_0.gguf")
    parser.add_argument("--head", action="store_true", help="the model's own block guesses")
    parser.add_argument("--rounds", type=int, default=3, help="of the eight stories")
    parser.add_argument("--threads", type=int, default=default_threads())
    options = parser.parse_args()
    guesser, draft = ("mtp", None) if options.head else ("draft", options.draft)
    print("| | tokens/s | with guesses | faster | a story | guessed | right |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for name, (temperature, change) in (WAYS | (ALWAYS if options.head else WORSE)).items():
        threads = options.threads
        with LLM(options.model, draft_model=draft, n_ctx=2048, n_threads=threads) as llm:
            change(llm)
            print(f"| {name} | {row(llm, guesser, temperature, options.rounds)} |", flush=True)


if __name__ == "__main__":
    main()
