"""Types of options' values, beyond click's."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import click

from localkv.cli.output.messages import did_you_mean

WHOLE = "--help-all"
"""The option that shows all options."""


class Text(click.types.StringParamType):
    """A string that is valid Unicode. In a variable it is one string, spaces and all."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        text = str(value)
        try:
            text.encode()
        except UnicodeEncodeError:
            self.fail("not valid UTF-8", param, ctx)
        return text

    def split_envvar_value(self, rv: str) -> Sequence[str]:
        return [rv]


TEXT = Text()


class FileName(Text):
    """The name of a file, or of a model. "" would be the current folder."""

    name = "file"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        text = super().convert(value, param, ctx)
        if not text:
            self.fail("empty, expected the name of a file", param, ctx)
        if "\0" in text:
            self.fail("no file has a NUL in its name", param, ctx)
        return text


FILE = FileName()


class Choice(click.Choice[str]):
    """One of some names; the error about another name says which is nearest."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter:
            raise _not_a_choice(str(value), [*self.choices], param, ctx) from None


class HintedParameter(click.BadParameter):
    """A bad value, with what would help.

    Attributes:
        hint: None if the message says all.
    """

    hint: str | None = None


_MOST_LISTED = 10


def _not_a_choice(
    value: str, names: list[str], param: click.Parameter | None, ctx: click.Context | None
) -> HintedParameter:
    nearest, is_short = did_you_mean(value, names), len(names) <= _MOST_LISTED
    wanted = ("one of " if len(names) > 1 else "") + ", ".join(names)
    if not is_short:
        wanted = "one of its values"
    error = HintedParameter(f"{value!r} is not {wanted}{nearest}", ctx, param)
    if not is_short and ctx is not None:
        error.hint = f"localkv {ctx.command.name} {WHOLE} lists them"
    return error


class Whole(click.types.IntParamType):
    """A whole number from `least` to `most`."""

    def __init__(self, least: int, most: int | None = None) -> None:
        self.least = least
        self.most = most

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        number = super().convert(value, param, ctx)
        if number < self.least:
            self.fail(f"{number} is less than {self.least}", param, ctx)
        if self.most is not None and number > self.most:
            self.fail(f"{number} is more than {self.most}", param, ctx)
        return number


_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(I?)(B?))?B?", re.IGNORECASE)
_POWERS = {"K": 1, "M": 2, "G": 3, "T": 4}


def byte_size_of(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    """The callback of a size: 24GiB, 24G (the same), 24GB (a power of ten), 512M, 1073741824."""
    if value is None:
        return None
    match = _SIZE.fullmatch(value.strip())
    if match is None:
        raise click.BadParameter(
            f"{value!r} is not a size such as 24GiB, 24GB or 512MiB", ctx, param
        )
    number, unit, binary, byte = match.groups()
    base = 1000 if byte and not binary else 1024
    n_bytes = float(number) * (base ** _POWERS[unit.upper()] if unit else 1)
    if math.isinf(n_bytes):
        raise click.BadParameter("the size is too large a number", ctx, param)
    return int(n_bytes)
