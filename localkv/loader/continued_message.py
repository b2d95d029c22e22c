"""Prompts that end within the last message, so that a model goes on with it.

As transformers' `continue_final_message` does it: a mark is put behind the message's text, the
conversation is rendered, and the prompt is cut at the mark. The mark is transformers', too: some
templates look for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from localkv.errors import ChatTemplateError, UsageError

REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""Names of a message's reasoning: the one that most templates read, gpt-oss's, and another."""

MARK = "CONTINUE_FINAL_MESSAGE_TAG "
"""A template that trims messages takes the space away, which shows that it does."""


def marked(
    messages: Sequence[Mapping[str, object]], field: str
) -> tuple[list[Mapping[str, object]], str]:
    """The messages with the mark behind the text of the last, and that text.

    Args:
        messages: the conversation.
        field: the field of the last message that is continued, usually "content"; its last part
            with text, if it is a list.

    Raises:
        UsageError: there is no such text.
    """
    last = messages[-1] if messages else {}
    content = last.get(field)
    if isinstance(content, str):
        copies = REASONING_FIELDS if field in REASONING_FIELDS else (field,)
        every = {name: content + MARK for name in copies if last.get(name) == content}
        return [*messages[:-1], {**last, **every}], content
    parts = list(content) if isinstance(content, list | tuple) else []
    for number in reversed(range(len(parts))):
        part = parts[number]
        if isinstance(part, Mapping) and isinstance(text := part.get("text"), str):
            parts[number] = {**part, "text": text + MARK}
            return [*messages[:-1], {**last, field: parts}], text
    raise UsageError(f"the last message has no {field} that can be continued")


def cut(pieces: Sequence[tuple[str, bool]], text: str) -> list[tuple[str, bool]]:
    """The pieces of a prompt up to the mark.

    Args:
        pieces: texts, each with whether it is markup.
        text: the text before the mark; white space at its end stays only where the template
            keeps it.

    Raises:
        ChatTemplateError: the template leaves out the text, or part of it.
    """
    prompt = "".join(piece for piece, _ in pieces)
    at = prompt.rfind(MARK.strip())
    if at < 0 or text.strip() not in prompt:
        raise ChatTemplateError(
            "the chat template leaves out part of the message that is to be continued",
            hint="continue another message, or shorten it to the part that the template keeps",
        )
    left = at if prompt.startswith(MARK, at) else len(prompt[:at].rstrip())
    kept = []
    for piece, is_markup in pieces:
        if left > 0:
            kept.append((piece[:left], is_markup))
        left -= len(piece)
    return kept
