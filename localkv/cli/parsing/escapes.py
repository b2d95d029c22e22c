r"""Backslash escapes in texts from the command line: \n \r \t \' \" \\ and \xHH (llama.cpp's)."""

from __future__ import annotations

import re

from localkv.errors import UsageError

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
