"""`ControlFilter`: the last thing that every line of the screen goes through.

Widgets show control characters of answers and names where they expect them. Any that they miss end
here: it would reach the terminal, since neither Textual nor Rich holds it back.
"""

from __future__ import annotations

from rich.cells import cell_len
from rich.segment import Segment
from textual.color import Color
from textual.filter import LineFilter

from localkv.system.terminal_text import without_controls


class ControlFilter(LineFilter):
    """Drops control characters, and links that the terminal itself would open."""

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        if all(_is_harmless(segment) for segment in segments):
            return segments
        return list(map(_harmless, segments))


def _is_harmless(segment: Segment) -> bool:
    text, style, _ = segment
    return text.isprintable() and (style is None or style.link is None)


def _harmless(segment: Segment) -> Segment:
    text, style, control = segment
    kept = without_controls(text)
    kept += " " * (cell_len(text) - cell_len(kept))
    return Segment(kept, style.update_link(None) if style else None, control)
