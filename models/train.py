"""Trains the model from nothing and writes its GGUF files.

    python models/train.py --out models
    python models/train.py --out models --model tales-draft --teacher models/tales-4M-F16.gguf
    python models/train.py --out models --model tales-hybrid --tokens 5000000

With a teacher the model learns its predictions, and not the text alone. The hybrid has a block that
learns, beside it, to guess what it predicts next.
Training resumes from the checkpoint in the working folder if there is one.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import tempfile
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from corpus import make_row, tokenizer_texts
from curriculum import TOTAL_TOKENS, rate_factor, stage_at
from document import LOSS_WEIGHTS, Kind
from evaluation import report
from export_gguf import export
from hybrid import SHAPES as HYBRID_SHAPES
from hybrid import HybridNetwork, new_network
from network import SHAPES as LLAMA_SHAPES
from network import Network, wire
from optimizer import Optimizer
from teacher import load_teacher
from tokenizer import Tokenizer, train_tokenizer
from torch import Tensor

_TOKENIZER_DOCUMENTS = 6000
_LOG_EVERY = 20
SHAPES = {**LLAMA_SHAPES, **HYBRID_SHAPES}
LOGS = {
    "tales-4M": "training-log.jsonl",
    "tales-draft": "training-log-draft.jsonl",
    "tales-hybrid": "training-log-hybrid.jsonl",
}
"""By model, the file that its log is kept in."""
_GUESS_WEIGHTS = (0.3, 0.15)
"""How much a head's guesses of the first and of the second token count beside the model's loss."""


class Trainer:
    """One training run: its network, its optimiser and how far it has come."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        options.work.mkdir(parents=True, exist_ok=True)
        vocabulary_file = options.work / "tokenizer.model"
        if not vocabulary_file.exists():
            lines = tokenizer_texts(options.seed, _TOKENIZER_DOCUMENTS)
            train_tokenizer(lines, SHAPES[options.model].vocabulary, vocabulary_file)
        self.tokenizer = Tokenizer(vocabulary_file)
        torch.manual_seed(options.seed)
        shape = replace(SHAPES[options.model], vocabulary=self.tokenizer.size)
        self.network = new_network(shape)
        if isinstance(self.network, Network):
            wire(self.network, options.seed)
        self.teacher = load_teacher(options.teacher, self.tokenizer) if options.teacher else None
        self.optimizer = Optimizer(self.network, options.matrix_rate, options.other_rate)
        self.step = self.tokens = 0
        self.seconds = 0.0
        self._checkpoint = options.work / "checkpoint.pt"
        self._log = options.work / "log.jsonl"
        self._weights = torch.tensor([LOSS_WEIGHTS[kind] for kind in Kind])
        if self._checkpoint.exists():
            self._load()

    def run(self) -> None:
        """Train until all tokens have been seen, logging and saving on the way."""
        started = last_saved = time.monotonic()
        before = self.seconds
        totals: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        with self._log.open("a", encoding="utf-8") as log:
            while self.tokens < self.options.tokens:
                length = self._train_step(totals)
                self.seconds = before + time.monotonic() - started
                if self.step % _LOG_EVERY == 0:
                    log.write(json.dumps(self._log_line(length, totals)) + "\n")
                    log.flush()
                    totals.clear()
                if time.monotonic() - last_saved > 60 * self.options.checkpoint_minutes:
                    self._save()
                    last_saved = time.monotonic()
        self._save()

    def _train_step(self, totals: dict[str, list[float]]) -> int:
        progress = self.tokens * TOTAL_TOKENS / self.options.tokens
        stage = stage_at(progress)
        rng = random.Random(f"{self.options.seed}:{self.step}")
        length = stage.draw_length(rng)
        rows = [
            make_row(rng, self.tokenizer, stage.genres, length + 1)
            for _ in range(stage.tokens_per_step // length)
        ]
        ids = torch.tensor([row[0] for row in rows])
        kinds = torch.tensor([row[1] for row in rows])[:, 1:].flatten()
        inputs, targets = ids[:, :-1], ids[:, 1:].flatten()
        guesses = list[Tensor]()
        with torch.autocast("cpu", torch.bfloat16):
            if isinstance(self.network, HybridNetwork):
                hidden = self.network.hidden(inputs)
                logits = self.network.logits(hidden)
                guesses = self.network.guesses(hidden, inputs, len(_GUESS_WEIGHTS))
            else:
                logits = self.network(inputs)
        guess_loss = self._guess_loss(totals, logits.detach().float(), guesses)
        logits = logits.float().flatten(0, 1)
        losses = F.cross_entropy(logits, targets, reduction="none")
        if self.teacher is None:
            weights = self._weights[kinds]
            loss = (losses * weights).sum() / weights.sum()
        else:
            taught = self._taught(inputs).flatten(0, 1)
            loss = F.kl_div(logits.log_softmax(-1), taught, reduction="batchmean", log_target=True)
        (loss + guess_loss).backward()
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        self.optimizer.step(rate_factor(self.step, progress))
        self.network.zero_grad(set_to_none=True)
        self._count(totals, logits.detach(), targets, losses.detach(), kinds)
        self.step += 1
        self.tokens += inputs.numel()
        return length

    @staticmethod
    def _guess_loss(
        totals: dict[str, list[float]], logits: Tensor, guesses: list[Tensor]
    ) -> Tensor:
        """How far a head's logits are from the model's own, of the tokens that it guesses."""
        loss = torch.zeros(())
        for n, found in enumerate(guesses, 1):
            aim, mine = logits[:, n:].flatten(0, 1), found.float().flatten(0, 1)
            distances = F.kl_div(
                mine.log_softmax(-1), aim.log_softmax(-1), reduction="batchmean", log_target=True
            )
            loss = loss + _GUESS_WEIGHTS[n - 1] * distances
            total = totals[f"guess_{n}"]
            total[0] += float((mine.argmax(-1) == aim.argmax(-1)).sum())
            total[1] += len(mine)
        return loss

    @torch.no_grad()
    def _taught(self, inputs: Tensor) -> Tensor:
        """What the teacher gives the tokens that may follow: logarithms of probabilities."""
        assert self.teacher is not None
        with torch.autocast("cpu", torch.bfloat16):
            logits: Tensor = self.teacher(inputs)
        return logits.float().log_softmax(-1)

    @staticmethod
    def _count(
        totals: dict[str, list[float]],
        logits: Tensor,
        targets: Tensor,
        losses: Tensor,
        kinds: Tensor,
    ) -> None:
        right = logits.argmax(-1) == targets
        for kind in Kind:
            chosen = kinds == kind
            if kind == Kind.FRESH or not chosen.any():
                continue
            values = losses if kind == Kind.PROSE else right
            total = totals[kind.name.lower()]
            total[0] += float(values[chosen].sum())
            total[1] += int(chosen.sum())

    def _log_line(self, length: int, totals: dict[str, list[float]]) -> dict[str, Any]:
        """Prose has its loss in the log, every other kind its accuracy."""
        line: dict[str, Any] = {
            "step": self.step,
            "tokens": self.tokens,
            "seconds": round(self.seconds),
            "length": length,
        }
        line |= {name: round(total[0] / total[1], 4) for name, total in sorted(totals.items())}
        return line

    def _save(self) -> None:
        state = {
            "shape": self.network.shape.as_dict(),
            "network": self.network.state_dict(),
            "optimizer": self.optimizer.state(),
            "step": self.step,
            "tokens": self.tokens,
            "seconds": self.seconds,
        }
        fresh = self._checkpoint.with_suffix(".new")
        torch.save(state, fresh)
        fresh.replace(self._checkpoint)

    def _load(self) -> None:
        state = torch.load(self._checkpoint, weights_only=True)
        self.network.load_state_dict(state["network"])
        self.optimizer.load(state["optimizer"])
        self.step, self.tokens, self.seconds = state["step"], state["tokens"], state["seconds"]
        self._forget_log_after(self.step)

    def _forget_log_after(self, step: int) -> None:
        """Drop the log lines of steps that were not saved and will be taken again."""
        lines = self._log.read_text(encoding="utf-8").splitlines()
        kept = [line for line in lines if json.loads(line)["step"] <= step]
        self._log.write_text("".join(line + "\n" for line in kept), encoding="utf-8")


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the GGUF files")
    parser.add_argument("--model", choices=SHAPES, default="tales-4M")
    parser.add_argument(
        "--work",
        type=Path,
        help="folder for the tokenizer, the checkpoint and the log; by default one in the system's "
        "folder for temporary files",
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--tokens", type=int, default=TOTAL_TOKENS, help="the curriculum shrinks to so many"
    )
    parser.add_argument("--teacher", type=Path, help="GGUF file of a model with this tokenizer")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--matrix-rate", type=float, default=0.01)
    parser.add_argument("--other-rate", type=float, default=2e-3)
    parser.add_argument("--checkpoint-minutes", type=float, default=2.0)
    parser.add_argument("--probes", type=int, default=40, help="probes per cell of the table")
    options = parser.parse_args()
    options.work = options.work or Path(tempfile.gettempdir()) / options.model
    return options


def main() -> None:
    options = _parse_options()
    torch.set_num_threads(options.threads)
    trainer = Trainer(options)
    trainer.run()
    export(trainer.network, trainer.tokenizer, options.out, options.model)
    shutil.copy(options.work / "log.jsonl", options.out / LOGS[options.model])
    report(trainer.network, trainer.tokenizer, options.probes)


if __name__ == "__main__":
    main()
