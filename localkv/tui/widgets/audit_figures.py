"""What is known of the last answer, in the panel: what the packed cache changed, and loops."""

from __future__ import annotations

from textual.content import Content
from textual.widgets import Static

from localkv.chat.engine import Audited
from localkv.tui.figures import spread

WIDTH = 32
"""Cells of the panel before it is laid out."""


class AuditFigures(Static):
    """Empty unless an answer was audited, or has degenerated."""

    degenerate = ""

    def on_mount(self) -> None:
        self.show(None)

    def show(self, audited: Audited | None) -> None:
        """Show what was found by an audit, or nothing."""
        self.display = audited is not None or bool(self.degenerate)
        if audited is None:
            self.update(self._warning())
            return
        n_flips = len(audited.flips)
        self._say(
            Content.styled(f"{n_flips:,} of {audited.n_tokens:,}", "$warning" if n_flips else ""),
            f"other choices than f16's; KLD {audited.kld_mean:.2g}",
        )

    def show_running(self) -> None:
        """An audit is under way."""
        self.display = True
        self._say(Content("…"), "comparing with an f16 cache")

    def _warning(self) -> Content:
        return Content.styled(self.degenerate, "$warning")

    def _say(self, value: Content, line: str) -> None:
        width = self.content_size.width or WIDTH
        head = spread(Content.styled("Audit", "bold"), value, width)
        lines = [head, Content.styled(line, "$muted")]
        self.update(Content("\n").join([*lines, *[self._warning()] * bool(self.degenerate)]))
