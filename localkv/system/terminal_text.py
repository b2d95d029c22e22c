"""Text from models, files and hubs as a terminal shows it.

A terminal takes some characters as orders: to move, to colour, to set its title or the clipboard,
to answer on stdin. Some are such an order by themselves (the C1 controls); others change the order
of the characters after them (bidirectional overrides, which make a text read differently). They are
shown, not obeyed. Each is replaced on its own, so a sequence that comes in pieces is harmless, too.
"""

from __future__ import annotations

import re

_OVERRIDES = (*range(0x202A, 0x202F), *range(0x2066, 0x206A))
_STEERING = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_SHOWN = {
    **{code: chr(0x2400 + code) for code in range(0x20)},
    0x7F: "\u2421",
    **{code: f"<U+{code:04X}>" for code in (*range(0x80, 0xA0), *_OVERRIDES)},
}


def visible(text: str) -> str:
    r"""`text` with pictures for control characters (␛ for \x1b), and <U+009B>, <U+202E> and so on.

    Line feeds and tabs stay.
    """
    return _STEERING.sub(lambda match: _SHOWN[ord(match[0])], text)


def without_controls(text: str) -> str:
    """`text` without the characters that `visible` replaces, line feeds and tabs."""
    return _CONTROLS.sub("", text)


_CONTROLS = re.compile("[\0-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
