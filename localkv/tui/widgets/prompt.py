"""The foot of the screen: the prompt with its history and hints, the queue above it, and the keys.

Messages that are sent while an answer is written wait in the queue. They are sent in order, each
after the answer to the one before. After an answer that was stopped, cut or failed they are held
until the user sends again.
"""

from __future__ import annotations

import asyncio
import os.path
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from textual import events, on, work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.message import Message
from textual.strip import Strip
from textual.widget import Widget
from textual.widgets import Footer, Static, TextArea
from textual.widgets._footer import FooterKey  # its class of a key is not exported

from localkv.system.terminal_text import visible, without_controls


class TextField(TextArea):
    """A text area that has no least size and takes every character that can be typed.

    Ctrl+Z is the terminal's here as in other programs, so Ctrl+_ takes a change back.
    """

    BINDINGS: ClassVar[list[BindingType]] = [Binding("ctrl+underscore", "undo", "Undo", show=False)]

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
    """The field for the next message.

    Enter sends. Shift+Enter or Ctrl+J break the line. Up and Down at its ends recall earlier
    prompts. Tab completes a slash command or the name of a model. Ctrl+D quits if it is empty.

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
    """A message that waits, on one line.

    Args:
        at: its place in the queue, from 0.
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


LAST = "help"
"""The action whose key stays when others have to go, since it leads to all of them."""


class FittingFooter(Footer):
    """Textual's footer, which would cut off what does not fit; on a narrow screen it has fewer."""

    def compose(self) -> ComposeResult:
        keys = [widget for widget in super().compose() if isinstance(widget, FooterKey)]
        room = self.app.size.width
        fitting: set[Widget] = set()
        for key in sorted(keys, key=lambda key: (key.action != LAST, _is_palette(key))):
            width = _width(key)
            if width > room:
                break
            room -= width
            fitting.add(key)
        yield from (key for key in keys if key in fitting)

    def on_resize(self) -> None:
        self.refresh(recompose=True)


def _is_palette(key: FooterKey) -> bool:
    return key.has_class("-command-palette")


def _width(key: FooterKey) -> int:
    """Cells of a key, its description and the spaces around both."""
    return len(key.key_display) + 2 + len(key.description) + 1
