"""Speed while an answer is written: tokens per second and the time between tokens."""

from __future__ import annotations

from collections import deque

from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.widgets import Sparkline, Static

from localkv.chat.engine import TextDelta

N_VALUES = 64
"""Deltas that the sparklines look back on."""


class Speed(Vertical):
    """Two sparklines, a value per delta."""

    def compose(self) -> ComposeResult:
        yield Static("", id="rate")
        yield Sparkline([], id="rates")
        yield Static("", id="latency")
        yield Sparkline([], id="latencies")

    def on_mount(self) -> None:
        self._rates: deque[float] = deque(maxlen=N_VALUES)
        self._latencies: deque[float] = deque(maxlen=N_VALUES)
        self._draw()

    @property
    def tokens_per_second(self) -> float:
        """Over the deltas that are shown."""
        return len(self._rates) / sum(1 / r for r in self._rates) if self._rates else 0.0

    def clear(self) -> None:
        """An answer begins."""
        self._rates.clear()
        self._latencies.clear()
        self._draw()

    def add(self, delta: TextDelta) -> None:
        """More tokens have come."""
        total = sum(delta.seconds)
        if total <= 0:
            return
        self._rates.append(len(delta.seconds) / total)
        self._latencies.append(1000 * max(delta.seconds))
        self._draw()

    def _draw(self) -> None:
        rate = f"{self.tokens_per_second:,.1f} tokens/s" if self._rates else "—"
        slowest = f"slowest {self._latencies[-1]:,.1f} ms" if self._latencies else "—"
        self.query_one("#rate", Static).update(Content.assemble(("Speed", "bold"), f"  {rate}"))
        self.query_one("#latency", Static).update(
            Content.assemble(("Between tokens", "bold"), f"  {slowest}")
        )
        self.query_one("#rates", Sparkline).data = list(self._rates)
        self.query_one("#latencies", Sparkline).data = list(self._latencies)
