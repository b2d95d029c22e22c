r"""The text that a command works on: from the command line, a file, or stdin.

Texts on the command line may hold llama.cpp's backslash escapes: \n \r \t \' \" \\ and \xHH.
"""

from __future__ import annotations

import re
import select
import sys

from localkv.commands.output import say
from localkv.errors import LocalKVError, UsageError, byte_size
from localkv.system.files import read_input

MOST_BYTES = 256 << 20
"""Most bytes of a text; no model has a context for a tenth of that."""

PATIENCE = 2.0
"""Seconds after which a silent stdin is spoken of."""


def read_file(path: str, what: str = "the prompt") -> str:
    """A UTF-8 file's text, without a byte order mark; "-" is stdin.

    Raises:
        UsageError: it can't be read.
        LocalKVError: it is not UTF-8.
    """
    if path == "-":
        text = read_stdin()
        if text is None:
            raise UsageError(f"{what} is to be read from stdin, which is a terminal or closed")
        return text
    try:
        data = read_input(path, MOST_BYTES, f"{what} {path}")
    except OSError as error:
        raise UsageError(f"{what} {path}: {error.strerror}") from error
    return _decode(data, f"{what} {path}")


def read_stdin() -> str | None:
    """All of stdin; None if it is a terminal or closed."""
    if sys.stdin is None or sys.stdin.closed or sys.stdin.isatty():
        return None
    if not _has_input(PATIENCE):
        say("waiting for the end of stdin; run with </dev/null if there is no text on it")
    data = sys.stdin.buffer.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise UsageError(f"the text on stdin: more than {byte_size(MOST_BYTES)}")
    return _decode(data, "the text on stdin")


def _has_input(seconds: float) -> bool:
    """Whether stdin has text, or has ended, within some seconds."""
    try:
        return bool(select.select([sys.stdin], [], [], seconds)[0])
    except (OSError, ValueError):  # a stdin that can't be watched, as on Windows
        return True


def _decode(data: bytes, what: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise LocalKVError(
            f"{what} is not valid UTF-8: byte 0x{data[error.start]:02x} at offset {error.start}"
        ) from error


def without_final_newline(text: str) -> str:
    """`text` without one trailing line break, the one that ends a text file."""
    return text[:-1] if text.endswith("\n") else text


_ESCAPE = re.compile(rb"\\(?:x([0-9a-fA-F]{2})|([nrt'\"\\]))")
_BYTES = {b"n": b"\n", b"r": b"\r", b"t": b"\t", b"'": b"'", b'"': b'"', b"\\": b"\\"}


def unescape(text: str) -> str:
    r"""Replace the escapes; a backslash before anything else stays.

    Raises:
        UsageError: the bytes written as \xHH are not UTF-8.
    """

    def replace(match: re.Match[bytes]) -> bytes:
        if match[1] is not None:
            return bytes.fromhex(match[1].decode())
        return _BYTES[match[2]]

    data = _ESCAPE.sub(replace, text.encode())
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise UsageError(
            f"the escapes in {text!r} do not make valid UTF-8", hint="--no-escape keeps them"
        ) from error
