"""Splits the text of an answer while it comes: into reasoning, calls of tools, and the rest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from localkv.chat.reasoning import split_reasoning
from localkv.tool_calls.reader import CallReader
from localkv.tool_calls.source import CallArguments, CallBegun, CallEnded, CallEvent, Content


@dataclass(frozen=True)
class Reasoning:
    """A piece of what the model thinks before it answers."""

    text: str


Delta: TypeAlias = Content | Reasoning | CallBegun | CallArguments


class AnswerReader:
    """Splits the text of an answer into reasoning, calls of tools, and the rest.

    Args:
        keeps_reasoning: leave reasoning in the text, with its tags.
        calls: finds calls of tools in what is not reasoning.
        opened: the tag of a reasoning that the prompt has begun; the text has only the rest of it.

    Attributes:
        content, reasoning: the texts so far.
    """

    def __init__(
        self, calls: CallReader | None = None, *, keeps_reasoning: bool = False, opened: str = ""
    ) -> None:
        self.content = ""
        self.reasoning = ""
        self._is_plain = keeps_reasoning
        self._calls = calls
        self._text = opened
        self._answer = ""

    def push(self, piece: str) -> list[Delta]:
        """What a piece of text adds."""
        if self._is_plain:
            return self._answered(piece)
        self._text += piece
        parts = split_reasoning(self._text)
        # the white space at the end of reasoning is no part of it, if it is the end
        reasoning = parts.reasoning.rstrip() if parts.open else parts.reasoning
        deltas = self._reasoned(reasoning[len(self.reasoning) :])
        deltas += self._answered(parts.answer[len(self._answer) :])
        if not parts.open and not parts.reasoning and parts.answer == self._text:
            self._is_plain = True
        return deltas

    def end(self, *, is_cut: bool = False) -> list[Delta]:
        """What is left at the end of the text.

        Args:
            is_cut: the text was cut, so the beginning of a tag or of a call is left out.
        """
        deltas = list[Delta]()
        if not self._is_plain and self._text and not is_cut:
            parts = split_reasoning(self._text)
            if parts.open and not parts.reasoning and not self.reasoning:
                # the beginning of a tag that never came
                deltas += self._answered(self._text[len(self._answer) :])
        return deltas + (self._noted(self._calls.end(is_cut=is_cut)) if self._calls else [])

    def _reasoned(self, text: str) -> list[Delta]:
        self.reasoning += text
        return [Reasoning(text)] if text else []

    def _answered(self, text: str) -> list[Delta]:
        """More of what is not reasoning."""
        self._answer += text
        if self._calls is not None:
            return self._noted(self._calls.push(text))
        return self._noted([Content(text)] if text else [])

    def _noted(self, events: list[CallEvent]) -> list[Delta]:
        deltas = [event for event in events if not isinstance(event, CallEnded)]
        for delta in deltas:
            if isinstance(delta, Content):
                self.content += delta.text
        return [*deltas]
