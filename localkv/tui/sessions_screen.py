"""`SessionsScreen`: the sessions that are stored, to be searched, resumed and deleted."""

from __future__ import annotations

from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Input, Label, OptionList
from textual.widgets.option_list import Option

from localkv.chat.store import SessionSummary, Store
from localkv.errors import LocalKVError, counted
from localkv.tui.figures import ago, title_line

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
