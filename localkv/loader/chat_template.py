"""Chat templates: a conversation becomes a prompt, and then token ids.

Templates are Jinja programs out of model files, so out of the internet: they run in a process of
their own, in which time and memory are limited (`localkv.loader.template_process`). What users and
models said can't become a control token: rendering tells the template's own text from everything
else (`localkv.loader.template_program`), and only the former may hold any.

A prompt may end within the last message, so that a model goes on with it, as with transformers'
`continue_final_message`. A mark is put after the message's text, the conversation is rendered, and
the prompt is cut at the mark.

This file knows nothing about the messages of any API (`localkv.loader.chat_messages`), and of a
tokenizer only what `encode_chat` asks of one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from localkv.errors import ChatTemplateError, UsageError
from localkv.loader.vocabulary import bos_and_eos

if TYPE_CHECKING:
    from localkv.loader.metadata import Metadata

__all__ = [
    "ChatTemplate",
    "ChatTemplateError",
    "ChatTokenizer",
    "Segment",
    "chat_template_from_metadata",
    "chat_template_names",
    "encode_chat",
    "encode_prompt",
    "has_chat_template",
]

THINK = "enable_thinking"
"""The variable by which most templates are told whether the model reasons before it answers."""

_PRESERVING = {
    "preserve_thinking": True,
    "clear_thinking": False,
    "truncate_history_thinking": False,
    "drop_thinking": False,
}
"""Variables that say whether the reasoning of earlier answers stays, and the value for "yes"."""

_DEFAULT_KEY = "tokenizer.chat_template"
_THINKING = re.compile(r"\{%-?\s*(?:el)?if\s+(?:not\s+)?thinking\b(?!\s*\.)")
"""That variable by the name that Granite 3's, DeepSeek V3.1's and Kimi K3's have for it."""

_FUNCTIONS, _FUNCTION_CALLS = "functions", "functools["
"""Firefunction's name for the tools, as a text of JSON, and how it writes calls."""

REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""Names of a message's reasoning: the one that most templates read, gpt-oss's, and another."""

MARK = "CONTINUE_FINAL_MESSAGE_TAG "
"""transformers' mark, which some templates look for.

A template that trims messages takes the space away, which shows that it does."""


class Segment(NamedTuple):
    """A piece of a prompt: its text, and whether the template wrote it itself."""

    text: str
    is_markup: bool


class ChatTemplate:
    """A template.

    Args:
        source: the Jinja program.
        bos_token, eos_token: texts of these tokens, empty if the model has none.
    """

    def __init__(self, source: str, *, bos_token: str, eos_token: str) -> None:
        self.source = source
        self.bos_token = bos_token
        self.eos_token = eos_token

    def reads(self, name: str) -> bool:
        """Whether the template's source has this word; a variable that it lacks has no effect."""
        return re.search(rf"\b{re.escape(name)}\b", self.source) is not None

    @cached_property
    def takes_tools(self) -> bool:
        """Whether the model is told of tools."""
        return self.reads("tools") or self._takes_functions

    @cached_property
    def _takes_functions(self) -> bool:
        return _FUNCTION_CALLS in self.source and self.reads(_FUNCTIONS)

    @cached_property
    def think_switch(self) -> str | None:
        """The variable that says whether the model reasons before it answers, if there is one."""
        if self.reads(THINK):
            return THINK
        return "thinking" if _THINKING.search(self.source) else None

    def preserving(self, preserves: bool) -> dict[str, bool]:
        """The variables by which the reasoning of earlier answers is kept, or left out.

        Returns:
            those that the template reads; none if it decides by itself.
        """
        read = {name: kept for name, kept in _PRESERVING.items() if self.reads(name)}
        return {name: kept == preserves for name, kept in read.items()}

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool | str = False,
        tools: Sequence[Mapping[str, object]] | None = None,
        **kwargs: object,
    ) -> str:
        """The prompt as one text; for showing, since it does not tell markup from contents.

        Args:
            messages: the conversation, usually {"role": ..., "content": ...}; JSON values only.
            add_generation_prompt: end with the text that opens the model's turn.
            continue_final_message: end right after the text of the last message, or of
                another of its fields (a name such as "reasoning_content").
            tools: descriptions of tools as JSON schemas.
            kwargs: more variables for the template, such as `enable_thinking`.

        Raises:
            ChatTemplateError: the template is malformed or fails on this conversation, which may be
                its intention ("system role not supported"); or it leaves out the last message.
            UsageError: a message holds something that is not JSON, or is nested too deeply; there
                is no text to continue.
        """
        rendered = self.render_segments(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            **kwargs,
        )
        return "".join(segment.text for segment in rendered)

    def render_segments(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool | str = False,
        tools: Sequence[Mapping[str, object]] | None = None,
        **kwargs: object,
    ) -> list[Segment]:
        """The prompt in pieces; see `render` for arguments and errors."""
        text = None
        if continue_final_message:
            field = "content" if continue_final_message is True else continue_final_message
            messages, text = marked(messages, field)
        try:
            variables = {
                "documents": None,
                **{name: _plain(value, name) for name, value in kwargs.items()},
                "messages": _plain(messages, "messages"),
                "tools": _plain(tools, "tools"),
                "add_generation_prompt": add_generation_prompt,
            }
            if self._takes_functions:
                functions = [tool.get("function", tool) for tool in variables["tools"] or ()]
                variables.setdefault(_FUNCTIONS, json.dumps(functions, indent=4))
        except RecursionError:
            raise UsageError("the conversation is nested too deeply for a template") from None
        from localkv.loader.template_process import rendered_apart

        pieces = rendered_apart(self.source, self.bos_token, self.eos_token, variables)
        if text is not None:
            pieces = cut(pieces, text)
        return [Segment(piece, is_markup) for piece, is_markup in pieces]


