"""Recall through a cache: is the fact still there, and how sure is the model of it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from document import ASSISTANT, END, SYSTEM, USER
from document_encoder import DocumentEncoder
from numpy.typing import NDArray
from probe import Probe, probe_series

from localkv import LLM
from localkv.config import CacheConfig
from localkv.engine.engine import Engine
from localkv.model import Transformer

MOST_QUESTION = 64
"""Tokens that are evaluated together, with logits for each; a question and its answer are fewer."""


@dataclass(frozen=True)
class Recall:
    """How often a fact was recalled at one distance.

    Attributes:
        right: share whose whole answer is the greedy continuation.
        log_p: mean log-probability of the right answer, all its tokens together, in nats.
        count: how many there were.
    """

    right: float
    log_p: float
    count: int


def encoder_of(llm: LLM) -> DocumentEncoder:
    """An encoder of documents with the tokenizer in a model's file."""
    markers = {
        marker: llm.tokenize(marker, add_special=False, parse_special=True)[-1]
        for marker in (SYSTEM, USER, ASSISTANT, END)
    }
    bos = llm.tokenizer.bos_id
    assert bos is not None  # the vocabulary of the corpus has one
    return DocumentEncoder(lambda text: llm.tokenize(text, add_special=False), markers, bos)


def make_series(
    encoder: DocumentEncoder, distances: Sequence[int], count: int, seed: int
) -> list[list[tuple[int, Probe]]]:
    """Several lists of facts, each asked about at every distance."""
    return [
        probe_series(random.Random(f"recall:{seed}:{index}"), encoder, distances)
        for index in range(count)
    ]


def recall(
    model: Transformer, cache: CacheConfig, series: Sequence[Sequence[tuple[int, Probe]]]
) -> dict[int, Recall]:
    """Recall by distance through a cache."""
    engine = Engine(model, cache)
    found: dict[int, list[tuple[bool, float]]] = {}
    for probes in series:
        for distance, probe in probes:
            logits = answer_logits(engine, probe)
            logits = logits.astype(np.float64)
            answer = np.array(probe.answer)
            right = bool((logits.argmax(1) == answer).all())
            log_p = logits[np.arange(len(answer)), answer] - np.logaddexp.reduce(logits, axis=1)
            found.setdefault(distance, []).append((right, float(log_p.sum())))
    return {
        distance: Recall(
            right=sum(right for right, _ in answers) / len(answers),
            log_p=sum(log_p for _, log_p in answers) / len(answers),
            count=len(answers),
        )
        for distance, answers in found.items()
    }


def answer_logits(engine: Engine, probe: Probe) -> NDArray[np.float32]:
    """What each token of the answer is predicted with: float32 [tokens, n_vocab].

    What the cache holds of the prompt is not evaluated again.
    """
    ids = [*probe.prompt, *probe.answer[:-1]]
    shared = 0
    for ours, theirs in zip(engine.cached_ids, probe.prompt[:-1], strict=False):
        if ours != theirs:
            break
        shared += 1
    shared = engine.truncate(shared)
    # only new stories are longer than a question: they need no logits
    question = max(shared, len(ids) - MOST_QUESTION)
    for start in range(shared, question, engine.n_batch):
        engine.evaluate(ids[start : min(start + engine.n_batch, question)])
    return engine.evaluate(ids[question:], "all")[-len(probe.answer) :]
