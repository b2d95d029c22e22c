"""The tags that models put around their reasoning, and around calls of tools, in an answer.

`REASONING_TAGS` is the one table of all families' tags of reasoning. gpt-oss has channels instead:
each message of an answer names one. In a prompt they are tags like others; in a text `<think>` and
`</think>` stand for them.

An answer of OpenAI's harmony format is `<|channel|>analysis<|message|>...<|end|><|start|>assistant
<|channel|>final<|message|>...<|return|>`. The reasoning is in the channel `analysis`. What is meant
for the user is in `final` or, before a tool is called, in `commentary`. A call names its recipient,
`commentary to=functions.NAME <|constrain|>json`, and ends with `<|call|>`. `ChannelDecoder` makes
one text of these messages, with a call between `<tool_call>` and `</tool_call>`, as other models
write it. (https://cookbook.openai.com/articles/openai-harmony)
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import NamedTuple, Protocol


class ReasoningTags(NamedTuple):
    """The text that opens a model's reasoning and the one that closes it."""

    open: str
    close: str


THINK_TAGS = ReasoningTags("<think>", "</think>")
"""What most models write, and what a text has for reasoning in a channel."""

CHANNELS = ReasoningTags(
    "<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>"
)
"""gpt-oss's: the close of its reasoning begins the message that is the answer."""

CHANNEL_END, NEXT_MESSAGE = "<|end|>", "<|end|><|start|>assistant"
"""What ends any message of gpt-oss's, and what begins another: a call follows reasoning, too."""

REASONING_TAGS = (
    THINK_TAGS,  # Qwen, DeepSeek, GLM, Kimi, MiniMax M2, Granite, EXAONE, Hunyuan, Ernie, LFM2
    ReasoningTags("[THINK]", "[/THINK]"),  # Mistral
    ReasoningTags("<|START_THINKING|>", "<|END_THINKING|>"),  # Command
    ReasoningTags("<seed:think>", "</seed:think>"),  # Seed
    ReasoningTags("<|channel>thought", "<channel|>"),  # Gemma 4
    ReasoningTags("<|inner_prefix|>", "<|inner_suffix|>"),  # Apertus
    ReasoningTags("<mm:think>", "</mm:think>"),  # MiniMax M3
    ReasoningTags("<thought>", "</thought>"),  # EXAONE Deep
    CHANNELS,
)

PRESERVE = "preserve_reasoning"
"""llama.cpp's name for the variables that have a template keep the reasoning of earlier answers."""

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""How much a model reasons, in the words of OpenAI and Anthropic; templates read some of them."""

ANSWER_TAGS = (
    ReasoningTags("<response>", "</response>"),  # Granite 3, Ernie
    ReasoningTags("<answer>", "</answer>"),  # Hunyuan
)
"""The tags that some models put around the answer after they have reasoned."""


def tags_at_start(text: str) -> ReasoningTags | None:
    """The tags of an answer that begins with reasoning; white space before it does not count."""
    start = text.lstrip()
    return next((tags for tags in REASONING_TAGS if start.startswith(tags.open)), None)


def tags_at_end(text: str) -> ReasoningTags | None:
    """The tags of a prompt that ends by opening the reasoning, as some templates' do."""
    end = text.rstrip()
    return next((tags for tags in REASONING_TAGS if end.endswith(tags.open)), None)


_MARKERS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>")
_CONSTRAIN = "<|constrain|>"
_RECIPIENT = re.compile(r"\bto=(\S+)")
_MOST_HEADER = 200
"""Characters of a header; what is longer is none, but the text of a model that leaves it out."""

_OPEN, _CLOSE = THINK_TAGS.open + "\n", "\n" + THINK_TAGS.close + "\n\n"
_CALL_CLOSE = "}\n</tool_call>"


class _Decoder(Protocol):
    def push(self, token: int) -> str: ...

    def flush(self, *, is_cut: bool = False) -> str: ...


class _Vocabulary(Protocol):
    def token_to_id(self, text: str) -> int | None: ...


