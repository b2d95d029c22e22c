"""The reasoning that an answer begins with: what ends it, and where a grammar holds after it."""

from __future__ import annotations

import codecs
import re
from typing import TYPE_CHECKING

from localkv.loader.answer_tags import (
    CHANNEL_END,
    CHANNELS,
    NEXT_MESSAGE,
    REASONING_TAGS,
    ReasoningTags,
    channel_markers,
    tags_at_start,
)
from localkv.loader.chat_prompt import ChatPrompt
from localkv.loader.tokenizer import Tokenizer

if TYPE_CHECKING:
    from localkv.structured.grammar import Grammar, Scope

_TAIL = 4 * max(len(tags.close) for tags in REASONING_TAGS)
"""Bytes at the end of a text that are searched for a tag: one may be spread over several tokens."""
_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_ROLE, _ANSWER = "assistant", "final"
_MOST_HEADER = 1000
"""Characters of a message in channels that are kept, enough for its header."""


class ReasoningBudget:
    """Counts the tokens of an answer's reasoning, and says which tokens must come when it is spent.

    These are the closing tag's tokens; the model goes on after them. They also come if the model
    wants to end the text within the reasoning, though something must follow. Only reasoning at the
    start of an answer is ended: a tag further on is text. The tags don't count, but if the model
    writes the closing tag in several tokens, these do.

    Args:
        most: tokens of reasoning; 0 closes it at once, None sets no limit.
        prompt: where the answer begins.
        tokenizer: the model's.
        calls: a call of a tool follows the reasoning, and no answer.
        must_follow: a grammar says what the text has to go on with.

    Attributes:
        n_tokens: tokens of reasoning so far, those in the prompt included.
    """

    def __init__(
        self,
        most: int | None,
        prompt: ChatPrompt,
        tokenizer: Tokenizer,
        *,
        calls: bool = False,
        must_follow: bool = False,
    ) -> None:
        self.n_tokens = prompt.n_reasoned
        self._n_begun = prompt.n_reasoned
        self._most = most
        self._calls = calls
        self._must_follow = must_follow
        self._tokenizer = tokenizer
        self._tags: ReasoningTags | None = prompt.reasoning
        self._is_over = prompt.is_begun and prompt.reasoning is None
        self._forced: list[int] = []
        self._text = b""
        self._messages = _Messages(prompt, tokenizer) if channel_markers(tokenizer) else None
        self._close_if_spent()

    @property
    def n_written(self) -> int:
        """Tokens of reasoning in the answer."""
        return self.n_tokens - self._n_begun

    @property
    def leads_on(self) -> bool:
        """Whether a token that ends the text is to lead to what must follow (`lead_on`)."""
        if not self._must_follow or self._forced:
            return False
        if self._messages is not None and not self._calls:
            return not self._messages.are_answered
        is_open = self._tags is not None and not self._is_over
        return is_open and not (self._calls and _ends_within_character(self._text))

    def lead_on(self) -> None:
        """Have the tokens come that lead to what must follow, instead of the end of the text."""
        if self._messages is not None and not self._calls:
            self._force(self._messages.up_to_answer())
        else:
            self._close()

    def forced(self) -> int | None:
        """The token that must come next, or None if the model draws it."""
        return self._forced[0] if self._forced else None

    def accept(self, token: int) -> None:
        """Take note of the next token of the answer."""
        data = b""
        if not self._is_over or self._messages is not None:
            data = self._tokenizer.token_bytes(token, special=True)
        was_over = self._is_over
        if self._messages is not None:
            self._messages.accept(data)
        if self._forced:
            del self._forced[0]
            self._is_over = not self._forced
        elif not was_over:
            self._text += data
            self._look()
        elif self._messages is not None and self._messages.are_reasoning:
            self.n_tokens += 1

    def _look(self) -> None:
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
        is_spent = self._most is not None and self.n_tokens >= self._most
        if is_spent and self._tags is not None and not self._is_over:
            self._close()

    def _close(self) -> None:
        assert self._tags is not None
        is_message = self._calls and self._tags == CHANNELS
        self._force(NEXT_MESSAGE if is_message else self._tags.close)

    def _force(self, text: str) -> None:
        self._forced = self._tokenizer.encode_segments([(text, True)], add_special=False)


