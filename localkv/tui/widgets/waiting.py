"""`Waiting`: the messages that are sent one after the other, once each answer is there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.widgets import Static

from localkv.system.terminal_text import visible
from localkv.tui.messages import WaitingEditWanted, WaitingRemoved

SOON = "Waiting for the answer · Up or e takes one back, Delete removes it"
HELD = "Waiting · Enter sends the first"


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
    """All of them, above the prompt; not there if there is none."""

    def compose(self) -> ComposeResult:
        yield Static("", id="waiting-heading")

    def on_mount(self) -> None:
        self.display = False

    def messages(self) -> list[WaitingMessage]:
        return list(self.query(WaitingMessage))

    async def show(self, texts: Sequence[str], *, held: bool) -> None:
        """Show these texts; `held` if they wait for the user and not for an answer."""
        self.query_one("#waiting-heading", Static).update(HELD if held else SOON)
        await self.remove_children(WaitingMessage)
        await self.mount_all([WaitingMessage(at, text) for at, text in enumerate(texts)])
        self.display = bool(texts)
