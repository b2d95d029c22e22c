"""The fields that longer texts are written in: the prompt, with its history and its hints."""

from __future__ import annotations

import asyncio
import os.path
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from textual import events, on, work
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.message import Message
from textual.strip import Strip
from textual.widgets import Static, TextArea

from localkv.system.terminal_text import visible, without_controls
from localkv.tui.widgets.waiting import WaitingEditWanted


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


PLACEHOLDER = "Message — Enter sends, Ctrl+J breaks the line, / lists commands"

MODEL = "/model "
"""The command whose argument is completed."""
MOST_NAMES = 6
"""Names that are shown."""


class CommandHints(Static):
    """The slash commands that begin with the text."""

    _commands = Content("")

    def on_mount(self) -> None:
        self.display = False

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


@dataclass
class PromptSubmitted(Message):
    """The user has sent a text."""

    text: str


class Prompt(TextField):
    """Enter sends; Shift+Enter or Ctrl+J break the line; Up and Down at its ends recall; Tab
    completes a slash command or the name of a model; Ctrl+D quits if it is empty.

    Args:
        sent: earlier prompts, the newest last.
        commands: the usage and the description of each slash command.
        hints: shows what the text may become.
        model_names: finds the names of models that begin with a text; may take a while.

    Attributes:
        has_waiting: messages wait to be sent; Up in an empty prompt takes the last of them back.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "submit", "Send", show=True),
        Binding("shift+enter,ctrl+j", "newline", "New line", show=False),
        Binding("up", "up", "Earlier prompt", show=False),
        Binding("down", "down", "Later prompt", show=False),
        Binding("tab", "complete", "Complete", show=False),
    ]

    def __init__(
        self,
        sent: Sequence[str],
        commands: Sequence[tuple[str, str]],
        hints: CommandHints,
        model_names: Callable[[str], list[str]],
    ) -> None:
        super().__init__(placeholder=PLACEHOLDER, highlight_cursor_line=False, compact=True)
        self.sent = list(sent)
        self._at = len(self.sent)
        self._draft = ""
        self.has_waiting = False
        self._commands = commands
        self._hints = hints
        self._model_names = model_names

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
        """Remember the text, which was taken, and empty the field."""
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

    @on(TextArea.Changed)
    def _typed(self) -> None:
        self._hints.show_matching(self.text, self._commands)
        if self.text.startswith(MODEL) and "\n" not in self.text:
            self._hint_at_models(self.text)

    @work(group="completion", exclusive=True)
    async def _hint_at_models(self, text: str) -> None:
        names = await self._found(text)
        if self.text == text:
            self._hints.show_names(names)

    async def _found(self, text: str) -> list[str]:
        return await asyncio.to_thread(self._model_names, text.removeprefix(MODEL).lstrip())

    def action_complete(self) -> None:
        """Complete a slash command or the name of a model, or move on to the next field."""
        text = self.text
        names = [
            name for usage, _ in self._commands if (name := usage.split(" ")[0]).startswith(text)
        ]
        if text.startswith(MODEL):
            self._complete_model(text)
        elif text.startswith("/") and names:
            self.fill(names[0] + " ")
        else:
            self.screen.focus_next()

    @work(group="completion", exclusive=True)
    async def _complete_model(self, text: str) -> None:
        """Add what all names have in common that begin so; the first of them if that is nothing."""
        names = await self._found(text)
        if not names or self.text != text:
            return
        typed = text.removeprefix(MODEL).lstrip()
        # letters in common, as a shell completes them, and not parts of a path
        common = os.path.commonprefix(names)  # noqa: RUF071
        self.fill(MODEL + (common if len(common) > len(typed) else names[0]))
