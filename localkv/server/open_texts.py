"""The requests that have not ended, and how far each of them is."""

from __future__ import annotations

from dataclasses import dataclass

from localkv.server.wire import Ended, Event, Piece, Reading, Refused, Submit


@dataclass
class OpenText:
    """A text that grows, or waits.

    Attributes:
        submit: the request.
        n_cached: tokens of its prompt that were evaluated before it came.
        n_read: tokens of its prompt that are evaluated, those included.
        n_tokens: that were drawn.
        has_new_line: whether it has more than one line.
    """

    submit: Submit
    n_cached: int = 0
    n_read: int = 0
    n_tokens: int = 0
    has_new_line: bool = False


class OpenTexts(dict[int, OpenText]):
    """By their numbers."""

    def add(self, submit: Submit) -> None:
        """A request goes to the engine."""
        self[submit.id] = OpenText(submit)

    def note(self, event: Event) -> None:
        """Something has happened to one of them."""
        text = self.get(event.id)
        if text is None:
            return
        if isinstance(event, Reading):
            text.n_cached, text.n_read = event.n_cached, event.n_held
        elif isinstance(event, Piece):
            text.n_tokens, text.n_read = event.n_tokens, len(text.submit.ids)
            text.has_new_line = text.has_new_line or "\n" in event.text
        elif isinstance(event, Ended | Refused):
            del self[event.id]