class ChannelDecoder:
    """A decoder of tokens (`StreamDecoder`) for an answer in channels, on top of one for its texts.

    Args:
        decoder: turns the tokens of a message into text.
        markers: the ids of `channel_markers`.
        prompt_ids: of the prompt, which may end within a message of the answer.
    """

    def __init__(
        self, decoder: _Decoder, markers: dict[int, str], prompt_ids: Sequence[int]
    ) -> None:
        self._decoder = decoder
        self._markers = markers
        self._header: str | None = None
        self._is_reasoning = False
        self._ending = ""
        self._replay(prompt_ids)

    def _replay(self, prompt_ids: Sequence[int]) -> None:
        """Come to where the prompt ends: in which channel, or in a header."""
        at = len(prompt_ids) - 1
        while at >= 0 and self._markers.get(prompt_ids[at]) != "<|start|>":
            at -= 1
        for token in prompt_ids[max(at, 0) :]:
            self.push(token)
        if self._header is not None and "<|channel|>" not in self._header:
            self._header = ""  # the role that the prompt ends with

    def push(self, token: int) -> str:
        marker = self._markers.get(token)
        if marker is None:
            piece = self._decoder.push(token)
            return piece if self._header is None else self._in_header(piece)
        rest = self._decoder.flush()
        self._decoder.push(token)  # it tells the decoder that a text begins
        if marker == "<|end|>":
            return rest + self._end()
        if marker == "<|start|>":
            self._header = "<|start|>"
        elif marker == "<|message|>" and self._header is not None:
            return self._begin(self._header)
        elif self._header is not None:
            self._header += marker
        elif marker == "<|channel|>":
            self._header = marker
        return rest

    def flush(self, *, is_cut: bool = False) -> str:
        rest, ending, self._ending = self._decoder.flush(is_cut=is_cut), self._ending, ""
        header, self._header = self._header, None
        if is_cut:
            return rest  # the model would have gone on, with a header or in a call
        return rest + ending + ("" if header is None or header.startswith("<|") else header)

    def _in_header(self, piece: str) -> str:
        """A piece of a header, or the text of a model that writes none."""
        assert self._header is not None
        header = self._header + piece
        is_possible = header.startswith("<|") or " to=".startswith(header[:4])
        if is_possible and len(header) <= _MOST_HEADER:
            self._header = header
            return ""
        self._header = None
        return _plain(header)

    def _begin(self, header: str) -> str:
        """The text before a message's own, once its header is complete."""
        self._header = None
        _, _, channel = header.partition("<|channel|>")
        recipient = _RECIPIENT.search(header.replace("<|", " <|"))
        is_reasoning = channel.startswith("analysis") and recipient is None
        text = ""
        if is_reasoning and self._is_reasoning:
            text = "\n\n"
        elif is_reasoning:
            text = _OPEN
        elif self._is_reasoning:
            text = _CLOSE
        self._is_reasoning = is_reasoning
        if recipient is not None:
            name = json.dumps(recipient[1].removeprefix("functions."))
            text += f'<tool_call>\n{{"name": {name}, "arguments": '
            self._ending = _CALL_CLOSE
        return text

    def _end(self) -> str:
        """The text after a message's own."""
        ending, self._ending = self._ending, ""
        return ending + ("" if self._is_reasoning else "\n\n")


def _plain(header: str) -> str:
    return header.removeprefix("<|start|>").removeprefix("<|channel|>")


def channel_markers(vocabulary: _Vocabulary) -> dict[int, str]:
    """The tokens that make channels, empty if a model has none."""
    ids = {vocabulary.token_to_id(marker): marker for marker in (*_MARKERS, _CONSTRAIN)}
    found = {token: marker for token, marker in ids.items() if token is not None}
    return found if set(_MARKERS) <= set(found.values()) else {}


def writes_channels(source: str) -> bool:
    """Whether a template has a model answer in channels."""
    return all(marker in source for marker in _MARKERS)


def in_channels(text: str) -> list[tuple[str, bool]]:
    """An answer's text as the model wrote it: pieces, each with whether it is markup."""
    if not text.startswith(THINK_TAGS.open):
        final = "<|channel|>final<|message|>"
        return [(final, True), (text, False)]
    reasoning, close, answer = text.removeprefix(THINK_TAGS.open).partition(THINK_TAGS.close)
    reasoning = reasoning.removeprefix("\n")
    if not close:
        return [(CHANNELS.open, True), (reasoning, False)]
    pieces = (
        (CHANNELS.open, True),
        (reasoning.removesuffix("\n"), False),
        (CHANNELS.close, True),
        (answer.removeprefix("\n\n"), False),
    )
    return [piece for piece in pieces if piece[0]]


CALL_MARKERS = (
    *("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),  # Mistral
    *("<tool_call>", "</tool_call>"),  # Qwen, GLM, Hermes, Granite 4
    *("<|tool_call|>", "<|/tool_call|>"),  # Phi-4 mini, Granite 3
    "<|python_tag|>",  # Llama 3
    *("<|tool_call_start|>", "<|tool_call_end|>"),  # LFM2
    *("<|START_ACTION|>", "<|END_ACTION|>"),  # Command
    *("<|tools_prefix|>", "<|tools_suffix|>"),  # Apertus
    *("<|tool_call>", "<tool_call|>", '<|"|>'),  # Gemma 4, and its quotation mark
    *("<minimax:tool_call>", "</minimax:tool_call>"),  # MiniMax
    *("<seed:tool_call>", "</seed:tool_call>"),  # Seed
    *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),  # DeepSeek
    *("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"),
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),  # Kimi K2
    *("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),  # GLM
    "｜DSML｜",  # DeepSeek V3.2 and V4
)
"""The control tokens that models put around a call of a tool in an answer.

They are part of an answer's text: without them nobody could tell which part of it is a call. In
most vocabularies such markers are no control tokens, and so part of the text in any case."""
