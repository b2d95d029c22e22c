"""`TextField`: Textual's text area, as the chat's fields for longer texts need it."""

from __future__ import annotations

import unicodedata
from typing import ClassVar

from textual import events
from textual.binding import Binding, BindingType
from textual.strip import Strip
from textual.widgets import TextArea

from localkv.system.terminal_text import without_controls


class TextField(TextArea):
    """A text area that has no least size and takes every character that can be typed.

    Ctrl+Z is the terminal's here as in other programs, so Ctrl+_ takes a change back.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+underscore", "undo", "Undo", show=False),
    ]

    def render_line(self, y: int) -> Strip:
        """A line of the area; nothing where there is no room for any character."""
        if self.content_size.width < 1:  # a placeholder can't be wrapped to that
            return Strip.blank(self.size.width, self.rich_style)
        return super().render_line(y)

    async def _on_key(self, event: events.Key) -> None:
        # Textual takes printable characters only, and Python calls those that join others
        # (in 👩‍🚀, in Persian) not printable
        if event.character is not None and _joins(event.character) and not self.read_only:
            event.stop()
            event.prevent_default()
            self.insert(event.character)
            return
        await super()._on_key(event)


def _joins(key: str) -> bool:
    """Whether a character is a format character such as U+200D, and none that steers a terminal."""
    return len(key) == 1 and unicodedata.category(key) == "Cf" and bool(without_controls(key))
