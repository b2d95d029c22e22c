"""What can be continued: a prompt, or a list of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias, TypeGuard

from localkv.loader.chat_prompt import ChatPrompt

Text: TypeAlias = str | Sequence[int]
"""A string, or token ids that are taken as they are."""

Prompt: TypeAlias = Text | ChatPrompt
Texts: TypeAlias = list[str] | list[list[int]]
Prompts: TypeAlias = Texts | list[ChatPrompt]


def are_many(prompts: Prompt | Prompts) -> TypeGuard[Prompts]:
    """Whether it is a list of prompts. An empty list is a prompt without tokens."""
    if isinstance(prompts, str | ChatPrompt) or len(prompts) == 0:
        return False
    first = prompts[0]
    return isinstance(first, str | ChatPrompt) or hasattr(first, "__len__")
