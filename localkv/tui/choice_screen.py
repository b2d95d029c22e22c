"""`ChoiceScreen`: a question with a few answers, in front of everything else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Label, OptionList
from textual.widgets.option_list import Option


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
