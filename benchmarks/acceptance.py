"""What guesses are worth by how many are right: a drafter that costs nothing and knows the text.

    python benchmarks/acceptance.py

Each of its guesses is right with a probability. Decoding with it and without, in turn; *faster* is
the median of the rounds' ratios, *draft model* the same with the model that ships to draft.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Sequence
from pathlib import Path

import localkv.engine.engine as engine_module
from localkv import LLM
from localkv.engine.speculation.config import Speculation
from localkv.engine.speculation.speculator import Speculator

MODELS = Path(__file__).parents[1] / "models"
STORY = "Tell me a story about a fox named Tom."
CONFIDENCE = 8


class Oracle:
    """A `Drafter` of a text that is known, with errors."""

    confidence = CONFIDENCE

    def __init__(self, text: Sequence[int], n_prompt: int, probability: float) -> None:
        rng = random.Random(1)
        self._guesses = [t if rng.random() < probability else t ^ 1 for t in text] + [0] * 64
        self._n = -n_prompt

    def accept(self, token: int) -> None:
        self._n += 1

    def draft(self, most: int) -> list[int]:
        at = max(0, self._n)
        return self._guesses[at : at + most]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("-m", "--model", type=Path, default=MODELS / "tales-4M-Q8_0.gguf")
    parser.add_argument("-md", "--draft", type=Path, default=MODELS / "tales-draft-Q8_0.gguf")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    llm = LLM(options.model, draft_model=options.draft, n_ctx=2048)
    engine, prompt = llm.engine, llm.chat_prompt([{"role": "user", "content": STORY}])
    ids = prompt.ids
    found = llm.complete(prompt, max_tokens=250, temperature=0.0, spec="none").text
    text = llm.tokenize(found, add_special=False)
    make = engine_module.new_speculator

    def oracle(probability: float) -> Speculator:
        return Speculator(Speculation("ngram"), engine.prices, Oracle(text, len(ids), probability))

    print("| right | tokens/s | with guesses | faster | drafted | accepted |")
    print("|---|---:|---:|---:|---:|---:|")
    for probability in (0.0, 0.2, 0.4, 0.6, 0.8, 0.9, 1.0, None):
        pairs = []
        for _ in range(options.rounds):
            speeds = []
            for spec in ("none", "draft"):
                engine_module.new_speculator = (
                    make
                    if probability is None or spec == "none"
                    else lambda *_, p=probability, **__: oracle(p)
                )
                engine.reset()
                done = llm.complete(prompt, max_tokens=250, temperature=0.0, spec=spec)
                assert done.text == found
                speeds.append(done.timings.decode_per_second)
            pairs.append(speeds)
        name = "draft model" if probability is None else f"{probability:.0%}"
        without, with_ = (statistics.median(x) for x in zip(*pairs, strict=True))
        ratio = statistics.median(b / a for a, b in pairs)
        usage = done.usage
        print(
            f"| {name} | {without:.0f} | {with_:.0f} | {ratio:.2f} "
            f"| {usage.drafted_tokens} | {usage.accepted_tokens} |"
        )


if __name__ == "__main__":
    main()
