"""`ModelScreen`: the models on this machine, to choose the one to talk with."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from textual import on, work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Input, Label, OptionList
from textual.widgets.option_list import Option

from localkv.system.terminal_text import visible
from localkv.tui.figures import size

if TYPE_CHECKING:
    from localkv.chat.model_choice import LocalModel


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

    def __init__(self, find: Callable[[], Sequence[LocalModel]], current: str) -> None:
        super().__init__()
        self._find = find
        self._current = Path(current)
        self._models: Sequence[LocalModel] = ()

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

    def _option(self, model: LocalModel) -> Option:
        mark = " · loaded" if model.path.resolve() == self._current.resolve() else ""
        shown = Content.assemble(
            (visible(model.name), "bold"), "\n", (f"{size(model.n_bytes)}{mark}", "$muted")
        )
        return Option(shown, id=str(model.path))

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
