"""`Waiting`: the queue of messages that were sent while an answer is still being written.

They are sent in order, each after the answer to the one before. After an answer that was stopped,
cut or failed they are held until the user sends again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.message import Message
from textual.widgets import Static

from localkv.system.terminal_text import visible

SOON = "Waiting for the answer · Up or e takes one back, Delete removes it"
HELD = "Waiting · Enter sends the first"


@dataclass
class WaitingEditWanted(Message):
    """The user wants a message back that waits to be sent."""

    at: int


@dataclass
class WaitingRemoved(Message):
    """The user no longer wants to send a message that waits."""

    at: int


class WaitingMessage(Static, can_focus=True):
    """One of them, on one line.

    Args:
        at: its place among them, from 0.
        text: all of it.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("e,enter", "edit", "Edit", key_display="e"),
        Binding("delete,d,backspace", "remove", "Remove", key_display="Del"),
        Binding("up,k", "screen.select_message(-1)", "Previous message", show=False),
        Binding("down,j", "screen.select_message(1)", "Next message", show=False),
    ]

    def __init__(self, at: int, text: str) -> None:
        more = " …" if "\n" in text.strip() else ""
        line = visible(text.strip().split("\n", 1)[0].expandtabs(4))
        super().__init__(Content.assemble((f"{at + 1}  ", "$muted"), line, (more, "$muted")))
        self.at = at

    def action_edit(self) -> None:
        self.post_message(WaitingEditWanted(self.at))

    def action_remove(self) -> None:
        self.post_message(WaitingRemoved(self.at))


class Waiting(VerticalScroll, can_focus=False):
    """The queue of messages, shown above the prompt unless it is empty.

    Attributes:
        texts: their texts, the next one first.
    """

    def __init__(self) -> None:
        super().__init__(id="waiting")
        self.texts: tuple[str, ...] = ()
        self._place: int | None = None

    def compose(self) -> ComposeResult:
        yield Static("", id="waiting-heading")

    def on_mount(self) -> None:
        self.display = False

    def add(self, text: str) -> None:
        """Put a text at the end, or in the place that one was taken from to be edited."""
        place = len(self.texts) if self._place is None else self._place
        self._place = None
        self.texts = (*self.texts[:place], text, *self.texts[place:])

    def take_first(self) -> str:
        """Remove the first text, to send it."""
        text = self.texts[0]
        self.remove_text(0)
        if self._place:
            self._place -= 1
        return text

    def put_back(self, text: str) -> None:
        """Put a text that could not be sent before the others."""
        self.texts = (text, *self.texts)

    def take_to_edit(self, at: int) -> str:
        """Remove a text, and keep its place for what becomes of it."""
        self._place = at % len(self.texts)
        text = self.texts[self._place]
        self.remove_text(self._place)
        return text

    def remove_text(self, at: int) -> None:
        self.texts = (*self.texts[:at], *self.texts[at + 1 :])

    def take_all(self) -> tuple[str, ...]:
        """Remove all texts."""
        texts, self.texts = self.texts, ()
        return texts

    def forget_place(self) -> None:
        """The text that was taken to be edited was sent."""
        self._place = None

    def messages(self) -> list[WaitingMessage]:
        """The lines that show them."""
        return list(self.query(WaitingMessage))

    async def show(self, *, held: bool) -> None:
        """Show the texts; `held` if they wait for the user and not for an answer."""
        self.query_one("#waiting-heading", Static).update(HELD if held else SOON)
        await self.remove_children(WaitingMessage)
        await self.mount_all([WaitingMessage(at, text) for at, text in enumerate(self.texts)])
        self.display = bool(self.texts)
