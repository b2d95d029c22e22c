"""The field that a message is written in, with its history and the list of slash commands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual import events
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.widgets import Static

from localkv.system.terminal_text import visible
from localkv.tui.messages import PromptSubmitted, WaitingEditWanted
from localkv.tui.widgets.text_field import TextField

PLACEHOLDER = "Message — Enter sends, Ctrl+J breaks the line, / lists commands"

MOST_NAMES = 6
"""Names that are shown."""


class Prompt(TextField):
    """Enter sends; Shift+Enter or Ctrl+J break the line; Up and Down at its ends recall; Ctrl+D
    quits if it is empty.

    Attributes:
        has_waiting: messages wait to be sent; Up in an empty prompt takes the last of them back.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "submit", "Send", show=True),
        Binding("shift+enter,ctrl+j", "newline", "New line", show=False),
        Binding("up", "up", "Earlier prompt", show=False),
        Binding("down", "down", "Later prompt", show=False),
    ]

    def __init__(self, sent: Sequence[str] = ()) -> None:
        super().__init__(placeholder=PLACEHOLDER, highlight_cursor_line=False, compact=True)
        self.sent = list(sent)
        self._at = len(self.sent)
        self._draft = ""
        self.has_waiting = False

    async def _on_key(self, event: events.Key) -> None:
        if event.key == "ctrl+d" and not self.text:  # the end of input, as in a shell
            event.stop()
            event.prevent_default()
            await self.run_action("app.quit")
            return
        # Here, and not only as bindings: those would run after keys that were pressed later.
        action = {
            "enter": self.action_submit,
            "shift+enter": self.action_newline,
            "ctrl+j": self.action_newline,
        }.get(event.key)
        if action is None:
            await super()._on_key(event)
            return
        event.stop()
        event.prevent_default()
        action()

    def action_submit(self) -> None:
        self.post_message(PromptSubmitted(self.text))

    def action_newline(self) -> None:
        self.insert("\n")

    def accept(self) -> None:
        """The text was taken: remember it, and start anew."""
        if not self.sent or self.sent[-1] != self.text:
            self.sent.append(self.text)
        self.fill("")

    def fill(self, text: str) -> None:
        """Replace the text; a later text of the history is then this one."""
        self._at = len(self.sent)
        self.text = text
        self.move_cursor(self.document.end)

    def action_up(self) -> None:
        if self.has_waiting and not self.text:
            self.post_message(WaitingEditWanted(-1))
            return
        if self.cursor_location[0] > 0 or not self._at:
            self.action_cursor_up()
            return
        if self._at == len(self.sent):
            self._draft = self.text
        self._recall(self._at - 1)

    def action_down(self) -> None:
        if self.cursor_location[0] < self.document.line_count - 1 or self._at == len(self.sent):
            self.action_cursor_down()
            return
        self._recall(self._at + 1)

    def _recall(self, at: int) -> None:
        self._at = at
        self.text = self._draft if at == len(self.sent) else self.sent[at]
        self.move_cursor(self.document.end)


class CommandHints(Static):
    """The slash commands that begin with the text."""

    _commands = Content("")

    def show_matching(self, text: str, commands: Sequence[tuple[str, str]]) -> None:
        """Show the matching ones of (usage, description); nothing unless `text` is a command."""
        word = text.split(" ")[0]
        found = [] if not text.startswith("/") or "\n" in text else commands
        exact = [(u, d) for u, d in found if u.split(" ")[0] == word]
        found = exact or [(u, d) for u, d in found if u.startswith(word)]
        self.display = bool(found)
        rows = [
            Content.assemble((f" {usage:<24}", "$primary"), (f"{what} ", "$muted"))
            for usage, what in found
        ]
        self._commands = Content("\n").join(rows)
        self.update(self._commands)

    def show_names(self, names: Sequence[str]) -> None:
        """Show the first of some names that Tab completes, below the command they belong to."""
        rows = [Content.assemble("  ", visible(name)) for name in names[:MOST_NAMES]]
        if len(names) > MOST_NAMES:
            rows.append(Content.styled(f"  and {len(names) - MOST_NAMES} more", "$muted"))
        self.update(Content("\n").join([self._commands, *rows]))
