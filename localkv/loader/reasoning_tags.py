"""The tags between which models reason before they answer, of all families, in one table.

gpt-oss has channels instead: each message of an answer names one. In a prompt they are tags like
others; in a text `<think>` and `</think>` stand for them (`localkv.loader.channels`).
"""

from __future__ import annotations

from typing import NamedTuple


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
