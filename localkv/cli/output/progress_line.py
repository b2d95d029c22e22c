"""A line on stderr that is written over and over, if that is a terminal, and gone at the end."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Self

from localkv.cli.output.messages import one_line
from localkv.cli.output.terminal import OwnText

_TO_LINE_START = "\r\x1b[K"


class ProgressLine:
    """Shows nothing where stderr is no terminal.

    Attributes:
        on_terminal: whether it shows anything.
    """

    def __init__(self) -> None:
        self.on_terminal = sys.stderr is not None and sys.stderr.isatty()

    def show(self, text: str) -> None:
        """Replace the line."""
        self._print(_TO_LINE_START + one_line(text))

    def clear(self) -> None:
        """Make room for other output."""
        self._print(_TO_LINE_START)

    def _print(self, text: str) -> None:
        if self.on_terminal:
            print(OwnText(text), end="", file=sys.stderr, flush=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.clear()
