"""What can be continued: a prompt, or a list of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias, TypeGuard

from localkv.errors import UsageError
from localkv.loader.chat_prompt import ChatPrompt

Text: TypeAlias = str | Sequence[int]
"""A string, or token ids that are taken as they are."""

Prompt: TypeAlias = Text | ChatPrompt
Texts: TypeAlias = list[str] | list[list[int]]
Prompts: TypeAlias = Texts | list[ChatPrompt]


def are_many(prompts: Prompt | Prompts) -> TypeGuard[Prompts]:
    """Whether it is a list of prompts. An empty list is a prompt without tokens."""
    if isinstance(prompts, str | ChatPrompt) or not isinstance(prompts, Sequence) or not prompts:
        return False
    return _is_prompt(prompts[0])


def listed(prompts: Iterable[Prompt]) -> list[Prompt]:
    """The prompts of a list, or of anything else that yields them.

    Raises:
        UsageError: it is one prompt.
    """
    is_list = isinstance(prompts, Iterable) and not isinstance(prompts, str | bytes | ChatPrompt)
    every = [*prompts] if is_list else []
    if not is_list or not all(map(_is_prompt, every)):
        raise UsageError(
            "this is one prompt, and not a list of them", hint="complete continues one prompt"
        )
    return every


def _is_prompt(one: object) -> bool:
    """Whether it is a prompt, and not a token of one."""
    return isinstance(one, str | ChatPrompt) or hasattr(one, "__len__")
