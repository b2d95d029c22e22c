"""`AuditScreen`: what the packed cache changed in an answer, with its tokens marked in the text."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Static

from localkv.chat.engine import Audited
from localkv.system.terminal_text import visible

MARK = "reverse $warning"


def marked_text(audited: Audited) -> Content:
    """The answer, its flips in another colour."""
    parts: list[Content] = []
    at = 0
    for start, end in zip(audited.starts, audited.ends, strict=True):
        if start < at:  # several tokens of one character
            continue
        parts += [
            Content(visible(audited.text[at:start])),
            Content.styled(visible(audited.text[start:end]), MARK),
        ]
        at = end
    return Content.assemble(*parts, Content(visible(audited.text[at:])))


class AuditScreen(ModalScreen[None]):
    """Esc closes it.

    Args:
        audited: what was found.
    """

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q", "dismiss", "Back")]

    def __init__(self, audited: Audited) -> None:
        super().__init__()
        self.audited = audited

    def compose(self) -> ComposeResult:
        with VerticalScroll(classes="dialog"):
            yield Static(Content.styled("What the packed cache changed", "bold"))
            yield Static(Content(visible(self.audited.line)), id="audit-line", classes="keys")
            yield Static(marked_text(self.audited), id="audit-text", classes="question")
            yield Static(
                Content("\n").join(Content(visible(flip)) for flip in self.audited.flips),
                id="audit-flips",
            )
            yield Static("Esc: back", classes="keys")
