"""Separates a model's reasoning, between <think> and </think> or other tags, from its answer."""

from __future__ import annotations

from dataclasses import dataclass

from localkv.loader.reasoning_tags import REASONING_TAGS, tags_at_start


@dataclass(frozen=True)
class Reasoned:
    """An answer in two parts; `open` while the reasoning has not ended."""

    reasoning: str
    answer: str
    open: bool = False


def split_reasoning(text: str) -> Reasoned:
    """The parts of an answer, also of one that is still being written.

    Only an answer that begins with the opening tag reasons: a later tag is text. The beginning
    of a possible tag belongs to neither part yet.
    """
    start = text.lstrip()
    tags = tags_at_start(start)
    if tags is None:
        waiting = any(possible.open.startswith(start) for possible in REASONING_TAGS)
        return Reasoned("", "" if waiting else text, open=waiting and bool(start))
    inside = start.removeprefix(tags.open)
    reasoning, close, answer = inside.partition(tags.close)
    if close:
        return Reasoned(reasoning.strip(), answer.lstrip("\n"))
    for size in range(len(tags.close) - 1, 0, -1):
        if reasoning.endswith(tags.close[:size]):
            reasoning = reasoning[:-size]
            break
    return Reasoned(reasoning.lstrip(), "", open=True)


def spoken(text: str) -> str:
    """An answer without its reasoning, as later turns see it."""
    return split_reasoning(text).answer
