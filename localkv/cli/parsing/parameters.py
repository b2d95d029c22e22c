"""click's options and arguments with what the help shows of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click


class Option(click.Option):
    """An option under a heading of the help.

    Attributes:
        panel: the heading, None for the last one.
    """

    def __init__(self, names: Sequence[str], *, panel: str | None = None, **attributes: Any):
        super().__init__(names, **attributes)
        self.panel = panel


class Argument(click.Argument):
    """An argument that the help describes."""

    def __init__(self, names: Sequence[str], *, help: str, **attributes: Any):
        super().__init__(names, **attributes)
        self._words = help

    def get_help_record(self, ctx: click.Context) -> tuple[str, str]:
        return self.make_metavar(ctx), self._words
