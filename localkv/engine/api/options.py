"""The keyword arguments of a generation, for type checkers and editors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from threading import Event
from typing import TYPE_CHECKING, Literal, TypedDict

from localkv.sampling.params import SamplingParams

if TYPE_CHECKING:
    from localkv.structured.grammar import Grammar, Schema


class SamplingOptions(TypedDict, total=False):
    """The fields of `SamplingParams`, which describes them."""

    seed: int | None
    temperature: float
    dynatemp_range: float
    dynatemp_exponent: float
    top_k: int
    top_p: float
    min_p: float
    typ_p: float
    top_n_sigma: float
    xtc_probability: float
    xtc_threshold: float
    min_keep: int
    repeat_last_n: int
    repeat_penalty: float
    frequency_penalty: float
    presence_penalty: float
    dry_multiplier: float
    dry_base: float
    dry_allowed_length: int
    dry_penalty_last_n: int
    dry_sequence_breakers: tuple[str, ...]
    logit_bias: Mapping[int, float]
    samplers: tuple[str, ...]


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