def chat_template_from_metadata(metadata: Metadata, name: str | None = None) -> ChatTemplate | None:
    """The chat template of a GGUF file, None if it has none.

    Args:
        metadata: of the file.
        name: which, where there are several (`tokenizer.chat_template.NAME`).

    Raises:
        UsageError: there is none of that name.
        ModelFileError: a key is of the wrong type.
    """
    key = _DEFAULT_KEY if name is None else f"{_DEFAULT_KEY}.{name}"
    source = metadata.string(key, None)
    if source is None and name == "default":
        source = metadata.string(_DEFAULT_KEY, None)
    if source is None:
        if name is None:
            return None
        names = chat_template_names(metadata)
        raise UsageError(
            f"the model has no chat template {name!r}",
            hint=f"it has: {', '.join(names)}" if names else "it has no named ones",
        )
    tokens = metadata.string_array("tokenizer.ggml.tokens")
    bos, eos = ("" if token is None else tokens.text(token) for token in bos_and_eos(metadata))
    return ChatTemplate(source, bos_token=bos, eos_token=eos)


def has_chat_template(metadata: Metadata) -> bool:
    """Whether there is a chat template, by whatever name."""
    return _DEFAULT_KEY in metadata or bool(chat_template_names(metadata))


def chat_template_names(metadata: Metadata) -> list[str]:
    """Names of the templates that a file has in addition to the default one."""
    prefix = _DEFAULT_KEY + "."
    return sorted(key.removeprefix(prefix) for key in metadata if key.startswith(prefix))


class ChatTokenizer(Protocol):
    """A tokenizer as `encode_chat` needs it."""

    @property
    def bos_id(self) -> int | None: ...

    @property
    def add_bos(self) -> bool: ...

    def encode_segments(
        self, segments: Iterable[tuple[str, bool]], add_special: bool = True
    ) -> list[int]: ...


def encode_chat(
    tokenizer: ChatTokenizer,
    template: ChatTemplate,
    messages: Sequence[Mapping[str, object]],
    **options: Any,
) -> list[int]:
    """Token ids of a conversation, ready for the model to answer.

    Args:
        tokenizer: the model's.
        template: the template to render.
        messages, options: the arguments of `ChatTemplate.render`.

    Raises:
        ChatTemplateError, UsageError: as `ChatTemplate.render`.
    """
    return encode_prompt(tokenizer, template.render_segments(messages, **options))


def encode_prompt(tokenizer: ChatTokenizer, prompt: Iterable[Segment]) -> list[int]:
    """Token ids of a rendered conversation.

    Control tokens come from the template alone. Where the model wants BOS there is exactly one,
    whether the template writes it or not; EOS is never added.
    """
    ids = tokenizer.encode_segments(prompt, add_special=False)
    bos = tokenizer.bos_id
    if tokenizer.add_bos and bos is not None and ids[:1] != [bos]:
        ids.insert(0, bos)
    return ids


def _plain(value: Any, where: str) -> Any:
    """A copy of a value in plain JSON types: templates see no methods and no markup of ours."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, Mapping):
        return {_plain(key, where): _plain(item, where) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, where) for item in value]
    raise UsageError(f"{where}: a {type(value).__name__} is not a JSON value")


def marked(
    messages: Sequence[Mapping[str, object]], field: str
) -> tuple[list[Mapping[str, object]], str]:
    """The messages with the mark after the text of the last, and that text.

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
