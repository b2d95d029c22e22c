"""What guessed tokens are worth: decoding with --spec ngram and without, in turn.

    python benchmarks/speculation.py --json FILE

The model that ships repeats what it is told, recalls notes and tells stories. The texts are the
same with guesses and without, which is checked. *faster* is the median of the rounds' ratios of
seconds for each token after the first.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
from collections.abc import Sequence
from pathlib import Path

from localkv import LLM

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


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("-m", "--model", type=Path, default=MODEL)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
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
