"""An answer as a row of parts, one after the other: reasoning, text, calls of tools.

Anthropic's API calls them content blocks, OpenAI's Responses output items.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from localkv.server.answer import Delta, Reasoning
from localkv.server.answers import Answers
from localkv.server.wire import Ended
from localkv.tool_calls.source import CallArguments, CallBegun


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
