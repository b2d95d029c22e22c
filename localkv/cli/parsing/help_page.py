"""The help of a command: short, with examples and the options that most users need, or whole.

By click's own means, which are there at once: rich takes as long to load as all else together.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import click

from localkv.cli.output.terminal import OwnText
from localkv.cli.parsing.option_types import WHOLE
from localkv.cli.parsing.parameters import Option

_MOST_NAME = 28
"""Columns that names take; a longer one has a line of its own."""


@dataclass(frozen=True)
class HelpPage:
    """What a command's help shows besides its own text.

    Attributes:
        examples: a purpose and a command line each.
        essentials: spellings of the options in the short help; without any, it has all.
        summaries: names and summaries of the commands in a group.
    """

    examples: Sequence[tuple[str, str]] = ()
    essentials: Sequence[str] = ()
    summaries: Sequence[tuple[str, str]] = ()

    def render(self, command: click.Command, ctx: click.Context, *, whole: bool) -> str:
        """The page, for stdout as it is."""
        shown = command if whole or not self.essentials else self._shortened(command, ctx)
        formatter = _Formatter(ctx, coloured=_shows_colours())
        click.Command.format_usage(shown, ctx, formatter)
        click.Command.format_help_text(shown, ctx, formatter)
        if self.examples:
            with formatter.section("Examples"):
                formatter.write_examples(self.examples)
        sections = self._sections(shown, ctx)
        widths = [len(name) for rows in sections.values() for name, _ in rows]
        for heading, rows in sections.items():
            with formatter.section(heading):
                formatter.write_rows(rows, max(w for w in widths if w <= _MOST_NAME))
        click.Command.format_epilog(shown, ctx, formatter)
        return OwnText(formatter.getvalue().rstrip("\n"))

    def _sections(
        self, command: click.Command, ctx: click.Context
    ) -> dict[str, list[tuple[str, str]]]:
        """Arguments, options and commands under their headings; the help's own options last."""
        found: dict[str, list[tuple[str, str]]] = {}
        for param in command.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                usual = "Options" if isinstance(param, click.Option) else "Arguments"
                found.setdefault(getattr(param, "panel", None) or usual, []).append(record)
        found["Options"] = found.pop("Options")
        if self.summaries:
            found["Commands"] = list(self.summaries)
        return found

    def _shortened(self, command: click.Command, ctx: click.Context) -> click.Command:
        """The command with the arguments and options that are essential, and no epilog."""
        shown, names = copy.copy(command), {*self.essentials, WHOLE}
        n_options = sum(isinstance(param, click.Option) for param in command.get_params(ctx))
        shown.params = []
        for param in command.params:
            if not isinstance(param, click.Option) or names & {*param.opts, *param.secondary_opts}:
                shown.params.append(param)
            if WHOLE in param.opts:
                shown.params[-1] = whole_option(f"Show all {n_options} options.")
        shown.epilog = None
        return shown


class _Formatter(click.HelpFormatter):
    """click's; on a terminal headings are bold, and names and command lines coloured."""

    def __init__(self, ctx: click.Context, *, coloured: bool) -> None:
        super().__init__(width=ctx.terminal_width, max_width=ctx.max_content_width)
        self._coloured = coloured

    def _styled(self, text: str, **style: Any) -> str:
        return click.style(text, **style) if self._coloured else text

    def write_usage(self, prog: str, args: str = "", prefix: str | None = None) -> None:
        super().write_usage(prog, args, prefix or self._styled("Usage:", bold=True) + " ")

    def write_heading(self, heading: str) -> None:
        self.write(f"{'':>{self.current_indent}}{self._styled(f'{heading}:', bold=True)}\n")

    def write_rows(self, rows: Sequence[tuple[str, str]], width: int) -> None:
        """Names of this width, or on a line of their own, and what they mean."""
        styled = [
            (self._styled(name, fg="cyan") + " " * max(0, width - len(name)), text)
            for name, text in rows
        ]
        self.write_dl(styled, col_max=width)

    def write_examples(self, examples: Sequence[tuple[str, str]]) -> None:
        indent = " " * self.current_indent
        for purpose, line in examples:
            self.write(self._styled(f"{indent}# {purpose}", dim=True) + "\n")
            prompt = self._styled("$", dim=True)
            self.write(f"{indent}{prompt} {self._styled(line, fg='cyan')}\n")


def _shows_colours() -> bool:
    """Whether stdout is a terminal that the user wants colours on."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return sys.stdout is not None and sys.stdout.isatty()


def whole_option(text: str = "Show this message and exit.", *, hidden: bool = False) -> Option:
    """`--help-all`."""

    def show(ctx: click.Context, _: click.Parameter, value: bool) -> None:
        if value and not ctx.resilient_parsing:
            command = cast(Any, ctx.command)
            click.echo(command.page.render(command, ctx, whole=True), color=ctx.color)
            ctx.exit()

    return Option(
        [WHOLE],
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=show,
        help=text,
        hidden=hidden,
    )
