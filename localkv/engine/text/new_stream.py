"""From token ids to a stream of text: the sampler, the generation and the decoder put together."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Event
from typing import TYPE_CHECKING, Literal

from localkv.engine.audit.predictions import Predictions
from localkv.engine.engine import Engine
from localkv.engine.generation import GenerationOptions
from localkv.engine.speculation.config import Speculation
from localkv.engine.text.reasoning_budget import ReasoningBudget
from localkv.engine.text.stream import TextStream, TokenDecoder
from localkv.loader.answer_tags import ChannelDecoder, channel_markers
from localkv.loader.tokenizer import Tokenizer
from localkv.sampling.params import SamplingParams
from localkv.sampling.sampler import Sampler

if TYPE_CHECKING:
    from localkv.engine.requests.batch_engine import BatchEngine
    from localkv.structured.constraint import Constraint
    from localkv.structured.grammar import Grammar, Schema


@dataclass(frozen=True)
class TextOptions:
    """What is asked of a text. `LLM.stream` describes the attributes, but for `params`: these are
    all that tokens are drawn by."""

    max_tokens: int | None = None
    stop: str | Sequence[str] = ()
    ignore_eos: bool = False
    parse_special: bool = False
    logprobs: int | None = None
    audit: bool | Literal["exact"] = False
    schema: Schema | None = None
    grammar: Grammar | str | None = None
    spec: str | None = None
    cancel: Event | None = None
    params: SamplingParams = field(default_factory=SamplingParams)


@dataclass(frozen=True)
class Answer:
    """What is particular to the answer of a conversation.

    Attributes:
        opening: text at the end of the prompt that the stream's begins with.
        kept: control tokens that are part of the text.
        budget: of the reasoning, which it counts.
    """

    opening: str
    kept: Container[int]
    budget: ReasoningBudget


def new_stream(
    engine: Engine | BatchEngine,
    tokenizer: Tokenizer,
    ids: Sequence[int],
    options: TextOptions,
    *,
    answer: Answer | None = None,
    constraint: Callable[[SamplingParams], Constraint] | None = None,
    predictions: Predictions | None = None,
    speculation: Speculation,
) -> TextStream:
    """A stream that continues `ids`.

    Args:
        engine: a scheduler of one request, or of many.
        answer: of a conversation; one of several messages becomes one text.
        constraint: makes what the text keeps to, given how tokens are drawn.
        predictions: keeps what an audit needs.
        speculation: how tokens are guessed.

    Raises:
        ContextOverflowError: the prompt is longer than the context.
    """
    params = options.params
    never = tokenizer.suppressed_ids | (tokenizer.eog_ids if options.ignore_eos else frozenset())
    if never:
        bias = {**params.logit_bias, **dict.fromkeys(never, float("-inf"))}
        params = replace(params, logit_bias=bias)
    sampler = Sampler(
        params,
        n_vocab=engine.model.config.n_vocab,
        n_ctx=engine.n_ctx,
        token_text=lambda token: tokenizer.token_bytes(token, special=True).decode(
            errors="replace"
        ),
        tokenize=tokenizer.encode_within,
    )
    budget = None if answer is None else answer.budget
    generation = engine.generate(
        ids,
        GenerationOptions(
            sampler,
            max_tokens=options.max_tokens,
            stop_ids=tokenizer.eog_ids,
            cancel=options.cancel or Event(),
            forcing=budget,
            constraint=None if constraint is None else constraint(params),
            logprobs=options.logprobs,
            predictions=predictions,
            speculation=speculation,
        ),
    )
    stops = (options.stop,) if isinstance(options.stop, str) else options.stop
    decoder: TokenDecoder = tokenizer.stream_decoder(
        after=ids, skip_special=True, kept=() if answer is None else answer.kept
    )
    markers = None if answer is None else channel_markers(tokenizer)
    if markers:
        decoder = ChannelDecoder(decoder, markers, ids)
    has_logprobs = options.logprobs is not None
    return TextStream(
        generation,
        decoder,
        stops,
        sampler.seed,
        opening="" if answer is None else answer.opening,
        n_reasoned=lambda: 0 if budget is None else budget.n_written,
        token_bytes=partial(tokenizer.token_bytes, special=True) if has_logprobs else None,
    )
