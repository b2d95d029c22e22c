"""What a text turns out to be, piece by piece, and the calls that come of it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias


@dataclass(frozen=True)
class Content:
    """A piece of text that is no call."""

    text: str


@dataclass(frozen=True)
class CallBegun:
    """The model calls a tool.

    Attributes:
        index: of the call in this answer, from 0.
        id: made here.
        name: of the tool, which may be one that there is not.
    """

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class CallArguments:
    """A piece of a call's arguments: together they are a JSON object as text."""

    index: int
    text: str


@dataclass(frozen=True)
class CallEnded:
    """A call is over.

    Attributes:
        is_whole: its arguments are JSON. False if the text broke off in them, or went on with
            something else: the call had begun by then, so it stays one.
    """

    index: int
    is_whole: bool


CallEvent: TypeAlias = Content | CallBegun | CallArguments | CallEnded


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool.

    Attributes:
        id: made here.
        name: of the tool.
        arguments: a JSON object as text; broken off where `is_whole` is False.
    """

    id: str
    name: str
    arguments: str
    is_whole: bool = True

    @property
    def values(self) -> dict[str, Any]:
        """The arguments by name; none if they are no JSON object."""
        try:
            values = json.loads(self.arguments)
        except (ValueError, RecursionError):
            return {}
        return values if isinstance(values, dict) else {}

    def message(self) -> dict[str, Any]:
        """As it stands among `tool_calls` of a message, for the next prompt."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


def gathered(events: Iterable[CallEvent]) -> tuple[str, tuple[ToolCall, ...]]:
    """The text that is no call, and the calls."""
    text = ""
    names, arguments, whole = [], [""] * 0, set[int]()
    for event in events:
        match event:
            case Content(piece):
                text += piece
            case CallBegun(_, id, name):
                names.append((id, name))
                arguments.append("")
            case CallArguments(index, piece):
                arguments[index] += piece
            case CallEnded(index, True):
                whole.add(index)
    return text, tuple(
        ToolCall(id, name, arguments[i], i in whole) for i, (id, name) in enumerate(names)
    )
