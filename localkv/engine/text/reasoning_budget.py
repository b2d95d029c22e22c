"""`ReasoningBudget`: ends a model's reasoning after a number of tokens, so that it answers."""

from __future__ import annotations

import codecs

from localkv.loader.chat_prompt import ChatPrompt
from localkv.loader.reasoning_tags import (
    CHANNEL_END,
    CHANNELS,
    NEXT_MESSAGE,
    REASONING_TAGS,
    ReasoningTags,
    tags_at_start,
)
from localkv.loader.tokenizer import Tokenizer

_TAIL = 4 * max(len(tags.close) for tags in REASONING_TAGS)
"""Bytes at the end of a text that are searched for a tag: one may be spread over several tokens."""


class ReasoningBudget:
    """Counts the tokens of an answer's reasoning, and says which tokens must come when it is spent.

    Those are the closing tag's; the model goes on after them. Only reasoning at the start of an
    answer counts, as it does for those who fold it: a tag further on is text. Neither tag counts,
    unless the model writes it in several tokens: then those of the closing one do.

    Args:
        most: tokens of reasoning; 0 closes it at once.
        prompt: where the answer begins.
        tokenizer: the model's.
        calls: what follows the reasoning is a call of a tool, and no answer.

    Attributes:
        n_tokens: tokens of reasoning so far.
    """

    def __init__(
        self, most: int, prompt: ChatPrompt, tokenizer: Tokenizer, *, calls: bool = False
    ) -> None:
        self.n_tokens = prompt.n_reasoned
        self._most = most
        self._calls = calls
        self._tokenizer = tokenizer
        self._tags: ReasoningTags | None = prompt.reasoning
        self._is_over = prompt.is_begun and prompt.reasoning is None
        self._forced: list[int] = []
        self._text = b""
        self._close_if_spent()

    def forced(self) -> int | None:
        """The token that must come next, or None if the model draws it."""
        return self._forced[0] if self._forced else None

    def accept(self, token: int) -> None:
        """Take note of the next token of the answer."""
        if self._is_over:
            return
        if self._forced:
            del self._forced[0]
            self._is_over = not self._forced
            return
        self._text += self._tokenizer.token_bytes(token, special=True)
        text = self._text.decode(errors="replace")
        if self._tags is None:
            self._look_for_opening(text.lstrip())
        elif (CHANNEL_END if self._tags == CHANNELS else self._tags.close) in text:
            self._is_over = True
        else:
            self.n_tokens += 1
            self._text = self._text[-_TAIL:]
        self._close_if_spent()

    def _look_for_opening(self, text: str) -> None:
        tags = tags_at_start(text)
        if tags is not None:
            self._tags = tags
            self._text = text.removeprefix(tags.open).encode()
        elif not any(possible.open.startswith(text) for possible in REASONING_TAGS):
            self._is_over = True

    def _close_if_spent(self) -> None:
        if self._calls and _ends_within_character(self._text):
            return  # a grammar of calls covers the reasoning, and has no half characters
        if self._tags is not None and not self._is_over and self.n_tokens >= self._most:
            is_message = self._calls and self._tags == CHANNELS
            close = NEXT_MESSAGE if is_message else self._tags.close
            self._forced = self._tokenizer.encode_segments([(close, True)], add_special=False)


def _ends_within_character(text: bytes) -> bool:
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(text)
    return bool(decoder.getstate()[0])
