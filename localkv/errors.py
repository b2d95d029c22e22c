"""Errors that a user can cause and can fix.

Each carries a single line that names the error and, if there is one, a hint with an alternative
that would work. The command line prints `error: <message>` and `hint: <hint>` and exits
with `exit_code`; a traceback is reserved for bugs of our own.
"""

from __future__ import annotations

import os
import reprlib


class LocalKVError(Exception):
    """Base of every error meant for the user.

    Args:
        message: one line that names the error, with the offending name and value.
        hint: one line with an alternative that would work, or None.
    """

    exit_code = 1

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message} ({self.hint})"

    def __reduce__(self) -> tuple[type, tuple[str, str | None]]:
        return type(self), (self.message, self.hint)


class UsageError(LocalKVError):
    """The command line, an option or an argument of the API is wrong."""

    exit_code = 2


class ModelFileError(LocalKVError):
    """A model file is missing, malformed, or holds something that is not supported."""


class ChatTemplateError(LocalKVError):
    """A chat template is malformed, refuses the conversation, or takes too much of anything."""


class HubError(LocalKVError):
    """A model can't be had from Hugging Face, or is not in its cache on this machine."""


class ContextOverflowError(LocalKVError):
    """A prompt does not fit the context; raised before any compute."""


class ModelClosedError(LocalKVError):
    """A call of a model after it was closed."""

    def __init__(
        self, message: str = "the model is closed", hint: str | None = "load it again with LLM(...)"
    ) -> None:
        super().__init__(message, hint)


class DoesNotFitError(LocalKVError):
    """A model with its cache needs more memory than there is; raised before it is allocated."""


_SHORT = reprlib.Repr()
_SHORT.maxstring = 100


def quoted(name: str) -> str:
    """A name out of a file, fit for a line of output."""
    return _SHORT.repr(name)


def printable(path: str | os.PathLike[str]) -> str:
    """A path as the user wrote it, unless that would break the line."""
    text = os.fspath(path)
    return text if text.isprintable() else repr(text)


def byte_size(n_bytes: int) -> str:
    """A number of bytes as a person reads it: "7.95 GiB"."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if n_bytes >= factor:
            return f"{n_bytes / factor:.2f} {unit}"
    return f"{n_bytes} B"


def counted(n: int, noun: str) -> str:
    """A number with its noun: "1 thread", "2 threads", "1,024 tokens"."""
    return f"{n:,} {noun}{'' if n == 1 else 's'}"
