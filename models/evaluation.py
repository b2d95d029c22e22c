"""Measures recall by distance and writes samples.

Run as a program, it reports on a checkpoint: `python models/evaluation.py --work DIR`.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from pathlib import Path

import torch
from document import ASSISTANT, USER, Document, Kind
from hybrid import AnyNetwork, new_network, shape_of
from probe import PROBE_KINDS, make_probe
from tokenizer import Tokenizer
from torch import Tensor

DISTANCES = (64, 128, 256, 512, 1024, 1900)
_PROBE_SEED = 99
_BATCH_TOKENS = 16384
_SAMPLES = (("Once upon a time", False), ("Tell me a story about a fox named Mia.", True))


@torch.no_grad()
def recall_table(
    network: AnyNetwork,
    tokenizer: Tokenizer,
    distances: Sequence[int] = DISTANCES,
    count: int = 40,
    kinds: Sequence[str] = PROBE_KINDS,
) -> dict[str, dict[int, float]]:
    """The share of probes whose whole answer is the greedy continuation, by kind and distance."""
    table: dict[str, dict[int, float]] = {}
    for kind in kinds:
        table[kind] = {}
        for distance in distances:
            rng = random.Random(f"{_PROBE_SEED}:{kind}:{distance}")
            probes = [make_probe(rng, tokenizer, kind, distance) for _ in range(count)]
            rows = [(probe.prompt, probe.answer) for probe in probes]
            right = sum(_answers_are_right(network, rows))
            table[kind][distance] = right / count
    return table


def markdown_table(table: dict[str, dict[int, float]]) -> str:
    """The table as the model card shows it."""
    distances = list(next(iter(table.values())))
    lines = [
        "| Task | " + " | ".join(map(str, distances)) + " |",
        "|---" * (len(distances) + 1) + "|",
    ]
    for kind, row in table.items():
        lines.append(f"| {kind} | " + " | ".join(f"{row[d]:.2f}" for d in distances) + " |")
    return "\n".join(lines)


@torch.no_grad()
def generate(
    network: AnyNetwork,
    tokenizer: Tokenizer,
    prompt: list[int],
    tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
) -> list[int]:
    """Continue a prompt until EOS or `tokens` tokens; greedily if the temperature is zero."""
    generator = torch.Generator().manual_seed(seed)
    ids = list(prompt)
    for _ in range(tokens):
        logits = network(torch.tensor([ids[-network.shape.context :]]))[0, -1].float()
        if temperature > 0:
            chances = torch.softmax(logits / temperature, -1)
            chosen = int(torch.multinomial(chances, 1, generator=generator))
        else:
            chosen = int(logits.argmax())
        ids.append(chosen)
        if chosen == tokenizer.eos:
            break
    return ids[len(prompt) :]


def chat_prompt(tokenizer: Tokenizer, request: str) -> list[int]:
    """One user turn, ready for the assistant's answer."""
    document = Document().turn(USER).say(request, Kind.REQUEST).turn(ASSISTANT)
    return [tokenizer.bos, *tokenizer.encode_document(document)[0]]


def report(network: AnyNetwork, tokenizer: Tokenizer, probes: int) -> None:
    """Print samples and the recall table."""
    for text, is_chat in _SAMPLES:
        plain = [tokenizer.bos, *tokenizer.encode(text)]
        prompt = chat_prompt(tokenizer, text) if is_chat else plain
        for temperature in (0.0, 0.7):
            ids = generate(network, tokenizer, prompt, 400, temperature)
            print(f"\n[{text}] temperature {temperature}\n{tokenizer.decode(ids)}", flush=True)
    print("\n" + markdown_table(recall_table(network, tokenizer, count=probes)), flush=True)


def _answers_are_right(network: AnyNetwork, rows: list[tuple[list[int], list[int]]]) -> list[bool]:
    longest = max(len(prompt) + len(answer) for prompt, answer in rows)
    batch_size = max(1, _BATCH_TOKENS // longest)
    results: list[bool] = []
    for start in range(0, len(rows), batch_size):
        batch = rows[start : start + batch_size]
        ids = torch.zeros(len(batch), longest, dtype=torch.long)
        for index, (prompt, answer) in enumerate(batch):
            ids[index, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
        guesses: Tensor = network(ids[:, :-1]).argmax(-1)
        for index, (prompt, answer) in enumerate(batch):
            said = guesses[index, len(prompt) - 1 : len(prompt) + len(answer) - 1].tolist()
            results.append(said == answer)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description="Report on a checkpoint.")
    parser.add_argument("--work", type=Path, required=True, help="folder with the checkpoint")
    parser.add_argument("--probes", type=int, default=40, help="probes per cell of the table")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    state = torch.load(options.work / "checkpoint.pt", weights_only=True)
    network = new_network(shape_of(state["shape"]))
    network.load_state_dict(state["network"])
    report(network, Tokenizer(options.work / "tokenizer.model"), options.probes)


if __name__ == "__main__":
    main()
