"""An answer while it comes, split into reasoning, calls of tools, and the rest.

`AnswerReader` splits one text, `Answers` read the events of all texts of a request, and `Parts` put
the pieces together where a dialect has them in a row: content blocks in Anthropic's API, output
items in OpenAI's Responses.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from localkv.chat.reasoning import split_reasoning
from localkv.engine_process.texts import Ended, Event, Piece
from localkv.engine_process.wire import named_error
from localkv.errors import LocalKVError
from localkv.server.engine_client import Texts
from localkv.server.failures import as_request_error
from localkv.tool_calls.family import CallReader
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


class Answers:
    """One answer or more to the same prompt.

    Args:
        texts: as the engine writes them.
        readers: one for each.
        prompt: the text of the conversation, as the model reads it.
        n_prompt: its tokens.

    Attributes:
        ends: of the answers, None for those that go on.
    """

    def __init__(
        self, texts: Texts, readers: Sequence[AnswerReader], prompt: str = "", n_prompt: int = 0
    ) -> None:
        self.texts = texts
        self.prompt, self.n_prompt = prompt, n_prompt
        self.readers = list(readers)
        self.ends: list[Ended | None] = [None] * len(self.readers)

    @property
    def ended(self) -> list[Ended]:
        """The ends that are known."""
        return [end for end in self.ends if end is not None]

    async def news(self) -> AsyncIterator[tuple[int, Event, list[Delta]]]:
        """What happens: the number of an answer, the event, and the deltas that it brings.

        Raises:
            RequestError: an answer can't be completed.
        """
        try:
            async for events in self.texts:
                for index, event in events:
                    yield index, event, self._deltas(index, event)
        except LocalKVError as error:
            raise as_request_error(error) from error

    def _deltas(self, index: int, event: Event) -> list[Delta]:
        reader = self.readers[index]
        if isinstance(event, Piece):
            return reader.push(event.text)
        if isinstance(event, Ended):
            if event.error:
                raise as_request_error(named_error(event.kind, event.error))
            self.ends[index] = event
            return reader.end(is_cut=event.finish_reason != "stop" or event.stop is not None)
        return []

    def close(self) -> None:
        """Nobody reads the rest."""
        self.texts.close()


@dataclass
class Part:
    """A part so far.

    Attributes:
        index: among all parts of the answer.
        text: of a call, its arguments.
        id, name: of a call.
    """

    index: int
    kind: Literal["reasoning", "content", "call"]
    text: str = ""
    id: str = ""
    name: str = ""


@dataclass(frozen=True)
class PartEvent:
    """A part begins, grows by `added`, or is complete."""

    what: Literal["begun", "grown", "done"]
    part: Part
    added: str = ""


class Parts:
    """Puts deltas together to parts.

    Attributes:
        all: parts so far; the last may go on.
    """

    def __init__(self) -> None:
        self.all = list[Part]()
        self._is_open = False

    def push(self, deltas: Sequence[Delta]) -> list[PartEvent]:
        """What deltas do to the parts."""
        events = list[PartEvent]()
        for delta in deltas:
            if isinstance(delta, CallBegun):
                events += self._open(Part(len(self.all), "call", id=delta.id, name=delta.name))
                continue
            if not isinstance(delta, CallArguments):
                kind = "reasoning" if isinstance(delta, Reasoning) else "content"
                if not (self._is_open and self.all[-1].kind == kind):
                    new = Part(len(self.all), kind)  # type: ignore[arg-type]
                    events += self._open(new)
            part = self.all[-1]
            part.text += delta.text
            events.append(PartEvent("grown", part, delta.text))
        return events

    async def whole(self, answers: Answers) -> Ended:
        """Put all of the only answer together; how it ended.

        Raises:
            RequestError: it can't be completed.
        """
        async for _, _, deltas in answers.news():
            self.push(deltas)
        self.end()
        (end,) = answers.ended
        return end

    def end(self) -> list[PartEvent]:
        """The answer is complete."""
        if not self._is_open:
            return []
        self._is_open = False
        return [PartEvent("done", self.all[-1])]

    def _open(self, part: Part) -> list[PartEvent]:
        events = self.end()
        self.all.append(part)
        self._is_open = True
        return [*events, PartEvent("begun", part)]
