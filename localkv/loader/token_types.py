"""Types of tokens, and the texts by which SentencePiece writes spaces and bytes."""

from __future__ import annotations

from enum import IntEnum

SPACE = "▁"
"""SentencePiece's character for a space."""

BYTE_TEXTS = tuple(f"<0x{byte:02X}>" for byte in range(256))
"""SentencePiece's tokens for single bytes."""


class TokenType(IntEnum):
    """`tokenizer.ggml.token_type`."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


SPECIAL_TYPES = frozenset((TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.UNKNOWN))
"""Types of tokens that are matched in a text as a whole, before anything is merged."""
