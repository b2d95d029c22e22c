"""llama-server's object `timings` while a text grows, by the clock of whoever receives it."""

from __future__ import annotations

import time
from typing import Any

from localkv.server.wire import Event, Piece, Reading


class RunningTimings:
    """Counts, and milliseconds since the prompt is evaluated and since the first token."""

    def __init__(self) -> None:
        self._n_cached = 0
        self._n_read = 0
        self._n_drawn = 0
        self._began: float | None = None
        self._first: float | None = None

    def note(self, event: Event) -> None:
        """Something has happened to the text."""
        now = time.perf_counter()
        if self._began is None:
            self._began = now
        if isinstance(event, Reading):
            self._n_cached, self._n_read = event.n_cached, event.n_held - event.n_cached
        elif isinstance(event, Piece):
            if self._first is None:
                self._first = now
            self._n_drawn = event.n_tokens

    @property
    def milliseconds(self) -> float:
        """Since the prompt is evaluated."""
        return 0.0 if self._began is None else 1e3 * (time.perf_counter() - self._began)

    def now(self) -> dict[str, Any]:
        """The object."""
        now = time.perf_counter()
        began = now if self._began is None or not self._n_read else self._began
        first = now if self._first is None else self._first
        n_after = max(0, self._n_drawn - 1)
        prompt_ms, decode_ms = 1e3 * (first - began), 1e3 * (now - first)
        return {
            "cache_n": self._n_cached,
            "prompt_n": self._n_read,
            "prompt_ms": prompt_ms,
            "prompt_per_token_ms": prompt_ms / max(1, self._n_read),
            "prompt_per_second": 1e3 * self._n_read / prompt_ms if prompt_ms else 0.0,
            "predicted_n": self._n_drawn,
            "predicted_ms": decode_ms,
            "predicted_per_token_ms": decode_ms / max(1, n_after),
            "predicted_per_second": 1e3 * n_after / decode_ms if decode_ms else 0.0,
        }
