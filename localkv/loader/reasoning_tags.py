"""The tags between which models reason before they answer, of all families, in one table."""

from __future__ import annotations

from typing import NamedTuple


class ReasoningTags(NamedTuple):
    """The text that opens a model's reasoning and the one that closes it."""

    open: str
    close: str


REASONING_TAGS = (
    ReasoningTags("<think>", "</think>"),  # Qwen, DeepSeek, GLM, Granite, SmolLM
    ReasoningTags("[THINK]", "[/THINK]"),  # Mistral
    ReasoningTags("<|START_THINKING|>", "<|END_THINKING|>"),  # Command
    ReasoningTags("<seed:think>", "</seed:think>"),  # Seed
)


def tags_at_start(text: str) -> ReasoningTags | None:
    """The tags of an answer that begins with reasoning; white space before it does not count."""
    start = text.lstrip()
    return next((tags for tags in REASONING_TAGS if start.startswith(tags.open)), None)


def tags_at_end(text: str) -> ReasoningTags | None:
    """The tags of a prompt that ends by opening the reasoning, as some templates' do."""
    end = text.rstrip()
    return next((tags for tags in REASONING_TAGS if end.endswith(tags.open)), None)
