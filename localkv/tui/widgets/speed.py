"""Speed while an answer is written: tokens per second and the time between tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.widgets import Static

from localkv.chat.engine import TextDelta
from localkv.tui.figures import columns, spread

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
