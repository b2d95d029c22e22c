"""What models, files and hubs may say to a terminal that it should not hear."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import gguf

from support import tiny_model

ORDERS = (
    "\x1b]52;c;ZXZpbA==\x07",  # the clipboard
    "\x1b]0;stolen\x07",  # the title
    "\x1b[35;46;9m",  # colours that the program has none of
    "\x1b[2J\x1b[H",
    "\x1b[c\x1b[6n\x05",  # what the terminal answers on stdin
    "\x1bP$q\x1b\\",
    "\x1b]8;;file:///etc/passwd\x1b\\click\x1b]8;;\x1b\\",
    "\x1bc",
    "\x9b35m\x9d0;stolen\x9c",
    "true\rfake",
    "true\b\b\b\bfake",
    "\x0e\x0f\x7f",
    "\u202egpj.exe\u202c \u2066x\u2069",
    "\x00",
)
EVERYTHING = "".join(ORDERS)

OWN = re.compile(rb"\r\x1b\[K|\x1b\[(?:0|1|[0-9;]*3[1-6]|2)?m")
"""What the program itself may send: a line begun again, plain colours."""

_STEERING = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def steering(shown: bytes, *, own: re.Pattern[bytes] = OWN) -> list[str]:
    """What steers a terminal in what it was sent, without what is the program's own."""
    assert b"\x1b[35;46;9m" not in shown
    text = own.sub(b"", shown.replace(b"\r\n", b"\n")).decode("utf-8", errors="surrogateescape")
    return _STEERING.findall(text) + re.findall("[\udc80-\udc9f]", text)


def random_text(rng: random.Random) -> str:
    """Orders, line ends and harmless text, in any order."""
    pieces = (*ORDERS, "\r", "\n", "\r\n", "\t", "a", "日本", "é", " ")
    return "".join(rng.choice(pieces) for _ in range(rng.randrange(12)))


def write_hostile_model(path: Path, *, architecture: str = "llama") -> Path:
    """The tiny model, with orders in every text of its metadata and in nearly every token."""

    class Writer(gguf.GGUFWriter):
        def __init__(self, goal: Path, _: str) -> None:
            super().__init__(goal, architecture)

        def add_name(self, name: str) -> None:
            super().add_name(name + EVERYTHING)
            super().add_description(EVERYTHING)
            super().add_author(EVERYTHING)

        def add_tokenizer_pre(self, pre: str) -> None:
            super().add_tokenizer_pre(pre + EVERYTHING)

        def add_token_list(self, tokens: Any) -> None:
            n_kept = 262  # unknown, BOS, EOS, control tokens, bytes
            super().add_token_list(
                [
                    token if i < n_kept and i > 5 else f"{token}{ORDERS[i % len(ORDERS)]}{i}"
                    for i, token in enumerate(tokens)
                ]
            )

        def add_chat_template(self, template: Any) -> None:
            super().add_chat_template(template + "{# " + EVERYTHING + " #}")

    before = tiny_model.gguf.GGUFWriter
    tiny_model.gguf.GGUFWriter = Writer  # type: ignore[misc]
    try:
        return tiny_model.write_tiny_model(path)
    finally:
        tiny_model.gguf.GGUFWriter = before  # type: ignore[misc]
