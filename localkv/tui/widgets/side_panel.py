"""The panel at the right: the model, the cache meter, speed, the audit, settings."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from textual import on
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.content import Content
from textual.message import Message
from textual.widgets import Input, Label, Static, TextArea

from localkv.chat.engine import EngineFacts, TextDelta
from localkv.chat.session import ChatSession
from localkv.tui.chat_audit import ChatAudit
from localkv.tui.figures import columns, size, spread
from localkv.tui.widgets.engine_view import CacheMeter
from localkv.tui.widgets.prompt import TextField

N_VALUES = 64
"""Deltas that are looked back on."""
HEIGHT = 2
WIDTH = 32
"""Cells of the panel before it is laid out."""


class History(Static):
    """A title with the newest value, and columns from zero to the largest of the last values.

    Args:
        title: the name of the measurement.
        style: the colour of the columns.
    """

    def __init__(self, title: str, style: str) -> None:
        super().__init__("")
        self.title = title
        self.style = style
        self._values: Sequence[float] = ()
        self._newest = ""

    def show(self, values: Sequence[float], newest: str) -> None:
        self._values, self._newest = values, newest
        self.on_resize()

    def on_resize(self) -> None:
        width = self.content_size.width or WIDTH
        head = spread(Content.styled(self.title, "bold"), self._newest or "—", width)
        rows = columns(self._values, width, HEIGHT)
        self.update(Content("\n").join([head, *(Content.styled(row, self.style) for row in rows)]))


class Speed(Vertical):
    """Two histories, with a value per delta."""

    def compose(self) -> ComposeResult:
        yield History("Speed", "$primary")
        yield History("Between tokens", "$accent")
        yield Static("", id="guesses")

    def on_mount(self) -> None:
        self._rates: deque[float] = deque(maxlen=N_VALUES)
        self._latencies: deque[float] = deque(maxlen=N_VALUES)
        self.clear()

    @property
    def tokens_per_second(self) -> float:
        """Over the deltas of this answer that are looked back on."""
        own = list(self._rates)[-self._n_own :] if self._n_own else []
        return len(own) / sum(1 / rate for rate in own) if own else 0.0

    def clear(self) -> None:
        """A conversation begins."""
        self._rates.clear()
        self._latencies.clear()
        self._n_own = 0
        self.draw()
        self.show_guesses(0, 0)

    def begin(self) -> None:
        """An answer begins: its figures are its own, the columns go on."""
        self._n_own = 0

    def add(self, delta: TextDelta) -> None:
        """More tokens have come; `draw` shows them."""
        total = sum(delta.seconds)
        if total <= 0:
            return
        self._n_own += 1
        self._rates.append(len(delta.seconds) / total)
        self._latencies.append(1000 * max(delta.seconds))

    def show_guesses(self, n_drafted: int, n_accepted: int) -> None:
        """Say how many guesses of the last answer were right, if it had some."""
        line = self.query_one("#guesses", Static)
        line.display = n_drafted > 0
        if n_drafted:
            figure = f"{n_accepted:,} of {n_drafted:,} right"
            width = self.content_size.width or WIDTH
            line.update(spread(Content.styled("Guesses", "bold"), figure, width))

    def draw(self, tokens_per_second: float | None = None) -> None:
        """Show new values, with the rate of the whole answer if it is known."""
        rates, latencies = self.query(History)
        figure = tokens_per_second or self.tokens_per_second
        rate = f"{figure:,.1f} tokens/s" if figure else ""
        slowest = f"up to {self._latencies[-1]:,.1f} ms" if self._latencies else ""
        rates.show(self._rates, rate)
        latencies.show(self._latencies, slowest)


SHOWN = ("temperature", "top_k", "top_p", "min_p", "repeat_penalty", "seed", "max_tokens")
"""Settings with a field of their own; `/set` reaches the others."""


@dataclass
class SettingChanged(Message):
    """The user gave a setting another value."""

    name: str
    text: str


@dataclass
class SystemPromptChanged(Message):
    """The user wrote another system prompt."""

    text: str


class Settings(Vertical):
    """A field per setting; Enter, or leaving it, takes a value over."""

    def compose(self) -> ComposeResult:
        yield Label("Sampling", classes="heading")
        for name in SHOWN:
            with Horizontal(classes="setting"):
                yield Label(name.replace("_", " "))
                yield Input(id=f"set-{name}", compact=True, select_on_focus=True)
        yield Label("System prompt", id="system-heading", classes="heading")
        yield TextField(id="system-prompt", compact=True, placeholder="none")

    def show(self, session: ChatSession) -> None:
        """Fill the fields with a session's values."""
        for name in SHOWN:
            field = self.query_one(f"#set-{name}", Input)
            field.value = setting_text(session, name)
            field.remove_class("-invalid")
        area = self.query_one("#system-prompt", TextArea)
        if area.text != session.system_prompt:
            area.text = session.system_prompt

    def refuse(self, name: str) -> None:
        """The value that a field was given can't be had."""
        if name in SHOWN:
            self.query_one(f"#set-{name}", Input).add_class("-invalid")

    @on(Input.Submitted)
    @on(Input.Blurred)
    def _take(self, event: Input.Submitted | Input.Blurred) -> None:
        event.stop()
        name = (event.input.id or "").removeprefix("set-")
        self.post_message(SettingChanged(name, event.value))

    @on(TextArea.Changed)
    def _take_system_prompt(self, event: TextArea.Changed) -> None:
        event.stop()
        self.post_message(SystemPromptChanged(event.text_area.text))


def setting_text(session: ChatSession, name: str) -> str:
    """A setting's value as it is typed."""
    value: Any = session.max_tokens if name == "max_tokens" else getattr(session.params, name)
    if value is None:
        return "-1"
    return f"{value:g}" if isinstance(value, float) else str(value)


class SidePanel(VerticalScroll, can_focus=False):
    """Scrolls where the screen is low.

    Args:
        audit: the audit of the last answer.
    """

    def __init__(self, audit: ChatAudit) -> None:
        super().__init__(id="panel")
        self._audit = audit

    def compose(self) -> ComposeResult:
        yield Static("", id="model")
        yield CacheMeter("", id="meter")
        yield Speed(id="speed")
        yield self._audit
        yield Settings(id="settings")

    def show_model(self, facts: EngineFacts) -> None:
        """Say which model it is."""
        self.query_one("#model", Static).update(
            Content.assemble(
                (facts.name, "bold"), "\n", (facts.server or _runs_on(facts), "$muted")
            )
        )


def _runs_on(facts: EngineFacts) -> str:
    return (
        f"{facts.architecture} · {size(facts.weight_bytes)} · "
        f"{facts.backend}, {facts.threads.in_words()}"
    )
