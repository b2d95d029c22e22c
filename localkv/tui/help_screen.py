"""`HelpScreen`: all keys and slash commands."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Markdown

from localkv.tui.slash_commands import COMMANDS

KEYS = (
    ("Enter", "send the message"),
    ("Shift+Enter, Ctrl+J", "break the line"),
    ("Up, Down", "earlier and later prompts, at the prompt's first and last line"),
    ("Tab", "complete a slash command"),
    ("Esc", "stop after the next token; the text and the model stay"),
    ("Ctrl+R", "answer again: a branch beside the last answer"),
    ("Ctrl+N", "new chat; the old one is kept"),
    ("Ctrl+O", "sessions: resume, search, delete"),
    ("Ctrl+T", "fold or unfold reasoning"),
    ("F2", "show or hide the panel"),
    ("Alt+Up, Alt+Down", "go to a message; Esc comes back"),
    ("F5", "start the engine again"),
    ("Ctrl+P", "command palette, themes"),
    ("F1", "this page"),
    ("Ctrl+Q", "quit"),
)
MESSAGE_KEYS = (
    ("c", "copy the message"),
    ("b", "copy a block of code"),
    ("e", "edit: say it differently, on a new branch"),
    ("r", "answer again"),
    ("Left, Right", "show another branch"),
    ("Space", "fold or unfold its reasoning"),
)


def _table(title: str, rows: tuple[tuple[str, str], ...]) -> str:
    lines = [f"| {title} | |", "|---|---|"]
    return "\n".join(lines + [f"| {left} | {right} |" for left, right in rows])


def help_text() -> str:
    """The page in Markdown."""
    commands = tuple((f"`{c.usage}`", c.description) for c in COMMANDS)
    return "\n\n".join(
        [
            _table("Keys", KEYS),
            _table("On a message", MESSAGE_KEYS),
            _table("Commands", commands),
        ]
    )


class HelpScreen(ModalScreen[None]):
    """Esc or F1 closes it."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,f1,q", "dismiss", "Back")]

    def compose(self) -> ComposeResult:
        with VerticalScroll(classes="dialog -help"):
            yield Markdown(help_text())
