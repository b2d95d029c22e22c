"""`CallReader`: finds calls in an answer, fed with its text as it comes."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable

from localkv.tool_calls.family import Family
from localkv.tool_calls.source import CallArguments, CallEvent, Content, Source
from localkv.tool_calls.tools import Tools

_LETTERS = string.ascii_letters + string.digits
_ID_SIZE = 24


class CallReader:
    """Splits an answer into text and calls.

    How the text is cut into pieces changes nothing but where deltas end. Text that is no call stays
    text. Reasoning has to be taken out before. A server makes one for each answer::

        reader = CallReader(family_of(template), tools)
        for piece in answer:
            send(reader.push(piece))
        send(reader.end())

    Args:
        family: of the model (`detection.family_of`).
        tools: of the request; with none, all is text.
        new_id: makes the ids of calls; None makes random ones, as the family takes them.

    Attributes:
        n_calls: that have begun.
    """

    def __init__(
        self, family: Family, tools: Tools, *, new_id: Callable[[], str] | None = None
    ) -> None:
        self._source = Source(new_id or (lambda: _new_id(family.id_size)))
        self._steps = family.parse(self._source, tools) if tools else None

    @property
    def n_calls(self) -> int:
        return self._source.n_calls

    def push(self, piece: str) -> list[CallEvent]:
        """What a piece of text adds."""
        if self._steps is None:
            return [Content(piece)] if piece else []
        self._source.text += piece
        return self._news()

    def end(self, *, is_cut: bool = False) -> list[CallEvent]:
        """What is left at the end of the text.

        Args:
            is_cut: the text was cut. What belongs to a call, or may become one, is no text then,
                and arguments end where they are.
        """
        if self._steps is None:
            return []
        self._source.is_all = not is_cut
        return self._news(is_cut=is_cut)

    def _news(self, *, is_cut: bool = False) -> list[CallEvent]:
        source = self._source
        if is_cut:
            source.end_call(is_whole=False)
        elif self._steps is not None:
            next(self._steps, None)
        if source.is_all:
            source.say(source.text[source.at :])
            source.finish()
        news, source.events = _joined(source.events), []
        return news


def _new_id(size: int) -> str:
    letters = "".join(secrets.choice(_LETTERS) for _ in range(size or _ID_SIZE))
    return letters if size else f"call_{letters}"


def _joined(events: list[CallEvent]) -> list[CallEvent]:
    """Events with neighbours of a kind as one."""
    joined: list[CallEvent] = []
    for event in events:
        last = joined[-1] if joined else None
        if isinstance(event, Content) and isinstance(last, Content):
            joined[-1] = Content(last.text + event.text)
        elif isinstance(event, CallArguments) and isinstance(last, CallArguments):
            joined[-1] = CallArguments(event.index, last.text + event.text)
        else:
            joined.append(event)
    return joined
