"""Text out of tokens, one at a time, in pieces that are always whole characters."""

from __future__ import annotations

import codecs
from collections.abc import Container
from typing import Protocol


class _Pieces(Protocol):
    """A tokenizer as a stream decoder needs it."""

    def piece(self, token: int, *, after_text: bool, skip_special: bool) -> tuple[bytes, bool]: ...


class StreamDecoder:
    """Decodes a sequence of tokens as it grows.

    The pieces joined are `Tokenizer.decode` of the whole sequence. A character whose
    bytes are spread over several tokens comes with the last of them; bytes that are no UTF-8 come
    as U+FFFD, as soon as that is clear.

    Args:
        tokenizer: where the tokens are from.
        after_text: whether the first token continues a text.
        skip_special: whether control tokens are left out.
        kept: control tokens that are not.
    """

    def __init__(
        self,
        tokenizer: _Pieces,
        *,
        after_text: bool,
        skip_special: bool,
        kept: Container[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._after_text = after_text
        self._skip_special = skip_special
        self._kept = kept
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """The characters that are complete with this token; often none.

        Raises:
            UsageError: there is no such token.
        """
        skip = self._skip_special and token not in self._kept
        data, self._after_text = self._tokenizer.piece(
            token, after_text=self._after_text, skip_special=skip
        )
        return self._utf8.decode(data)

    def flush(self, *, is_cut: bool = False) -> str:
        """U+FFFD if the last character is still incomplete, else nothing.

        Args:
            is_cut: the text was cut, so an incomplete character is left out.
        """
        rest = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return "" if is_cut else rest