class _Messages:
    """Where an answer in channels is: in a message's header, in its text, or after it.

    Attributes:
        are_answered: the message with the answer has begun.
    """

    def __init__(self, prompt: ChatPrompt, tokenizer: Tokenizer) -> None:
        before, _, self._message = last_of(prompt, tokenizer).rpartition(_START)
        if not before:  # the prompt ends far within a message
            self._message = f"{CHANNELS.open if prompt.reasoning == CHANNELS else ''}"
        self._bytes = b""
        self.are_answered = FINAL.search(self._message.encode()) is not None

    @property
    def are_reasoning(self) -> bool:
        """Whether the next token is part of a message that is reasoning."""
        header, begun, text = self._message.partition(_MESSAGE)
        _, _, channel = header.partition(_CHANNEL)
        is_open = bool(begun) and CHANNEL_END not in text
        return is_open and channel.startswith("analysis") and " to=" not in header

    def accept(self, data: bytes) -> None:
        """Take note of the bytes of the next token."""
        self._bytes += data
        text = self._bytes.decode(errors="ignore")
        if len(text.encode()) < len(self._bytes):
            return  # within a character
        self._bytes = b""
        self._message = (self._message + text).rpartition(_START)[2]
        if not self.are_answered:
            self.are_answered = FINAL.search(self._message.encode()) is not None
        if len(self._message) > _MOST_HEADER + len(CHANNEL_END):
            self._message = self._message[:_MOST_HEADER] + self._message[-len(CHANNEL_END) :]

    def up_to_answer(self) -> str:
        """What is missing until the answer begins."""
        final = f"{_CHANNEL}{_ANSWER}{_MESSAGE}"
        header, is_begun, text = self._message.partition(_MESSAGE)
        if CHANNEL_END in text:
            return f"{_START}{_ROLE}{final}"
        if is_begun:
            return CHANNELS.close
        role, has_channel, channel = header.partition(_CHANNEL)
        if not has_channel:
            return (_ROLE.removeprefix(role) if _ROLE.startswith(role) else "") + final
        if _ANSWER.startswith(channel):
            return _ANSWER.removeprefix(channel) + _MESSAGE
        return _MESSAGE + ("" if channel.startswith(_ANSWER) else CHANNELS.close)


def _ends_within_character(text: bytes) -> bool:
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(text)
    return bool(decoder.getstate()[0])


FINAL = re.compile(rb"<\|channel\|>final[^<]*(?:<\|constrain\|>[^<]*)?<\|message\|>")
"""What begins the answer proper where a model writes channels."""
_LAST = 64
"""Tokens at the end of a prompt in which the end of reasoning is looked for."""


def answer_scope(grammar: Grammar, prompt: ChatPrompt, tokenizer: Tokenizer) -> Scope:
    """Where a grammar holds that the answer to a prompt has to keep to.

    A prompt that ends within the reasoning leaves that free. Else the model may begin with the tag
    that opens one, if that is a token of it, or with what the grammar allows.
    """
    from localkv.structured.grammar import EVERYWHERE, Scope, text_pattern

    mark = text_pattern(grammar.after) if grammar.after else None
    if grammar.is_all:
        return EVERYWHERE
    last = last_of(prompt, tokenizer)
    if channel_markers(tokenizer):
        is_final = FINAL.search(last.rpartition("<|start|>")[2].encode()) is not None
        return Scope(before=None if is_final else FINAL, mark=mark)
    if prompt.reasoning is not None:
        close = text_pattern(prompt.reasoning.close)
        return Scope(before=close, mark=mark, skips_space=True)
    closes = tuple(tags.close for tags in REASONING_TAGS)
    if prompt.is_begun or last.rstrip().endswith(closes):
        return Scope(mark=mark)
    openings = {}
    for tags in REASONING_TAGS:
        token = tokenizer.token_to_id(tags.open)
        if token is not None:
            openings[token] = text_pattern(tags.close)
    return Scope(openings=openings, mark=mark, skips_space=True)


def last_of(prompt: ChatPrompt, tokenizer: Tokenizer) -> str:
    """The text at the end of a prompt."""
    return tokenizer.decode(prompt.ids[-_LAST:])
