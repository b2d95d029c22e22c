"""`HelpScreen`: all keys and slash commands."""

from __future__ import annotations

from textwrap import wrap
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Static

from localkv.tui.slash_commands import COMMANDS

KEYS = (
    ("Enter", "send the message; while an answer is written it waits above the prompt"),
    ("Shift+Enter, Ctrl+J", "break the line"),
    ("Up, Down", "earlier and later prompts, at the prompt's first and last line"),
    ("Tab", "complete a slash command, and the name of a model"),
    ("Esc", "stop after the next token; the text and the model stay"),
    ("Ctrl+R", "answer again: a branch beside the last answer"),
    ("Ctrl+G", "go on with an answer that was cut"),
    ("Ctrl+N", "new chat; the old one is kept"),
    ("Ctrl+O", "sessions: resume, search, delete"),
    ("Ctrl+T", "fold or unfold reasoning"),
    ("Ctrl+C", "copy the text selected with the mouse"),
    ("F2", "show or hide the panel"),
    ("Alt+Up, Alt+Down", "go to a message, also to one that waits; Esc comes back"),
    ("F5", "start the engine again"),
    ("Ctrl+P", "command palette, themes"),
    ("F1", "this page"),
    ("Ctrl+_", "take a change of the text back"),
    ("Ctrl+Z", "suspend; fg in the shell comes back"),
    ("Ctrl+Q", "quit; Ctrl+D does in an empty prompt"),
)
MESSAGE_KEYS = (
    ("c", "copy the message"),
    ("b", "copy a block of code"),
    ("e", "edit: say it differently, on a new branch"),
    ("r", "answer again"),
    ("g", "go on, if it was cut"),
    ("<, >", "move long lines of code"),
    ("Left, Right", "show another branch"),
    ("Space", "fold or unfold its reasoning"),
)

WAITING_KEYS = (
    ("Up", "in an empty prompt: take the last one back"),
    ("e", "edit: take it back into the prompt"),
    ("Delete", "remove it"),
)

DESCRIPTION_WIDTH = 44
"""Columns, so that the page fits a terminal of 80."""


def help_text() -> Content:
    """The page."""
    sections = [
        ("Keys", KEYS),
        ("On a message", MESSAGE_KEYS),
        ("On a message that waits", WAITING_KEYS),
        ("Commands", tuple((command.usage, command.description) for command in COMMANDS)),
    ]
    lines: list[Content] = []
    for title, rows in sections:
        lines += [Content(""), Content.styled(title, "bold")]
        for left, right in rows:
            first, *more = wrap(right, DESCRIPTION_WIDTH)
            lines.append(Content.assemble((f"{left:<21}", "$primary"), first))
            lines += [Content(" " * 21 + part) for part in more]
    return Content("\n").join(lines[1:])


class HelpScreen(ModalScreen[None]):
    """Esc or F1 closes it."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,f1,q", "dismiss", "Back")]

    def compose(self) -> ComposeResult:
        with VerticalScroll(classes="dialog"):
            yield Static(help_text())
