"""`LoadStrip`: how far loading is, or why there is no engine."""

from __future__ import annotations

import time

from textual.content import Content
from textual.widgets import Static

from localkv.chat.engine import LOAD_STAGES, LoadProgress
from localkv.errors import LocalKVError

_SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"


class LoadStrip(Static):
    """One line above the prompt; it is not there while the engine is ready."""

    def on_mount(self) -> None:
        self._started = time.monotonic()
        self._progress: LoadProgress | None = None
        self._timer = self.set_interval(0.1, self._draw, pause=True)

    def start(self) -> None:
        """Loading begins."""
        self._started = time.monotonic()
        self._progress = LoadProgress(LOAD_STAGES[0])
        self.remove_class("-error")
        self.display = True
        self._timer.resume()
        self._draw()

    def show_progress(self, progress: LoadProgress) -> None:
        self._progress = progress
        self._draw()

    def done(self) -> None:
        """The engine is ready."""
        self._timer.pause()
        self.display = False

    def fail(self, error: LocalKVError) -> None:
        """There is no engine."""
        self._timer.pause()
        self.add_class("-error")
        self.display = True
        hint = f" ({error.hint})" if error.hint else ""
        self.update(
            Content(f"✗ {error.message}{hint}\n  F5 starts the engine again, /model another")
        )

    def _draw(self) -> None:
        if self._progress is None:
            return
        elapsed = time.monotonic() - self._started
        at = LOAD_STAGES.index(self._progress.stage)
        parts: list[Content] = []
        for i, stage in enumerate(LOAD_STAGES):
            if i < at:
                parts.append(Content.assemble(("✓ ", "$success"), (stage, "$muted")))
            elif i == at:
                spin = _SPINNER[int(elapsed * 10) % len(_SPINNER)]
                parts.append(Content.assemble((f"{spin} ", "$primary"), (stage, "bold")))
                if self._progress.total:
                    counted = f" {self._progress.done}/{self._progress.total}"
                    parts[-1] += Content.styled(counted, "$muted")
            else:
                parts.append(Content.styled(f"· {stage}", "$muted"))
        once = ", compiled for this CPU, once" if at == len(LOAD_STAGES) - 1 and elapsed > 5 else ""
        parts.append(Content.styled(f"{elapsed:.0f} s{once}", "$muted"))
        self.update(Content("   ").join(parts))
