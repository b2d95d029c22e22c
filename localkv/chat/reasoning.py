"""Separates a model's reasoning, between <think> and </think> or other tags, from its answer."""

from __future__ import annotations

from dataclasses import dataclass

from localkv.loader.answer_tags import ANSWER_TAGS, REASONING_TAGS, tags_at_start


@dataclass(frozen=True)
class Reasoned:
    """An answer in two parts; `open` while the reasoning has not ended."""

    reasoning: str
    answer: str
    open: bool = False


def split_reasoning(text: str) -> Reasoned:
    """The parts of an answer, also of one that is still being written.

    Only an answer that begins with the opening tag reasons: a later tag is text. The beginning
    of a possible tag belongs to neither part yet, and tags around the answer that follows are left
    out.
    """
    start = text.lstrip()
    tags = tags_at_start(start)
    if tags is None:
        waiting = any(possible.open.startswith(start) for possible in REASONING_TAGS)
        return Reasoned("", "" if waiting else text, open=waiting and bool(start))
    inside = start.removeprefix(tags.open)
    reasoning, close, answer = inside.partition(tags.close)
    if close:
        return Reasoned(reasoning.strip(), _out_of_tags(answer.lstrip("\n")))
    return Reasoned(_without_begun(reasoning, tags.close).lstrip(), "", open=True)


def _out_of_tags(answer: str) -> str:
    """An answer without the tags that some models put around it after they have reasoned."""
    start = answer.lstrip()
    for tags in ANSWER_TAGS:
        if start and tags.open.startswith(start):
            return ""
        if start.startswith(tags.open):
            inside, close, rest = start.removeprefix(tags.open).partition(tags.close)
            inside = inside.lstrip("\n")
            return inside.rstrip() + rest if close else _without_begun(inside, tags.close)
    return answer


def _without_begun(text: str, tag: str) -> str:
    """A text without an end that may become a tag."""
    for size in range(len(tag) - 1, 0, -1):
        if text.endswith(tag[:size]):
            return text[:-size]
    return text
