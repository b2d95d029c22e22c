"""The text of an answer, taken apart while it comes: reasoning, calls of tools, and the rest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from localkv.chat.reasoning import split_reasoning


@dataclass(frozen=True)
class Content:
    """A piece of the answer itself."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """A piece of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True)
class CallBegun:
    """The model calls a tool.

    Attributes:
        index: of the call in this answer.
        id: ours.
        name: of the tool.
    """

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class CallArguments:
    """A piece of the arguments of a call, which together are a JSON object."""

    index: int
    text: str


Delta: TypeAlias = Content | Reasoning | CallBegun | CallArguments


class AnswerReader:
    """Takes the text of an answer apart.

    Args:
        keeps_reasoning: leave reasoning in the text, with its tags.
        opened: the tag of a reasoning that the prompt ends in, of which the text has only the rest.

    Attributes:
        content, reasoning: the texts so far.
    """

    def __init__(self, *, keeps_reasoning: bool = False, opened: str = "") -> None:
        self.content = ""
        self.reasoning = ""
        self._is_plain = keeps_reasoning
        self._text = opened

    def push(self, piece: str) -> list[Delta]:
        """What a piece of text adds."""
        if self._is_plain:
            return self._added("", piece)
        self._text += piece
        parts = split_reasoning(self._text)
        # the white space at the end of reasoning is no part of it, if it is the end
        reasoning = parts.reasoning.rstrip() if parts.open else parts.reasoning
        deltas = self._added(reasoning[len(self.reasoning) :], parts.answer[len(self.content) :])
        if not parts.open and not parts.reasoning and parts.answer == self._text:
            self._is_plain = True
        return deltas

    def end(self) -> list[Delta]:
        """What is left at the end of the text."""
        if self._is_plain or not self._text:
            return []
        parts = split_reasoning(self._text)
        if parts.open and not parts.reasoning and not self.reasoning:
            # the beginning of a tag that never came
            return self._added("", self._text[len(self.content) :])
        return []

    def _added(self, reasoning: str, content: str) -> list[Delta]:
        self.reasoning += reasoning
        self.content += content
        deltas: list[Delta] = [Reasoning(reasoning)] if reasoning else []
        return [*deltas, Content(content)] if content else deltas
