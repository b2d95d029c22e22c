"""The audit of the last answer: when it runs, its figures in the panel, its marks in the text.

An audit tells what the packed cache changed in an answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.message import Message as TextualMessage
from textual.screen import ModalScreen
from textual.timer import Timer
from textual.widgets import Static

from localkv.chat.conversation import Message
from localkv.chat.engine import Audited
from localkv.system.terminal_text import visible
from localkv.tui.figures import spread

IDLE_SECONDS = 2.0
"""Without a key for so long, nobody waits for the model."""
WIDTH = 32
"""Cells of the panel before it is laid out."""
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


@dataclass
class AuditDue(TextualMessage):
    """Nobody has pressed a key for a while, and the last answer is not audited yet."""


class ChatAudit(Static):
    """The audit of the last answer, and its figures in the panel.

    It is empty unless an answer was audited, or has degenerated. The screen, which has the engine,
    runs the audit.

    Args:
        automatic: answers are audited when nothing else goes on.

    Attributes:
        answered: the last answer that this engine has written.
        audited: what was found of it, if it was audited.
        under_way: an audit is under way.
        is_asked_for: the user waits for it.
    """

    def __init__(self, automatic: bool) -> None:
        super().__init__("", id="audit")
        self.automatic = automatic
        self.answered: Message | None = None
        self.audited: Audited | None = None
        self.under_way = self.is_asked_for = False
        self._degenerate = ""
        self._idle: Timer | None = None

    def on_mount(self) -> None:
        self._show(None)

    def set_answer(self, answered: Message | None, degenerate: str = "") -> None:
        """Take another answer for the last one, or None; with automatic audits, wait for idleness.

        Args:
            answered: what can be audited now.
            degenerate: what is wrong with it, in one line.
        """
        self.answered, self.audited, self._degenerate = answered, None, degenerate
        self.under_way = self.is_asked_for = False
        self._show(None)
        if answered is not None and self.automatic:
            self._wait_for_idleness()

    @property
    def can_begin(self) -> bool:
        """Whether there is an answer that is not audited yet, nor being audited."""
        return self.answered is not None and self.audited is None and not self.under_way

    def begin(self) -> None:
        """An audit begins."""
        self.under_way = True
        self.display = True
        self._say(Content("…"), "comparing with an f16 cache")

    def stop(self) -> bool:
        """Nobody waits for the audit any more. Returns whether one is under way."""
        self.is_asked_for = False
        return self.under_way

    def end(self, audited: Audited) -> bool:
        """Show the end of an audit; one that was cancelled found nothing, and is repeated later.

        Returns:
            Whether the user waits for what was found.
        """
        was_asked_for, self.under_way, self.is_asked_for = self.is_asked_for, False, False
        self._show(None)
        if audited.line:
            self.audited = audited
            self._show(audited)
        return was_asked_for

    def retry_when_idle(self) -> None:
        """Repeat an automatic audit that was cancelled."""
        if self.automatic:
            self._wait_for_idleness()

    def key_pressed(self) -> bool:
        """Somebody is at the keyboard. Returns whether an audit has to end for that."""
        if self.under_way and not self.is_asked_for:
            return True
        if self._idle is not None:
            self._wait_for_idleness()
        return False

    def _wait_for_idleness(self) -> None:
        if self._idle is not None:
            self._idle.stop()
        self._idle = self.set_timer(IDLE_SECONDS, self._idle_now)

    def _idle_now(self) -> None:
        self._idle = None
        if self.automatic and self.can_begin:
            self.post_message(AuditDue())

    def _show(self, audited: Audited | None) -> None:
        self.display = audited is not None or bool(self._degenerate)
        if audited is None:
            self.update(self._warning())
            return
        n_flips = len(audited.flips)
        self._say(
            Content.styled(f"{n_flips:,} of {audited.n_tokens:,}", "$warning" if n_flips else ""),
            f"other choices than f16's; KLD {audited.kld_mean:.2g}",
        )

    def _warning(self) -> Content:
        return Content.styled(self._degenerate, "$warning")

    def _say(self, value: Content, line: str) -> None:
        width = self.content_size.width or WIDTH
        head = spread(Content.styled("Audit", "bold"), value, width)
        lines = [head, Content.styled(line, "$muted")]
        self.update(Content("\n").join([*lines, *[self._warning()] * bool(self._degenerate)]))
