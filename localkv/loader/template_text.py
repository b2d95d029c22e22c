"""`TemplateText`: a string that remembers which of its characters a chat template wrote itself.

A prompt is made of markup, whose control tokens count, and of users' and models' text, in which
`<|im_end|>` is just text. Rendered, both are one string. Trust is tracked here: the template's own
literals are markup, they stay markup through operations of templates on strings, and everything
else is not, be it a message or the result of an operation that is not followed here. So a string
that gets lost on the way loses rights and gains none. (llama.cpp's `common/jinja/string.h` tracks
the opposite, which strings are input.)

To everything else a `TemplateText` is the `str` it would have been. Nothing here knows Jinja.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any, SupportsIndex

_RUNS = re.compile(rb"\x00+|\x01+")


class TemplateText(str):
    """Text and, for each character, whether it is markup.

    Args:
        text: the text.
        is_markup: a byte for each character, 1 for markup; without it nothing is.
    """

    __slots__ = ("_is_markup",)
    _is_markup: bytes

    def __new__(cls, text: str = "", is_markup: bytes | None = None) -> TemplateText:
        made = super().__new__(cls, text)
        made._is_markup = bytes(len(made)) if is_markup is None else is_markup
        return made

    def __str__(self) -> str:
        return self

    def __add__(self, other: str) -> str:
        # Jinja's HTML strings (from its `escape` filter) have their own idea of `+`.
        if type(other) not in (str, TemplateText):
            return NotImplemented
        return TemplateText(str.__add__(self, other), self._is_markup + _flags(other))

    def __radd__(self, other: str) -> str:
        if type(other) is not str:
            return NotImplemented
        return TemplateText(str.__add__(other, self), _flags(other) + self._is_markup)

    def __mul__(self, count: SupportsIndex) -> str:
        return TemplateText(str.__mul__(self, count), self._is_markup * count)

    __rmul__ = __mul__

    def __mod__(self, values: Any) -> str:
        text = str.__mod__(self, values)
        return format_result(self, text, values if isinstance(values, tuple) else (values,))

    def __getitem__(self, index: SupportsIndex | slice) -> str:
        flags = self._is_markup[index]
        return TemplateText(
            str.__getitem__(self, index), flags if isinstance(flags, bytes) else bytes((flags,))
        )

    def join(self, parts: Iterable[str], /) -> str:
        parts = list(parts)
        return TemplateText(str.join(self, parts), self._is_markup.join(map(_flags, parts)))

    def strip(self, chars: str | None = None, /) -> str:
        start = len(self) - len(str.lstrip(self, chars))
        return self[start : start + len(str.strip(self, chars))]

    def lstrip(self, chars: str | None = None, /) -> str:
        return self[len(self) - len(str.lstrip(self, chars)) :]

    def rstrip(self, chars: str | None = None, /) -> str:
        return self[: len(str.rstrip(self, chars))]

    def removeprefix(self, prefix: str, /) -> str:
        return self[len(self) - len(str.removeprefix(self, prefix)) :]

    def removesuffix(self, suffix: str, /) -> str:
        return self[: len(str.removesuffix(self, suffix))]

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._located(str.split(self, sep, maxsplit), sep)

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._located(str.rsplit(self, sep, maxsplit), sep)

    def splitlines(self, keepends: bool = False) -> list[str]:
        lines = self._located(str.splitlines(self, True), "")
        return lines if keepends else [line[: len(str.splitlines(line)[0])] for line in lines]

    def partition(self, sep: str, /) -> tuple[str, str, str]:
        before, found, after = self._located(list(str.partition(self, sep)), "")
        return before, found, after

    def rpartition(self, sep: str, /) -> tuple[str, str, str]:
        before, found, after = self._located(list(str.rpartition(self, sep)), "")
        return before, found, after

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> str:
        if not old:
            return str.replace(self, old, new, count)
        return TemplateText(new, _flags(new)).join(self.split(old, count))

    def upper(self) -> str:
        return self._recased(str.upper(self))

    def lower(self) -> str:
        return self._recased(str.lower(self))

    def title(self) -> str:
        return self._recased(str.title(self))

    def capitalize(self) -> str:
        return self._recased(str.capitalize(self))

    def _recased(self, text: str) -> str:
        # No character's other case is shorter, so in a text that keeps its length all stay put.
        return TemplateText(text, self._is_markup) if len(text) == len(self) else text

    def _located(self, parts: list[str], sep: str | None) -> list[str]:
        """The same parts, cut out of this text: in order, with `sep` (None: spaces) between."""
        located = []
        end = 0
        for part in parts:
            start = str.find(self, part, end) if sep is None else end
            end = start + len(part)
            located.append(self[start:end])
            end += len(sep or "")
        return located


def markup(text: str) -> TemplateText:
    """Text that is all markup."""
    return TemplateText(text, b"\1" * len(text))


def concatenate(parts: Iterable[object]) -> TemplateText:
    """`"".join(map(str, parts))`."""
    texts = [str(part) for part in parts]
    return TemplateText("".join(texts), b"".join(map(_flags, texts)))


def format_result(template: str, text: str, values: Iterable[object]) -> str:
    """A formatted text: markup if all of the template and of the values is (numbers are)."""
    for value in (template, *values):
        if not isinstance(value, int | float) and b"\0" in _flags(value):
            return text
    return markup(text)


def segments(text: str) -> Iterator[tuple[str, bool]]:
    """Cut a text where markup begins or ends.

    Returns:
        the pieces, plain strings, each with whether it is markup.
    """
    flags = _flags(text)
    for run in _RUNS.finditer(flags):
        yield str.__getitem__(text, slice(*run.span())), bool(flags[run.start()])


def _flags(value: object) -> bytes:
    if isinstance(value, TemplateText):
        return value._is_markup
    return bytes(len(value)) if isinstance(value, str) else b"\0"
