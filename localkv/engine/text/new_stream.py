"""From token ids to a stream of text: the sampler, the generation and the decoder put together."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import replace
from functools import partial
from threading import Event
from typing import TYPE_CHECKING

from localkv.engine.audit.predictions import Predictions
from localkv.engine.engine import Engine
from localkv.engine.speculation.config import Speculation
from localkv.engine.text.reasoning_budget import ReasoningBudget
from localkv.engine.text.stream import TextStream, TokenDecoder
from localkv.loader.answer_tags import ChannelDecoder, channel_markers
from localkv.loader.tokenizer import Tokenizer
from localkv.sampling.params import SamplingParams
from localkv.sampling.sampler import Sampler

if TYPE_CHECKING:
    from localkv.engine.requests.batch_engine import BatchEngine
    from localkv.structured.grammar import Grammar
    from localkv.structured.grammar_tokens import GrammarTokens
    from localkv.structured.scope import Scope


def new_stream(
    engine: Engine | BatchEngine,
    tokenizer: Tokenizer,
    ids: Sequence[int],
    params: SamplingParams,
    *,
    max_tokens: int | None,
    stop: str | Sequence[str],
    ignore_eos: bool,
    cancel: Event | None,
    opening: str = "",
    kept: Container[int] = (),
    in_channels: bool = False,
    budget: ReasoningBudget | None = None,
    grammar: Grammar | None = None,
    grammar_tokens: GrammarTokens | None = None,
    scope: Scope | None = None,
    logprobs: int | None = None,
    predictions: Predictions | None = None,
    speculation: Speculation | None = None,
) -> TextStream:
    """A stream that continues `ids`. `LLM.stream` describes the arguments.

    Args:
        engine: a scheduler of one request, or of many.
        opening: text at the end of the prompt that the stream's begins with.
        kept: control tokens that are part of the text.
        in_channels: an answer of several messages becomes one text, if the model writes such.
        budget: of an answer's reasoning, which it counts.
        grammar: what the text keeps to, where `scope` says, or everywhere; it needs
            `grammar_tokens`.
        predictions: keeps what an audit needs.
        speculation: how tokens are guessed.

    Raises:
        ContextOverflowError: the prompt is longer than the context.
    """
    never = tokenizer.suppressed_ids | (tokenizer.eog_ids if ignore_eos else frozenset())
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
    constraint = None
    if grammar is not None and grammar_tokens is not None:
        from localkv.structured.constraint import Constraint
        from localkv.structured.scope import EVERYWHERE

        banned = [token for token, bias in params.logit_bias.items() if bias == float("-inf")]
        constraint = Constraint(
            grammar_tokens,
            grammar,
            n_logits=engine.model.config.n_vocab,
            scope=scope or EVERYWHERE,
            banned=banned,
        )
    generation = engine.generate(
        ids,
        sampler=sampler,
        max_tokens=max_tokens,
        stop_ids=tokenizer.eog_ids,
        cancel=cancel,
        forcing=budget,
        constraint=constraint,
        logprobs=logprobs,
        predictions=predictions,
        speculation=speculation,
    )
    stops = (stop,) if isinstance(stop, str) else stop
    markers = channel_markers(tokenizer) if in_channels else None

    decoder: TokenDecoder = tokenizer.stream_decoder(after=ids, skip_special=True, kept=kept)
    if markers:
        decoder = ChannelDecoder(decoder, markers, ids)
    token_bytes = None if logprobs is None else partial(tokenizer.token_bytes, special=True)
    return TextStream(
        generation,
        decoder,
        stops,
        sampler.seed,
        opening=opening,
        n_reasoned=lambda: 0 if budget is None else budget.n_written,
        token_bytes=token_bytes,
    )
