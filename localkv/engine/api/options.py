"""The keyword arguments of a generation, for type checkers and editors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from threading import Event
from typing import TYPE_CHECKING, Literal, TypedDict

from localkv.sampling.params import SamplingOptions, SamplingParams

if TYPE_CHECKING:
    from localkv.structured.grammar import Grammar, Schema


class PromptOptions(TypedDict, total=False):
    """The arguments of `LLM.chat_prompt`; `LLM.chat` describes them."""

    tools: Sequence[Mapping[str, object]] | None
    template_kwargs: Mapping[str, object] | None
    enable_thinking: bool | None
    reasoning_budget: int | None
    reasoning_effort: str | None
    prefill: str
    continued: str
    continue_final_message: bool | str
    add_generation_prompt: bool | None


class ChatOptions(SamplingOptions, total=False):
    """The arguments of `LLM.chat` that are about its answer; `LLM.stream` describes them."""

    max_tokens: int | None
    stop: str | Sequence[str]
    ignore_eos: bool
    logprobs: int | None
    audit: bool | Literal["exact"]
    schema: Schema | None
    grammar: Grammar | str | None
    spec: str | None
    cancel: Event | None
    params: SamplingParams | None


class StreamOptions(ChatOptions, total=False):
    """The arguments of `LLM.stream`, which describes them."""

    parse_special: bool
