"""What the model that ships to draft is worth: stories with it and without, in turn.

    python benchmarks/draft.py

Each way of drawing, and each share of guesses, begins with models that were just loaded. *faster*
compares the times of all tokens after the first; *a story* is the median of the stories' ratios.
The texts are the same with guesses and without, which is checked. *right in p %* has each guess
replaced by a wrong one with probability 1 - p, while the draft is as sure of it as before.
"""

from __future__ import annotations

import argparse
import random
import statistics
from pathlib import Path

from localkv import LLM
from localkv.engine.prefix import Text
from localkv.engine.speculation.draft_model import DraftModel, Guess
from localkv.kernels.backend import Guessing

MODELS = Path(__file__).parents[1] / "models"
HEROES = (
    *(("fox", "Tom"), ("bear", "Mia"), ("owl", "Leo"), ("crow", "Ida")),
    *(("hen", "Omar"), ("mole", "Anna"), ("sheep", "Jack"), ("rabbit", "Otto")),
)
N_TOKENS = 200
WAYS = {
    "greedy": (0.0, 1.0),
    "temperature 0.8": (0.8, 1.0),
    **{f"right in {share} %": (0.0, share / 100) for share in (0, 20, 40, 60, 80)},
}


def make_wrong(draft: DraftModel, share: float) -> None:
    """Have only this share of a draft's guesses stay as they are."""
    rng, guesses = random.Random(3), draft.guesses

    def changed(text: Text, guessing: Guessing) -> list[Guess]:
        found = guesses(text, guessing)
        return [
            one if rng.random() < share else Guess(one.token ^ 1, one.confidence) for one in found
        ]

    draft.guesses = changed  # type: ignore[method-assign]


def row(llm: LLM, temperature: float, rounds: int) -> str:
    """Tokens per second without guesses and with them, and what came of the guesses."""
    seconds, ratios = {"none": 0.0, "draft": 0.0}, []
    n_tokens = n_drafted = n_accepted = 0
    for number in range(rounds * len(HEROES)):
        animal, name = HEROES[number % len(HEROES)]
        content = f"Tell me a story about a {animal} named {name}."
        prompt = llm.chat_prompt([{"role": "user", "content": content}])
        texts, of_story = {}, {}
        for spec in ("none", "draft") if number % 2 else ("draft", "none"):
            llm.engine.reset()
            done = llm.complete(
                prompt, max_tokens=N_TOKENS, temperature=temperature, seed=number, spec=spec
            )
            n = done.usage.completion_tokens - 1
            texts[spec], of_story[spec] = done.text, n / done.timings.decode_per_second
            seconds[spec] += of_story[spec]
            n_drafted += done.usage.drafted_tokens
            n_accepted += done.usage.accepted_tokens
        assert texts["none"] == texts["draft"]
        n_tokens += n
        ratios.append(of_story["none"] / of_story["draft"])
    without, with_ = (n_tokens / seconds[spec] for spec in ("none", "draft"))
    return (
        f"{without:.0f} | {with_:.0f} | {with_ / without:.2f} | {statistics.median(ratios):.2f} "
        f"| {n_drafted / n_tokens:.2f} | {n_accepted / n_tokens:.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("-m", "--model", type=Path, default=MODELS / "tales-4M-Q8_0.gguf")
    parser.add_argument("-md", "--draft", type=Path, default=MODELS / "tales-draft-Q8_0.gguf")
    parser.add_argument("--rounds", type=int, default=3, help="of the eight stories")
    options = parser.parse_args()
    print("| | tokens/s | with guesses | faster | a story | guessed | right |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for name, (temperature, share) in WAYS.items():
        with LLM(options.model, draft_model=options.draft, n_ctx=2048) as llm:
            assert llm.engine.draft is not None
            if share < 1:
                make_wrong(llm.engine.draft, share)
            print(f"| {name} | {row(llm, temperature, options.rounds)} |", flush=True)


if __name__ == "__main__":
    main()
