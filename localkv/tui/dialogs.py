"""The dialogs in front of the chat: a question, models, sessions, keys and commands."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, ClassVar

from textual import on, work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Input, Label, OptionList, Static
from textual.widgets.option_list import Option

from localkv.chat.store import SessionSummary, Store
from localkv.errors import LocalKVError, counted
from localkv.system.terminal_text import visible
from localkv.tui.figures import ago, size, title_line
from localkv.tui.slash_commands import COMMANDS

if TYPE_CHECKING:
    from localkv.chat.model_choice import OfferedModel


class ChoiceScreen(ModalScreen[str | None]):
    """Dismissed with the chosen answer's id, or None by Esc.

    Args:
        question: the text above the choices.
        choices: (id, answer, meaning); an id that is empty can't be chosen.
    """

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "dismiss", "Leave it")]

    def __init__(self, question: str, choices: Sequence[tuple[str, str, str]]) -> None:
        super().__init__()
        self.question = question
        self.choices = choices

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog"):
            yield Label(Content(self.question), classes="question")
            options = [
                Option(
                    Content.assemble((answer, "bold"), "\n", (meaning, "$muted")),
                    id=name or None,
                    disabled=not name,
                )
                for name, answer, meaning in self.choices
            ]
            yield OptionList(*options)
            yield Label("↑↓ choose   Enter take   Esc leave it as it is", classes="keys")

    @on(OptionList.OptionSelected)
    def _chosen(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(event.option_id)


class ModelScreen(ModalScreen[str | None]):
    """Dismissed with a path or a name, which may be one that was typed, or with None.

    Args:
        find: lists the models, which may take a while.
        current: the file that is loaded, which is marked.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "dismiss", "Back"),
        Binding("down", "move(1)", "Down", show=False),
        Binding("up", "move(-1)", "Up", show=False),
    ]

    def __init__(self, find: Callable[[], Sequence[OfferedModel]], current: str) -> None:
        super().__init__()
        self._find = find
        self._current = current
        self._models: Sequence[OfferedModel] = ()

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog"):
            yield Input(placeholder="Part of a name, or the path of a file", compact=True)
            yield OptionList()
            yield Label("↑↓ choose   Enter load   Esc back", classes="keys")

    def on_mount(self) -> None:
        self._list("", "Looking for models …")
        self._look()

    @work
    async def _look(self) -> None:
        nothing = "No model on this machine: localkv pull fetches one"
        try:
            self._models = await asyncio.to_thread(self._find)
        except OSError as error:
            nothing = str(error)
        self._list(self.query_one(Input).value, nothing)

    def _list(self, text: str, nothing: str) -> None:
        words = text.lower().split()
        found = [m for m in self._models if all(word in m.name.lower() for word in words)]
        options = self.query_one(OptionList)
        options.clear_options()
        options.add_options([self._option(model) for model in found])
        if found:
            options.highlighted = 0
        else:
            options.add_option(Option(Content(nothing), disabled=True))

    def _option(self, model: OfferedModel) -> Option:
        if model.state:
            about = f"on the server · {visible(model.state)}"
        else:
            is_open = Path(model.model).resolve() == Path(self._current).resolve()
            about = size(model.n_bytes) + (" · loaded" if is_open else "")
        shown = Content.assemble((visible(model.name), "bold"), "\n", (about, "$muted"))
        return Option(shown, id=model.model)

    @on(Input.Changed)
    def _typed(self, event: Input.Changed) -> None:
        self._list(event.value, "Not on this machine by that name; Enter takes it as a path")

    @on(Input.Submitted)
    def _entered(self, event: Input.Submitted) -> None:
        options = self.query_one(OptionList)
        if options.highlighted is None:
            self.dismiss(event.value.strip() or None)
        else:
            options.action_select()

    @on(OptionList.OptionSelected)
    def _chosen(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(event.option_id)

    def action_move(self, step: int) -> None:
        options = self.query_one(OptionList)
        options.action_cursor_down() if step > 0 else options.action_cursor_up()


_KEYS = "↑↓ choose   Enter resume   Ctrl+D delete   Esc back"


class SessionsScreen(ModalScreen[int | None]):
    """Dismissed with the id of the session to resume, or None.

    Args:
        store: the sessions.
        current_id: the session that is open, which is marked.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "dismiss", "Back"),
        Binding("down", "move(1)", "Down", show=False),
        Binding("up", "move(-1)", "Up", show=False),
        Binding("ctrl+d", "delete", "Delete", priority=True),
    ]

    def __init__(self, store: Store, current_id: int | None) -> None:
        super().__init__()
        self.store = store
        self.current_id = current_id
        self.deleted: set[int] = set()
        self._found: list[SessionSummary] = []
        self._asked: int | None = None

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog"):
            yield Input(placeholder="Search in titles and messages", compact=True)
            yield OptionList()
            yield Label(_KEYS, classes="keys")

    def on_mount(self) -> None:
        self._search("")

    def _search(self, text: str) -> None:
        nothing = "No session matches" if text else "No session yet"
        try:
            self._found = self.store.sessions(text)
        except LocalKVError as error:
            self._found, nothing = [], str(error)
        options = self.query_one(OptionList)
        at = options.highlighted or 0
        options.clear_options()
        options.add_options([self._option(session) for session in self._found])
        if self._found:
            options.highlighted = min(at, len(self._found) - 1)
        else:
            options.add_option(Option(Content(nothing), disabled=True))
        self._ask(None)

    def _option(self, session: SessionSummary) -> Option:
        mark = " · open" if session.id == self.current_id else ""
        facts = f"{counted(session.n_messages, 'message')} · {ago(session.updated)}{mark}"
        prompt = Content.assemble((title_line(session.title), "bold"), "\n", (facts, "$muted"))
        return Option(prompt, id=str(session.id))

    def _ask(self, session_id: int | None) -> None:
        """Ask whether to delete a session."""
        self._asked = session_id
        keys = self.query_one(".keys", Label)
        keys.set_class(session_id is not None, "-warning")
        keys.update(_KEYS if session_id is None else "Ctrl+D again deletes it for good")

    @on(Input.Changed)
    def _typed(self, event: Input.Changed) -> None:
        self._search(event.value)

    @on(Input.Submitted)
    def _entered(self) -> None:
        self.query_one(OptionList).action_select()

    @on(OptionList.OptionHighlighted)
    def _moved(self) -> None:
        self._ask(None)

    @on(OptionList.OptionSelected)
    def _chosen(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(int(event.option_id) if event.option_id else None)

    def action_move(self, step: int) -> None:
        options = self.query_one(OptionList)
        options.action_cursor_down() if step > 0 else options.action_cursor_up()

    def action_delete(self) -> None:
        at = self.query_one(OptionList).highlighted
        if at is None or at >= len(self._found):
            return
        session = self._found[at]
        if self._asked != session.id:
            self._ask(session.id)
            return
        try:
            self.store.delete_session(session.id)
        except LocalKVError as error:
            self.notify(str(error), severity="error", markup=False)
            return
        self.deleted.add(session.id)
        self._search(self.query_one(Input).value)


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
