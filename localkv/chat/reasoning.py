"""Separates a model's reasoning, between <think> and </think>, from its answer."""

from __future__ import annotations

from dataclasses import dataclass

OPEN, CLOSE = "<think>", "</think>"


@dataclass(frozen=True)
class Reasoned:
    """An answer in two parts; `open` while the reasoning has not ended."""

    reasoning: str
    answer: str
    open: bool = False


def split_reasoning(text: str) -> Reasoned:
    """The parts of an answer, also of one that is still being written.

    Only an answer that begins with <think> reasons: a later tag is text. The beginning
    of a possible tag belongs to neither part yet.
    """
    start = text.lstrip()
    if not start.startswith(OPEN):
        waiting = OPEN.startswith(start)
        return Reasoned("", "" if waiting else text, open=waiting and bool(start))
    inside = start.removeprefix(OPEN)
    reasoning, close, answer = inside.partition(CLOSE)
    if close:
        return Reasoned(reasoning.strip(), answer.lstrip("\n"))
    for size in range(len(CLOSE) - 1, 0, -1):
        if reasoning.endswith(CLOSE[:size]):
            reasoning = reasoning[:-size]
            break
    return Reasoned(reasoning.lstrip(), "", open=True)


def spoken(text: str) -> str:
    """An answer without its reasoning, as later turns see it."""
    return split_reasoning(text).answer
