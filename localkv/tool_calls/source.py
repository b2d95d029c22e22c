"""`Source`: a text that comes in pieces, what a parser does with it, and the events it finds.

Parsers are generators: they take characters as if all of the text were there, and yield where they
need more than there is. What they decide depends on the text alone, and never on its pieces.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar


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
        """The call as an entry in `tool_calls` of a message, for the next prompt."""
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


T = TypeVar("T")
Steps: TypeAlias = Generator[None, None, T]
"""A part of a parser with a result; it yields where it needs more text."""

_SPACES = " \t\r\n"
_AFTER_VALUE = ",}]" + _SPACES
_OUTSIDE = re.compile(r'[\s{}\[\]:,"0-9+\-.Eaeflnrstu]')
"""Characters that JSON has outside of strings."""
MOST_NESTED = 200
"""Depth of an object: deeper ones are no arguments."""


class Source:
    """The text so far, where the parser is in it, and the events so far.

    Args:
        new_id: makes the ids of calls.

    Attributes:
        at: index of the next character.
        n_calls: that have begun.
    """

    def __init__(self, new_id: Callable[[], str]) -> None:
        self.text = ""
        self.at = 0
        self.is_all = False
        self.events: list[CallEvent] = []
        self.n_calls = 0
        self._new_id = new_id
        self._spaces = ""
        self._is_edge = True
        self._open: int | None = None

    # characters

    def peek(self) -> Steps[str]:
        """The next character, or "" at the end."""
        while self.at >= len(self.text) and not self.is_all:
            yield
        return self.text[self.at : self.at + 1]

    def follows(self, wanted: str) -> Steps[bool]:
        """Whether the text goes on with this, which is then taken."""
        while True:
            there = self.text[self.at : self.at + len(wanted)]
            if there == wanted:
                self.at += len(wanted)
                return True
            if self.is_all or not wanted.startswith(there):
                return False
            yield

    def spaces(self) -> Steps[None]:
        """Take white space."""
        while (yield from self.peek()) in _SPACES and self.at < len(self.text):
            self.at += 1

    def up_to(self, marks: tuple[str, ...], most: int) -> Steps[str | None]:
        """Take the text before the first of some marks, and the mark.

        Returns:
            the text without the mark; None if the mark does not end within `most` characters, and
            then nothing is taken.
        """
        begin = self.at
        while True:
            part = self.text[begin : begin + most]
            found = [(at, mark) for mark in marks if (at := part.find(mark)) >= 0]
            if found:
                at, mark = min(found)
                self.at = begin + at + len(mark)
                return part[:at]
            if self.is_all or len(self.text) - begin >= most:
                return None
            yield

    def text_up_to(self, *marks: str) -> Steps[str | None]:
        """Say the text before the first of some marks as it comes. No mark may begin another one.

        Returns:
            the mark, which is taken; None at the end.
        """
        most = max(len(mark) for mark in marks)
        while True:
            found = [(at, mark) for mark in marks if (at := self.text.find(mark, self.at)) >= 0]
            if found:
                end, mark = min(found)
                self.say(self.text[self.at : end])
                self.at = end + len(mark)
                return mark
            end = len(self.text)
            if not self.is_all:  # the beginning of a mark waits
                tail = self.text[max(self.at, end - most + 1) :]
                end -= max(
                    (n for n in range(1, len(tail) + 1) if _begins(marks, tail[-n:])), default=0
                )
            self.say(self.text[self.at : end])
            self.at = end
            if self.is_all:
                return None
            yield

    def streamed_up_to(self, mark: str, take: Callable[[str], None]) -> Steps[bool]:
        """Hand on the text before a mark as it comes, and take the mark; False if it never came."""
        while True:
            found = self.text.find(mark, self.at)
            end = found if found >= 0 else len(self.text) - (0 if self.is_all else len(mark) - 1)
            if end > self.at:
                take(self.text[self.at : end])
                self.at = end
            if found >= 0:
                self.at = found + len(mark)
                return True
            if self.is_all:
                return False
            yield

    # JSON

    def string(self) -> Steps[str | None]:
        """A JSON string, or None if there is none."""
        begin = self.at
        if (yield from self.peek()) != '"':
            return None
        self.at += 1
        while char := (yield from self.peek()):
            self.at += 1
            if char == "\\":
                yield from self.peek()
                self.at += 1
            elif char == '"':
                value = _parsed(self.text[begin : self.at])
                return value if isinstance(value, str) else None
        return None

    def value(self, take: Callable[[str], None] = lambda piece: None) -> Steps[str | None]:
        """The text of a JSON value, or None if there is none; `take` has it as it comes."""
        begin, closers, is_string = self.at, list[str](), False
        while char := (yield from self.peek()):
            if is_string:
                self.at += 1
                if char == "\\":
                    yield from self.peek()
                    take(self.text[self.at - 1 : self.at + 1])
                    self.at += 1
                    continue
                is_string = char != '"'
            elif _OUTSIDE.match(char) is None or (
                not closers and self.at > begin and char in _AFTER_VALUE
            ):
                break
            else:
                self.at += 1
                if char in "{[":
                    closers.append("}" if char == "{" else "]")
                elif char in "}]" and (not closers or closers.pop() != char):
                    return None
                if len(closers) > MOST_NESTED:
                    return None
                is_string = char == '"'
            take(char)
            if not closers and not is_string and char in '}]"':
                break
        text = self.text[begin : self.at]
        return text if _parsed(text) is not _NOTHING else None

    # events

    def say(self, text: str) -> None:
        """A piece of text is no call. White space beside calls is dropped."""
        if self._is_edge:
            self._spaces += text[: len(text) - len(text.lstrip())]
            text = text.lstrip()
            if not text:
                return
            if not self.n_calls:
                text = self._spaces + text
            self._is_edge, self._spaces = False, ""
        if text:
            self.events.append(Content(text))

    def begin_call(self, name: str) -> None:
        """A call has begun."""
        self._open = self.n_calls
        self.events.append(CallBegun(self.n_calls, self._new_id(), name))
        self.n_calls += 1
        self._is_edge, self._spaces = True, ""

    def argue(self, text: str) -> None:
        """A piece of the open call's arguments."""
        if self._open is not None and text:
            self.events.append(CallArguments(self._open, text))

    def end_call(self, *, is_whole: bool) -> None:
        """The open call is over."""
        if self._open is not None:
            self.events.append(CallEnded(self._open, is_whole))
            self._open = None

    def finish(self) -> None:
        """Nothing comes any more."""
        self.end_call(is_whole=False)
        if self._spaces and not self.n_calls:
            self.events.append(Content(self._spaces))
        self._spaces = ""


_NOTHING = object()


def _begins(marks: tuple[str, ...], text: str) -> bool:
    return any(mark.startswith(text) for mark in marks)


def _parsed(text: str) -> object:
    """What JSON text stands for; `_NOTHING` if it is none."""
    try:
        value: object = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return _NOTHING
    return value
