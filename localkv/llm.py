"""`LLM`: a model file, a backend, a cache and a tokenizer put together. The public Python API."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from threading import Event, Lock
from typing import TYPE_CHECKING, Any, Literal, Never, Self, TypeAlias, Unpack, cast, overload

import numpy as np

from localkv.arch.placement import Offload
from localkv.arch.spec import ModelSpec
from localkv.cache.cache_checks import check_before_rope
from localkv.cache.layout import pairs_of
from localkv.cache.profile import KVProfile
from localkv.config import ACTIVATIONS, DEFAULT_CACHE_DISK, FIT, CacheConfig, KVScales, Overrides
from localkv.engine.batch_engine import BatchEngine
from localkv.engine.embedding import Pooling, Vectors, check_pooling, normalised, pooling_of_file
from localkv.engine.engine import Engine
from localkv.engine.generation import GenerationOptions
from localkv.engine.logprobs import Predictions
from localkv.engine.reasoning import ReasoningBudget
from localkv.engine.speculation.config import RECORDING_LEFT, Speculation, check_drafter, check_head
from localkv.engine.speculation.draft_model import DraftModel
from localkv.engine.stream import NO_LIMITS, Completion, LineLimits, TextStream, TokenDecoder
from localkv.engine.tokenized_model import (
    ChatOptions,
    Prompt,
    Prompts,
    StreamOptions,
    Text,
    Texts,
    TokenizedModel,
    are_many,
    listed,
)
from localkv.errors import ModelClosedError, UsageError, counted, printable
from localkv.kernels.backend import Backend, in_words
from localkv.kernels.places import Places
from localkv.kernels.select import first_device, gpu_names, places_of, select_backend, unused_gpu
from localkv.loader.answer_tags import ChannelDecoder, channel_markers
from localkv.loader.chat_messages import checked_tools
from localkv.loader.chat_prompt import ChatPrompt
from localkv.loader.chat_template import ChatTemplate
from localkv.loader.chosen_cache import chosen_cache
from localkv.loader.gguf_file import open_gguf
from localkv.loader.model_fingerprint import model_identity
from localkv.loader.model_header import with_overrides
from localkv.loader.smoothing import SMOOTHED, changed_tensors
from localkv.loader.tokenizer import Tokenizer
from localkv.loader.weights import check_tensors, checked_spec, load_model, lock_weights
from localkv.memory.fit import (
    Budgeted,
    beyond_training,
    cache_in_bytes,
    cache_that_fits,
    check_fit,
    check_parts_fit,
    chosen_context,
    free_memory,
    free_on,
    in_places,
)
from localkv.memory.plan import ModelMemory
from localkv.option_checks import check_options, check_types, keywords, unknown_name
from localkv.sampling.params import SamplingOptions, SamplingParams
from localkv.sampling.sampler import Sampler
from localkv.system.bus_errors import end_cleanly_from_threads
from localkv.system.loading_line import OnProgress, reporting
from localkv.system.this_process import uncollected
from localkv.system.threads import default_threads, place_caller, place_process, use_threads

if TYPE_CHECKING:
    from localkv.engine.async_stream import AsyncTextStream
    from localkv.engine.audit import Audit
    from localkv.engine.disk_cache import DiskCache
    from localkv.engine.disk_folder import DiskFolder
    from localkv.loader.adapter_file import AdapterFile
    from localkv.loader.adapters import LoadedAdapter
    from localkv.loader.gguf_file import GGUFFile
    from localkv.loader.smoothing import Smoothing
    from localkv.memory.draft_file import DraftFile
    from localkv.structured.constraint import Constraint
    from localkv.structured.grammar import Grammar, Schema


Logits: TypeAlias = np.ndarray[tuple[int, int], np.dtype[np.float32]]
"""[tokens, n_vocab]"""

NO_GPU = (
    "there is no GPU, so options that place parts of the model on one (n_gpu_layers, -ngl) "
    "change nothing"
)
_HELD = (
    *("engine", "batch", "backend", "places", "gguf"),
    *("tokenizer", "grammar_tokens", "chat_template"),
)
"""Attributes of a model that end with `close`."""


class LoadedModel(TokenizedModel):
    """What all that an `LLM` does begins with.

    Attributes:
        engine: token ids in, token ids out.
        config: the model's sizes.
        cache: the cache's types and context length.
        backend: where the weights are.
        draft: a smaller model that guesses for this one; it is closed with it.
    """

    engine: Engine
    config: ModelSpec
    cache: CacheConfig
    backend: Backend
    draft: LoadedModel | None = None
    _kernels: dict[str, str]

    def logits(self, ids: Sequence[int]) -> Logits:
        """Logits of every position, through the cache: float32 [len(ids), n_vocab]."""
        check_types(LoadedModel.logits, locals())
        logits: Logits = self.backend.arrays.to_numpy(self.engine.logits(ids))
        return logits

    @property
    def kernels(self) -> dict[str, str]:
        """The implementation of each operation at this time, in a few words.

        It may change: on a CPU some weights are laid out while the first tokens are evaluated.
        """
        with suppress(ModelClosedError, AttributeError):  # a closed one's stay
            pairs = pairs_of(self.cache, self.config.groups)
            self._kernels = in_words(self.engine.model.uses(pairs))
        return self._kernels

    def close(self) -> None:
        """Free the weights, their mapping and the cache, once calls of other threads have ended.

        Whoever calls it again, or a stream of it, gets a `LocalKVError`; what `__init__` found out
        (`config`, `memory`, `warnings`) stays. To close it twice does nothing.
        """
        if self.draft is not None:
            self.draft.close()
        held = self.__dict__.get("batch") or self.__dict__.get("engine")
        if held is not None:
            with suppress(ModelClosedError):  # another thread was faster
                held.close()
        for name in _HELD:
            self.__dict__.pop(name, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name in _HELD:
                raise ModelClosedError
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _check_prompts(self, prompts: Iterable[Prompt], parse_special: bool) -> None:
        """Check that each of several prompts can be evaluated."""
        many = [self._ids(one, parse_special) for one in prompts]
        for number, ids in enumerate(many, 1):
            self.engine.check_prompt(ids, f"prompt {number} of {len(many)}")


@dataclass(frozen=True)
class Ranked:
    """A document, and how well it answers a query.

    Attributes:
        index: its place among those that were given.
        score: the first class's, as the model gives it: a logit, or a probability where the model
            makes one of it (Qwen 3 Reranker).
        scores: all classes'.
    """

    index: int
    score: float
    scores: tuple[float, ...]


class EmbeddingModel(LoadedModel):
    """Texts in, embeddings or scores out."""

    def rerank(
        self, query: str, documents: Sequence[str], *, top_n: int | None = None
    ) -> list[Ranked]:
        """Score how well documents answer a query, by a reranker, and order them.

        Query and document are evaluated together, as the model was trained (`pair_ids`).

        Args:
            query: the question.
            documents: the texts.
            top_n: how many of the best are returned; None for all.

        Returns:
            the best first; of equal ones the first given.

        Raises:
            UsageError: the model has no head that scores texts.
            ContextOverflowError: a pair is longer than the context; none was evaluated.
        """
        check_types(EmbeddingModel.rerank, locals())
        if top_n is not None and top_n < 1:
            raise UsageError(f"top_n must be at least 1, not {top_n}")
        pairs = [self.pair_ids(query, document) for document in documents]
        found = [
            Ranked(index, row[0], tuple(row))
            for index, row in enumerate(self.engine.scores(pairs).tolist())
        ]
        return sorted(found, key=lambda ranked: -ranked.score)[:top_n]

    def pooling_of(self, pooling: str | None) -> Pooling:
        """A pooling that was asked for; None is the model's own.

        Raises:
            UsageError: there is no such pooling, or the model was trained for none that is here.
        """
        if pooling is not None:
            return check_pooling(pooling)
        key = f"{self.config.architecture}.pooling_type"
        return pooling_of_file(self.gguf.metadata.integer(key, None))

    @overload
    def embed(
        self,
        texts: Text | Texts,
        *,
        pooling: Literal["mean", "cls", "last"] | None = None,
        normalize: bool = True,
        parse_special: bool = False,
    ) -> Vectors: ...

    @overload
    def embed(
        self,
        texts: Text | Texts,
        *,
        pooling: Literal["none"],
        normalize: bool = True,
        parse_special: bool = False,
    ) -> list[Vectors]: ...

    def embed(
        self,
        texts: Text | Texts,
        *,
        pooling: Pooling | None = None,
        normalize: bool = True,
        parse_special: bool = False,
    ) -> Vectors | list[Vectors]:
        """Embeddings: hidden states of the tokens after the last norm, pooled.

        They go through the cache, so its types matter, in turns of `n_batch` tokens. Texts of an
        encoder don't: they are evaluated together, `n_batch` tokens at a time.

        Args:
            texts: one text or a list of them, each a string or token ids.
            pooling: "mean" of the tokens, the first one ("cls"), the "last" one, or "none", which
                keeps every token's.
                None takes the one that the model was trained for, or "mean".
            normalize: make each vector's Euclidean norm 1.
            parse_special: control tokens written in the texts count as such.

        Returns:
            float32 [texts, n_embd]; with "none" a list with [tokens, n_embd] for each text.

        Raises:
            ContextOverflowError: a text is longer than the context; none was evaluated.
            UsageError: there is no such pooling.
        """
        check_types(EmbeddingModel.embed, {**locals(), "texts": ""})  # those by `_ids`
        pooling = self.pooling_of(pooling)
        if are_many(texts):
            many = [self._ids(text, parse_special) for text in texts]
        elif texts == []:
            many = []
        else:
            many = [self._ids(cast("Text", texts), parse_special)]
        vectors = self.engine.embeddings(many, pooling)
        if normalize:
            vectors = [normalised(vector) for vector in vectors]
        if pooling == "none":
            return cast("list[Vectors]", vectors)
        return np.array(vectors, np.float32).reshape(len(many), self.config.n_embd)


class StateModel(LoadedModel):
    """Texts in the cache to files, and back."""

    _smoothing: Smoothing | None
    _k_before_rope: bool

    def save_state(self, path: str | os.PathLike[str], ids: Sequence[int] | None = None) -> int:
        """Write the text that was evaluated last, prompt and answer, with its rows of K and V.

        The file takes its name once all of it is on the disk. It serves this model with the same
        types of K and V, on any device and in any context that has room (docs/states.md).

        Args:
            ids: write the text that begins most like these tokens instead, held or kept.

        Returns:
            the tokens of the text.

        Raises:
            UsageError: nothing was evaluated, or the file can't be written.
        """
        from localkv.engine.saved_state import save_state

        check_types(StateModel.save_state, locals())

        return save_state(self.engine.slot, path, self._identity, ids)

    def load_state(
        self,
        path: str | os.PathLike[str],
        *,
        convert: bool = False,
        on_note: Callable[[str], None] = lambda line: None,
    ) -> list[int]:
        """Take a text that `save_state` wrote into the cache: prompts that begin like it go on
        from there, with the bits that they would have without the file.

        All of the file is checked before the cache changes.

        Args:
            convert: pack K and V again if the state has them in other types; then what follows is
                not what it would be without the file.
            on_note: called with a line that says what this changed.

        Returns:
            the text's token ids, which `complete` and `stream` take as a prompt.

        Raises:
            UsageError: the file can't be read, is damaged, or is of another model, of other types
                of K and V, or for a larger context.
        """
        from localkv.engine.saved_state import load_state

        check_types(StateModel.load_state, locals())

        return load_state(
            self.engine.slot,
            path,
            self._identity,
            convert=self.cache if convert else None,
            on_note=on_note,
        )

    @property
    def _identity(self) -> dict[str, str]:
        from localkv.engine.saved_state import UNROTATED, choices_json

        model = model_identity(self.gguf, self.config, self.cache.n_ctx, self._smoothing)
        if self._k_before_rope:
            model["rope"] = UNROTATED
        return {**model, "choices": choices_json(self.cache)}


@dataclass(frozen=True)
class TextOptions:
    """What is asked of a text. `LLM.stream` and `LLM.batch_stream` describe the attributes, but for
    `params`: these are all that tokens are drawn by."""

    max_tokens: int | None = None
    stop: str | Sequence[str] = ()
    ignore_eos: bool = False
    parse_special: bool = False
    logprobs: int | None = None
    audit: bool | Literal["exact"] = False
    schema: Schema | None = None
    grammar: Grammar | str | None = None
    spec: str | None = None
    lora: Mapping[int, float] | None = None
    cancel: Event | None = None
    params: SamplingParams = field(default_factory=SamplingParams)
    salt: int = 0
    origin: bytes = b""
    reuses: bool = True
    ranks_after_samplers: bool = False
    lines: LineLimits = NO_LIMITS


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
    batch: BatchEngine,
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
        batch: whose request it becomes.
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
        n_vocab=batch.model.config.n_vocab,
        n_ctx=batch.n_ctx,
        token_text=lambda token: tokenizer.token_bytes(token, special=True).decode(
            errors="replace"
        ),
        tokenize=tokenizer.encode_within,
    )
    budget = None if answer is None else answer.budget
    generation = batch.generate(
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
            salt=options.salt,
            origin=options.origin,
            scales=batch.engine.scales_of(options.lora),
            reuses=options.reuses,
            ranks_after_samplers=options.ranks_after_samplers,
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
        lines=options.lines,
        token_bytes=partial(tokenizer.token_bytes, special=True) if has_logprobs else None,
    )


def completions(batch: BatchEngine, streams: Sequence[TextStream]) -> list[Completion]:
    """Run steps until all streams have ended, and read each as its tokens come: so one that ends
    with a stop string makes room for others at once.

    Raises:
        LocalKVError: the model yields NaN.
    """
    reading = list(streams)
    while reading:
        reading = [stream for stream in reading if _goes_on(stream)]
        if reading:
            batch.step()
    return [stream.completion for stream in streams]


def _goes_on(stream: TextStream) -> bool:
    """Read what is there of a stream; whether more is to come."""
    generation = stream.generation
    while generation.n_ready or generation.has_ended:
        if next(stream, None) is None:
            return False
    return True


_MAKING = Lock()
"""Held while something is made that is first wanted now."""


class TextModel(LoadedModel):
    """Texts in, texts out: what an `LLM` does above all.

    Attributes:
        check_further_cache: refuses another cache for which there is no room now that the model is
            loaded; raises DoesNotFitError, which names settings that would fit.
    """

    check_further_cache: Callable[[CacheConfig], None]
    speculation: Speculation = Speculation()
    _step_ms: float | None = None

    def stream(
        self,
        prompt: Prompt,
        *,
        max_tokens: int | None = None,
        stop: str | Sequence[str] = (),
        ignore_eos: bool = False,
        parse_special: bool = False,
        logprobs: int | None = None,
        audit: bool | Literal["exact"] = False,
        schema: Schema | None = None,
        grammar: Grammar | str | None = None,
        spec: str | None = None,
        lora: Mapping[int, float] | None = None,
        cancel: Event | None = None,
        params: SamplingParams | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> TextStream:
        """Continue a prompt, piece by piece.

        Args:
            prompt: text, token ids that are taken as they are, or a conversation (`chat_prompt`).
            max_tokens: most tokens to generate; None goes on to the end of the context.
            stop: strings that end the text; they are not part of it.
            ignore_eos: never draw an end-of-generation token.
            parse_special: control tokens written in the prompt count as such.
            logprobs: note how probable each token was, and this many of the most probable tokens
                at its place (0 for none), before samplers. Tokens are then drawn on the host, where
                a seed may give other tokens than on a GPU.
            audit: find out what the packed cache changed, once the text is complete: the `audit` of
                its `completion`. "exact" knows the whole distributions, and takes twice as long.
                Tokens are drawn on the host, as with `logprobs`, unless it is "exact".
            schema: the text is JSON that this JSON schema describes; a mapping, or JSON text. With
                "length" as its finish reason it broke off.
            grammar: the text is one of this grammar: GBNF, as llama.cpp has it, llguidance's Lark,
                or a `Grammar`. In an answer either of the two holds after its reasoning.
            spec: how tokens are guessed for this text, if not as the LLM was told to: "none" or
                "ngram". It may be "draft" if a model that drafts is loaded, and "mtp" if the
                model's own block is. The text is the same.
            lora: the scale of each adapter by its number in `lora_adapters`, for this text; one
                that is not named is left out. None takes the scales that they were loaded with.
            cancel: set it, from any thread, to end after the next token, or while other threads
                have their turn.
            params: how tokens are drawn.
            sampling: fields of `SamplingParams`, instead of or on top of `params`.

        Raises:
            ContextOverflowError: the prompt is longer than the context.
            LocalKVError: by the stream: the model yields NaN; or see the class.
        """
        options = {
            "max_tokens": max_tokens,
            "stop": stop,
            "ignore_eos": ignore_eos,
            "parse_special": parse_special,
            "logprobs": logprobs,
            "audit": audit,
            "schema": schema,
            "grammar": grammar,
            "spec": spec,
            "lora": lora,
            "cancel": cancel,
            "params": params,
        }
        return self._stream(prompt, self._text_options(prompt, {**options, **sampling}))

    def batch_stream(
        self,
        prompt: Prompt,
        *,
        salt: int = 0,
        origin: bytes = b"",
        reuses: bool = True,
        ranks_after_samplers: bool = False,
        lines: LineLimits = NO_LIMITS,
        **options: Unpack[StreamOptions],
    ) -> TextStream:
        """Continue a prompt as `stream` does, for a server, which runs the steps of `batch` itself.

        Args:
            prompt, options: as for `stream`.
            salt: texts of different salts share no rows of the cache.
            origin: what the salt stands for, in this process and others (`cache_disk`).
            reuses: the prompt's rows that are there already are taken; else all are evaluated.
            ranks_after_samplers: logprobs belong to the distribution that tokens are drawn from.
            lines: what ends it at the beginning of a line, with "length".

        Raises:
            LocalKVError: as `stream`.
        """
        asked = replace(
            self._text_options(prompt, options),
            salt=salt,
            origin=origin,
            reuses=reuses,
            ranks_after_samplers=ranks_after_samplers,
            lines=lines,
        )
        return self._stream(prompt, asked)

    def astream(self, prompt: Prompt, **options: Unpack[StreamOptions]) -> AsyncTextStream:
        """Continue a prompt as `stream` does, for `async for`; the event loop goes on meanwhile.

        With `n_parallel` above 1 several of them share the steps of the model. A task that is
        cancelled ends its generation.

        Args:
            prompt, options: as for `stream`.

        Raises:
            LocalKVError: as `stream`.
        """
        from localkv.engine.async_stream import AsyncTextStream  # imports asyncio

        cancel = options.get("cancel") or Event()
        options["cancel"] = cancel
        return AsyncTextStream(self.stream(prompt, **options), cancel)

    def _stream(self, prompt: Prompt, options: TextOptions) -> TextStream:
        predictions = self._predictions(options.audit)
        constraint, answer, grammar = None, None, None
        if options.schema is not None or options.grammar is not None:
            from localkv.structured.grammar import grammar_of

            grammar = grammar_of(options.schema, options.grammar)
        if grammar is not None:
            constraint = partial(self._constraint, grammar, prompt)
        ids = self._ids(prompt, options.parse_special)
        if isinstance(prompt, ChatPrompt):
            budget = ReasoningBudget(
                prompt.reasoning_budget,
                prompt,
                self.tokenizer,
                calls=grammar is not None and grammar.is_all,
                must_follow=grammar is not None and not grammar.after,
            )
            answer = Answer(prompt.opening, self._kept_ids, budget)
        stream = new_stream(
            self.batch,
            self.tokenizer,
            ids,
            options,
            answer=answer,
            constraint=constraint,
            predictions=predictions,
            speculation=self._speculation(options.spec),
        )
        if options.audit:
            stream.audited = partial(self.audit, stream)
        return stream

    def _text_options(self, prompt: Prompt, given: Mapping[str, object]) -> TextOptions:
        """The options of `stream`, checked."""
        others = {"chat": CHAT_OPTIONS, "LLM(...)": keywords(type(self).__init__)}
        check_options(given, STREAM_OPTIONS, others)
        check_types(TextModel.stream, {"prompt": prompt, **given})
        of_stream, sampling = dict[str, Any](), dict[str, Any]()
        for name, value in given.items():
            (sampling if name in SamplingOptions.__annotations__ else of_stream)[name] = value
        params = of_stream.pop("params", None) or SamplingParams()
        return TextOptions(params=replace(params, **sampling), **of_stream)

    def _predictions(self, audit: bool | Literal["exact"]) -> Predictions | None:
        """What keeps what an audit needs of each token, if it needs more than the text."""
        if audit not in (True, False, "exact"):
            raise UsageError(f"audit is {audit!r}", hint='use True, False or "exact"')
        if not audit:
            return None
        from localkv.engine.audit import check_kept

        check_kept(self.cache, audit is True)
        return Predictions() if audit is True else None

    def _constraint(self, grammar: Grammar, prompt: Prompt, params: SamplingParams) -> Constraint:
        """What a text keeps to whose tokens are drawn so."""
        from localkv.engine.reasoning import answer_scope
        from localkv.structured.constraint import Constraint
        from localkv.structured.grammar import EVERYWHERE

        scope = EVERYWHERE
        if isinstance(prompt, ChatPrompt):
            scope = answer_scope(grammar, prompt, self.tokenizer)
        return Constraint(
            self.grammar_tokens,
            grammar,
            n_logits=self.engine.model.config.n_vocab,
            scope=scope,
            banned=[token for token, bias in params.logit_bias.items() if bias == float("-inf")],
        )

    def audit(
        self, stream: TextStream, *, n_batch: int | None = None, cancel: Event | None = None
    ) -> Audit | None:
        """What the packed cache changed in a text that was generated.

        The text is evaluated once more, teacher-forced, through an f16 cache of its own; without
        memory for one of the whole text, in windows. If the stream did not keep what it needs
        (`audit`), the packed cache is evaluated again, too.

        Args:
            stream: one of this model's; of its text, what was read so far.
            n_batch: most tokens evaluated at a time; None for as many as in prompts, or some more
                if the model is very small.
            cancel: set it, from any thread, to end it after the batch at hand.

        Returns:
            None if there is no token, or it was cancelled.

        Raises:
            DoesNotFitError: there is no memory for an f16 cache.
            UsageError: the cache has a budget, and the stream kept nothing.
        """
        from localkv.engine.audit import CancelledReadingError, SecondReading, audit_of, long_batch

        generation, started = stream.generation, time.perf_counter()
        stats = generation.stats
        if not stats.n_generated:
            return None
        most, n_embd = self.engine.n_batch, self.engine.model.config.n_embd
        reading = SecondReading(
            self.engine.model,
            self.cache,
            n_batch=min(n_batch, most) if n_batch else long_batch(most, n_embd),
            check_room=self.check_further_cache,
            is_cancelled=lambda: cancel is not None and cancel.is_set(),
            scales=generation.request.text.scales,
        )
        predictions = generation.predictions
        try:
            found = reading.compare(generation.ids, stats.n_prompt, predictions)
        except CancelledReadingError:
            return None
        return audit_of(
            found,
            types=self.cache.types_text,
            is_exact=predictions is None or found.window is not None,
            seconds=time.perf_counter() - started,
            places=stream.places(),
            token_text=self._token_text,
        )

    def _speculation(self, spec: str | None) -> Speculation:
        return self.speculation if spec is None else replace(self.speculation, drafter=spec)

    @overload
    def complete(self, prompt: Prompt, **options: Unpack[StreamOptions]) -> Completion: ...

    @overload
    def complete(self, prompt: Prompts, **options: Unpack[StreamOptions]) -> list[Completion]: ...

    def complete(
        self, prompt: Prompt | Prompts, **options: Unpack[StreamOptions]
    ) -> Completion | list[Completion]:
        """Continue a prompt to the end, or several, one after the other.

        Args:
            prompt: as for `stream`, or a list of such prompts. All are checked first.
            options: the other arguments of `stream`.

        Raises:
            LocalKVError: as `stream`.
        """
        if not are_many(prompt):
            return self.stream(cast("Prompt", prompt), **options).completion
        self._check_prompts(prompt, options.get("parse_special", False))
        prompts: list[Prompt] = [*prompt]
        return [self.stream(one, **options).completion for one in prompts]

    def infill(
        self,
        prefix: str,
        suffix: str,
        *,
        extra: Sequence[tuple[str, str]] = (),
        suffix_first: bool = False,
        **options: Unpack[ChatOptions],
    ) -> Completion:
        """Fill in the middle: the text between `prefix` and `suffix`.

        Args:
            prefix, suffix, extra, suffix_first: as for `infill_prompt`.
            options: the other arguments of `stream`.

        Raises:
            UsageError: the model has no tokens for this.
            LocalKVError: as `stream`.
        """
        ids = self.infill_prompt(
            prefix,
            suffix,
            extra=extra,
            n_ctx=self.cache.n_ctx,
            max_tokens=options.get("max_tokens"),
            suffix_first=suffix_first,
        )
        return self.complete(ids, **options)

    @cached_property
    def batch(self) -> BatchEngine:
        """Serves several requests at the same time, as many as `n_parallel`."""
        with _MAKING:  # threads may ask at the same time, and there is one cache
            made = self.__dict__.get("batch")
            if made is None:
                made = self.__dict__["batch"] = BatchEngine(self.engine, step_ms=self._step_ms)
            return cast("BatchEngine", made)

    def complete_many(self, prompts: Prompts, **options: Unpack[StreamOptions]) -> list[Completion]:
        """Continue several prompts at the same time, `n_parallel` of them.

        On a CPU each gets the text that it would get alone. Prompts that begin alike are evaluated
        once where they do, and share this part of the cache.

        Args:
            prompts: the prompts. All are checked first.
            options: the other arguments of `stream`, for each.

        Raises:
            UsageError: it is one prompt, and not a list of them.
            LocalKVError: as `stream`; by any of them, and then none is completed.
        """
        every = listed(prompts)
        self._check_prompts(every, options.get("parse_special", False))
        streams = list[TextStream]()
        try:
            for prompt in every:
                streams.append(self._stream(prompt, self._text_options(prompt, options)))
            return completions(self.batch, streams)
        except BaseException:
            for stream in streams:
                stream.close()
            raise

    def chat(
        self,
        messages: str | Sequence[Mapping[str, object]],
        *,
        template: ChatTemplate | None = None,
        tools: Sequence[Mapping[str, object]] | None = None,
        tool_choice: str | Mapping[str, object] = "auto",
        parallel_tool_calls: bool = True,
        template_kwargs: Mapping[str, object] | None = None,
        enable_thinking: bool | None = None,
        reasoning_budget: int | None = None,
        reasoning_effort: str | None = None,
        preserve_reasoning: bool | None = None,
        prefill: str = "",
        continue_final_message: bool | str = False,
        add_generation_prompt: bool | None = None,
        **options: Unpack[ChatOptions],
    ) -> TextStream:
        """Answer a conversation, piece by piece.

        Nothing in the arguments becomes a control token: the template alone writes those. An
        argument that has no effect with this template is warned of (`UserWarning`).

        Reasoning comes first, between the model's tags for it, and the answer after them. For
        gpt-oss's channels the tags are `<think>` and `</think>`.

        Args:
            messages: a user's text, or {"role": "system" | "developer" | "user" | "assistant" |
                "tool", "content": text or a list of {"type": "text", "text": text}}, in order, with
                `tool_calls` and any other fields that the template reads.
            template: instead of the file's own; of these, the one for tools (`tool_use`) if there
                are tools.
            tools: descriptions of tools, as OpenAI's API and transformers take them. The calls in
                an answer are the `tool_calls` of its completion, and `content` the rest.
            tool_choice: "auto" leaves it to the model; "required", or the name of a tool, has the
                answer be a call, by a grammar; "none" leaves the tools out of the prompt. OpenAI's
                objects do, too.
            parallel_tool_calls: a required call may be several.
            template_kwargs: more variables for the template.
            enable_thinking: the variable of that name: whether the model reasons before it answers.
                None leaves it to the template.
            reasoning_budget: most tokens of reasoning at the start of the answer; then the tag that
                ends it is put there, and the answer goes on. 0 also sets `enable_thinking` to
                False where the template reads it; None and -1 set no limit.
            reasoning_effort: the variable of that name: "minimal", "low", "medium", "high", "xhigh"
                or "max". "none" switches reasoning off, by whatever switch the template has.
            preserve_reasoning: whether the prompt keeps the reasoning of earlier answers, where the
                template has a variable for that (`preserve_thinking`, `clear_thinking`,
                `truncate_history_thinking` or `drop_thinking`); None keeps it.
            prefill: the answer begins with this text, and so does the stream's (as it does with the
                tag of a reasoning that the template opens).
            continue_final_message: the last message is the beginning of the answer, as in
                transformers, or its field of this name is. The stream has what is new.
            add_generation_prompt: whether to end with the text that opens the model's turn; None
                does so unless the last message is continued.
            options: the arguments of `stream` but `parse_special`.

        Raises:
            UsageError: the file has no chat template and none was given; a message is not one, or
                has a part that is not text; arguments contradict each other.
            ChatTemplateError: the template fails on this conversation, or refuses it.
        """
        others = {"stream": STREAM_OPTIONS, "LLM(...)": keywords(type(self).__init__)}
        check_options(options, CHAT_OPTIONS, others)
        check_types(TextModel.chat, locals())
        template = template or (self.tool_template if tools else self.chat_template)
        calls = None
        if template is not None and (tools or tool_choice != "auto"):
            from localkv.engine.answer_calls import AnswerCalls

            described = checked_tools(tools) or ()
            calls = AnswerCalls(template, described, tool_choice, parallel=parallel_tool_calls)
            tools = None if calls.tools.choice == "none" else tools
        prompt = self.chat_prompt(
            messages,
            template=template,
            tools=tools,
            template_kwargs=template_kwargs,
            enable_thinking=enable_thinking,
            reasoning_budget=reasoning_budget,
            reasoning_effort=reasoning_effort,
            preserve_reasoning=preserve_reasoning,
            prefill=prefill,
            continue_final_message=continue_final_message,
            add_generation_prompt=add_generation_prompt,
        )
        for line in prompt.warnings:
            warnings.warn(line, stacklevel=2)
        if calls is None or not calls.tools:
            return self.stream(prompt, **options)
        if (grammar := calls.grammar(self.tokenizer, options)) is not None:
            options["grammar"] = grammar
            options.pop("schema", None)
        for line in calls.tools.warnings:
            warnings.warn(line, stacklevel=2)
        stream = self.stream(prompt, **options)
        stream.calls = calls.in_answer(prompt)
        return stream


STREAM_OPTIONS = (*keywords(TextModel.stream), *SamplingOptions.__annotations__)
"""What `stream` and `complete` take."""

CHAT_OPTIONS = (*keywords(TextModel.chat), *ChatOptions.__annotations__)
"""What `chat` takes."""


FEW_NAMES = 8
"""Names of tensors that a warning spells out."""


@dataclass(frozen=True)
class LoadedEngine:
    """What became of a file.

    Attributes:
        engine: warmed up as far as its backend compiles kernels.
        unused: names of tensors that the model does not use.
        warnings: one line each for the user.
        adapters: in their order.
    """

    engine: Engine
    unused: list[str]
    warnings: list[str]
    adapters: tuple[LoadedAdapter, ...]


def loaded_engine(
    gguf: GGUFFile,
    config: ModelSpec,
    places: Places,
    cache: CacheConfig,
    *,
    n_batch: int,
    exact: bool,
    smoothing: Smoothing | None,
    decoded: Collection[str],
    speculation: Speculation,
    head_cache: CacheConfig | None,
    adapters: Sequence[tuple[AdapterFile, float]],
    mlock: bool,
    use_mmap: bool,
    report: OnProgress,
) -> LoadedEngine:
    """Load a model's weights and allocate its cache.

    Args:
        n_batch: most prompt tokens evaluated at a time.
        exact: as `LLM` has it.
        smoothing: what the weights are changed by.
        decoded: names of tensors that become float32.
        speculation: how tokens are guessed, which takes kernels of its own.
        head_cache: types of K and V of the block that predicts a further token, if that is loaded.
        adapters: files of adapters, and their scales.
        mlock: keep the weights in memory.
        use_mmap: the file is mapped; weights that lie in it may be laid out while the first tokens
            are evaluated, unless they are locked.
        report: told of the progress.

    Raises:
        LocalKVError: the file can't be read, or something does not fit in memory.
    """
    warnings, backend = [], places.whole
    types = {
        name: "f32" if name in decoded else tensor.format.name
        for name, tensor in gguf.tensors.items()
        if len(tensor.shape) > 1
    }
    with backend.compiling_ahead(
        types["token_embd.weight"],
        list(types.values()),
        config,
        cache,
        lambda done, of: report("kernels", done, of),
    ) as all_linked:
        model, unused = load_model(
            gguf,
            places,
            on_layer=lambda done, of: report("weights", done, of),
            smoothing=smoothing,
            decoded=decoded,
            late=use_mmap and not mlock,
            predicts=head_cache is not None,
        )
        given: list[LoadedAdapter] = []
        if adapters:
            from localkv.loader.adapters import load_adapters

            given = load_adapters(model, gguf, adapters, backend)
        locked = model.weights if model.adapted is None else model.adapted.weights
        if mlock and (problem := lock_weights(locked, backend)):
            warnings.append(problem)
        engine = Engine(
            model,
            cache,
            n_batch=n_batch,
            exact=exact,
            check_source=gguf.check_unchanged,
            n_between=0 if places.records else speculation.n_between,
        )
        if backend.compiles:
            report("kernels", 0, 0)
            if speculation.is_on or not all_linked:
                engine.warm_up()
            if speculation.is_on and head_cache is None:
                engine.warm_up_drafts(speculation)
        if head_cache is not None:
            engine.add_head(head_cache)
        if backend.late is not None:
            backend.late.begin()
    if unused:
        warnings.append(f"tensors that are not used: {_a_few(unused)}")
    return LoadedEngine(engine, unused, warnings, tuple(given))


def _a_few(names: list[str]) -> str:
    """The first names, and how many others there are."""
    if len(names) <= FEW_NAMES + 1:
        return ", ".join(names)
    return f"{', '.join(names[:FEW_NAMES])} and {len(names) - FEW_NAMES} others"


class LLM(TextModel, EmbeddingModel, StateModel):
    """A model ready to complete text.

    `close`, or the end of a `with` statement, frees its memory. Without either it is freed when
    nothing refers to the model any more.

    Several threads may use it, and several of its streams may be read in turn. Each call of the
    model is one turn, first come, first served. Every text is the one that it would be alone. With
    `n_parallel` above 1, a turn serves all streams that somebody reads. Else reading streams in
    turn is slower than one after the other, if the cache has no room for all of them. Different
    models run at the same time. A fork of the process can't use it (`LocalKVError`), nor can a
    signal handler that interrupts a call of it. After an exception in a call, such as Ctrl-C, it
    goes on with an empty cache.

    Args:
        path: a GGUF file (any part of a split one), or a model on Hugging Face: "hf.co/org/repo" or
            "hf.co/org/repo:Q8_0", fetched if it is not in the cache.
        n_ctx: tokens of context; 0 takes the model's own, None at most `DEFAULT_N_CTX` of it
            (`memory/fit.py`).
        cache_type_k, cache_type_v: types of K and of V in the cache, names in `KV_FORMATS`.
        cache_type_k_swa, cache_type_v_swa: types of layers that see a window only; None for the
            types of the other layers.
        swa_full: layers with a window keep all rows, not only those that later tokens see. That
            takes more memory. Any prompt then goes on with all that it has in common with others.
        cache_type_k_rope: type of the rotated parts of keys in models that keep latents (DeepSeek).
            The latents have the type `cache_type_k`; they are V, too.
        ctx_checkpoints: most copies of the states of recurrent layers, kept in the host's memory.
            A prompt that begins like an earlier one goes on from such a copy.
        checkpoint_min_step: tokens between two of them within a text.
        kv_tail: each token reads this many of the newest tokens as f16, and only older tokens
            packed; None takes 64 for types that pack several tokens together, else 0.
        kv_sink: the first tokens that are kept as f16; None takes 4 for types of less than 4 bits
            per value, and for those with scales by channel of at most 5; else 0.
        kv_rotation: "on" and "off" store K and V rotated, or not; "auto" rotates where
            that helps.
        k_before_rope: K is stored as it is before RoPE, and rotated as it is read; device
            "reference" only, to compare with.
        kv_scales: a file that `localkv perplexity --calibrate-kv` made, or its content; types that
            are scaled by head need it.
        kv_profile: a file that `localkv calibrate` made for this model, its content, or "auto",
            which looks for it beside the model and in the user's data folder. Each layer has the
            types that it lists, unless types are named here.
        kv_bits: bits per value, on average, that these may take in the context, with their tail
            and sink; None is 5.
        kv_budget: bytes of K and V together, or "auto" for what is free, less a reserve. When they
            are full, the oldest pages change to the next types of the ladder; the context ends
            where all of them have the last.
        kv_ladder: the pairs of types that pages go through, "f16,q8_0/q8_0,q4_0/q4_0" or a sequence
            of pairs. None takes f16, q8_0, q8_0/q4_0 and q4_1c/q4_0. Where heads are a multiple of
            64, q4_1c128/kv3_0 follows.
        device: "auto", "cuda", "cpu" or "reference"; or GPUs by number, "cuda1" or "cuda0,cuda1",
            over which the layers are divided in order.
        n_gpu_layers: the last N layers, and as one more the output, are on the GPU, the others on
            the CPU; "all", or None for as many as fit.
        n_cpu_moe: the experts of the first N layers are on the CPU; "all".
        override_tensor: "REGEX=PLACE": parts of the model whose tensors' names a regular
            expression finds are at a place, such as "CPU" or "CUDA0" (docs/gpu.md).
        offload_kqv: attention and its cache are on the GPU where its layer is; else on the CPU.
        tensor_split: how much of the layers each GPU gets, in proportion; None for as much as is
            free there.
        main_gpu: the GPU that "auto" and "cuda" stand for.
        activations: "exact" multiplies float32 by float32, to measure what else costs something:
            weights whose products would round activations (on a CPU packed ones, to 8 bits, on a
            GPU all but F32) are decoded when they are loaded. They take four bytes a value, and
            products are slower. A draft model's are left alone. "auto" takes what is fastest.
        n_threads: CPU threads; None takes `OMP_NUM_THREADS`, as far as there are cores, or one for
            each physical core. It has no effect on a GPU.
        n_threads_batch: CPU threads where several tokens are evaluated at once, as in prompts;
            None is `n_threads`.
        cpus: CPUs that this process may use from now on, by the system's numbers: the calling
            thread, those that it starts later, and kernels (on Linux). None leaves it to the
            system, as `taskset` or a container has it.
        cpu_strict: each thread of the kernels has one of them for itself.
        n_batch: most prompt tokens evaluated at a time.
        n_parallel: texts that are generated at the same time: by `complete_many`, and by streams
            that several threads read, or one in turn.
        n_cache_tokens: tokens that the cache holds of all these texts together; None for `n_ctx`
            each, "fit" for four contexts, or what free memory has room for, if that is less.
        n_cache_bytes: bytes that K and V of all these texts take together, in place of
            `n_cache_tokens`. The cache holds as many tokens as fit.
        step_ms: milliseconds that a step of all these texts should take; None is 100, or 30 on a
            GPU. It decides how long texts wait while another one's prompt is read.
        cache_disk: a folder in which texts that leave the cache are kept, and those that are in it
            when it is closed (docs/states.md). Another process with the same model and the
            same settings goes on with them. It is made if it is not there.
        cache_disk_size: bytes of its files at most, of all processes that use it together. What was
            not used for the longest time goes first.
        exact: the same call gives the same result regardless of earlier calls, on a CPU bit for
            bit. Generated text is read again where the next prompt contains it. False reuses it as
            it lies in the cache: a conversation goes on sooner, and may go on with other words.
        rope_scaling, rope_scale, rope_freq_base, rope_freq_scale: RoPE instead of what the file
            says (`RopeOptions`, with llama.cpp's names and defaults). Qwen 3 has a context of
            131,072 tokens with "yarn", 4 and a `yarn_orig_ctx` of 32768. Layers with a window keep
            what the file says. A KV profile is to be measured with them.
        yarn_orig_ctx, yarn_ext_factor, yarn_attn_factor, yarn_beta_slow, yarn_beta_fast: the
            parameters of YaRN, likewise.
        override_pre: use this pre-tokenizer instead of the file's (`tokenizer.ggml.pre`).
        override_kv: values in the place of those that the file has under these keys, as in
            {"tokenizer.ggml.add_bos_token": False}. A key that nothing reads is refused.
        lora: files of LoRA adapters (GGUF): one, several, or a mapping of files to the scales that
            texts have which ask for none (1.0). Texts of one batch may have other scales each
            (`stream`). On a CPU; an adapter takes up to 5 % of a token's time.
        draft_model: a small GGUF file with the same tokens, which guesses how a text goes on.
        cache_type_k_draft, cache_type_v_draft: types of K and of V in its own cache.
        spec: "ngram" guesses how a text goes on from what followed its last tokens when they came
            up before, "draft" with `draft_model` (None does, if there is one), for a text that has
            the steps to itself. Guesses are evaluated together: faster where many are right, with
            the same text as without ("none"), byte for byte on a CPU.
        draft_max, draft_min: most tokens guessed at a time, and fewest that are worth it.
            Measurements decide how many are guessed in between.
        draft_p_min: tokens that the draft model finds less probable are not guessed.
        fit: "on" refuses a model that does not fit in memory before anything is allocated, and
            warns of mapped weights that do not fit; "off" tries.
        mlock: keep the weights in memory (on a CPU). Where the system allows less, some are kept
            and a warning says how to raise its limit.
        use_mmap: map the file; the system then keeps as much of it in memory as it has room for.
            False reads the file into memory, which must have room for it.
        progress: show a line on stderr, where that is a terminal or a notebook's, if loading takes
            more than a second.
        on_progress: called instead while it loads. Its arguments are "weights", the layers read and
            all layers; or "kernels", the kernels compiled and all that have to be. Before they are
            run for the first time, it is called with "kernels", 0 and 0.

    Attributes:
        config: the model's sizes.
        cache: the cache's types and context length.
        kv_types: the types by layer that are taken from a profile, and what they cost; or None.
        memory: bytes of weights, cache and scratch.
        warnings: one line each for the user. They are about unused tensors, a GPU that is not used,
            and a context longer than the model was trained for. They are about a cache type that
            this model is known to suffer from, and weights that do not all stay in memory. They
            also name an operation that is slow because it has no kernel.
        speculation: how tokens are guessed.
        draft: the model that guesses them, if there is one.
        disk: what keeps texts on the disk, with `cache_disk`; else None.
        lora_adapters: the adapters, by their numbers.
        load_seconds: time from the start to readiness.

    Raises:
        ModelFileError: the file can't be used.
        HubError: there is no such model on Hugging Face, or it can't be fetched.
        UsageError: an option does not exist (it is a `TypeError`, too), or can't be used with this
            model.
        DoesNotFitError: there is not enough memory.
    """

    draft: LLM | None = None
    disk: DiskCache | None = None

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        n_ctx: int | None = None,
        cache_type_k: str | None = None,
        cache_type_v: str | None = None,
        cache_type_k_swa: str | None = None,
        cache_type_v_swa: str | None = None,
        swa_full: bool = False,
        cache_type_k_rope: str = "f16",
        ctx_checkpoints: int = CacheConfig.ctx_checkpoints,
        checkpoint_min_step: int = CacheConfig.checkpoint_min_step,
        kv_tail: int | None = None,
        kv_sink: int | None = None,
        kv_rotation: str = "auto",
        k_before_rope: bool = False,
        kv_scales: str | os.PathLike[str] | KVScales | None = None,
        kv_profile: str | os.PathLike[str] | KVProfile | None = None,
        kv_bits: float | None = None,
        kv_budget: int | Literal["auto"] | None = None,
        kv_ladder: str | Sequence[tuple[str, str]] | None = None,
        device: str = "auto",
        n_gpu_layers: int | Literal["all"] | None = None,
        n_cpu_moe: int | Literal["all"] = 0,
        override_tensor: Sequence[str] = (),
        offload_kqv: bool = True,
        tensor_split: Sequence[float] | None = None,
        main_gpu: int = 0,
        activations: str = "auto",
        n_threads: int | None = None,
        n_threads_batch: int | None = None,
        cpus: Collection[int] | None = None,
        cpu_strict: bool = False,
        n_batch: int = 512,
        n_parallel: int = 1,
        n_cache_tokens: int | Literal["fit"] | None = None,
        n_cache_bytes: int | None = None,
        step_ms: float | None = None,
        cache_disk: str | os.PathLike[str] | None = None,
        cache_disk_size: int = DEFAULT_CACHE_DISK,
        exact: bool = True,
        rope_scaling: str | None = None,
        rope_scale: float | None = None,
        rope_freq_base: float | None = None,
        rope_freq_scale: float | None = None,
        yarn_orig_ctx: int | None = None,
        yarn_ext_factor: float | None = None,
        yarn_attn_factor: float | None = None,
        yarn_beta_slow: float | None = None,
        yarn_beta_fast: float | None = None,
        override_pre: str | None = None,
        override_kv: Mapping[str, str | int | float | bool] | None = None,
        lora: str | os.PathLike[str] | Mapping[str, float] | Sequence[str] | None = None,
        draft_model: str | os.PathLike[str] | None = None,
        cache_type_k_draft: str = CacheConfig.type_k,
        cache_type_v_draft: str = CacheConfig.type_v,
        spec: str | None = None,
        draft_max: int = Speculation.draft_max,
        draft_min: int = Speculation.draft_min,
        draft_p_min: float = Speculation.draft_p_min,
        fit: str = "on",
        mlock: bool = False,
        use_mmap: bool = True,
        progress: bool = True,
        on_progress: OnProgress | None = None,
        **unknown: Never,
    ) -> None:
        started = time.perf_counter()
        others = {"complete, stream and chat": STREAM_OPTIONS, "chat": CHAT_OPTIONS}
        check_options(unknown, keywords(LLM.__init__), others)
        check_types(LLM.__init__, locals())
        overrides = Overrides.of(locals())
        self.warnings: list[str] = []
        gpus = gpu_names(device, main_gpu)
        backend = select_backend(first_device(device, main_gpu), k_before_rope=k_before_rope)
        offload = Offload.of(
            n_gpu_layers, n_cpu_moe, override_tensor, offload_kqv, tensor_split or ()
        )
        if backend.name == "cpu":
            if not offload.is_auto or offload.split or main_gpu:
                self.warnings.append(NO_GPU)
            offload, gpus = Offload(), []
        is_divided = len(gpus) > 1 or not (offload.is_auto or offload.is_whole)
        if k_before_rope:
            check_before_rope(kv_profile, kv_scales)
        if line := unused_gpu(device):
            self.warnings.append(line)
        if fit not in FIT:
            raise unknown_name("unknown fit", fit, FIT)
        if activations not in ACTIVATIONS:
            raise unknown_name("unknown activations", activations, ACTIVATIONS)
        for option, value in (
            ("n_batch", n_batch),
            ("n_parallel", n_parallel),
            ("n_cache_tokens", None if n_cache_tokens == "fit" else n_cache_tokens),
            ("n_cache_bytes", n_cache_bytes),
            ("cache_disk_size", cache_disk_size),
            ("n_threads", n_threads),
            ("n_threads_batch", n_threads_batch),
        ):
            if value is not None and value < 1:
                raise UsageError(f"{option} must be at least 1, not {value}")
        folder = None
        if cache_disk is not None:
            from localkv.engine.disk_folder import disk_folder

            folder = disk_folder(cache_disk, cache_disk_size, has_budget=kv_budget is not None)
        if step_ms is not None and not step_ms > 0:
            raise UsageError(f"step_ms must be above 0, not {step_ms}")
        drafter = spec or ("draft" if draft_model is not None else "none")
        self.speculation = Speculation(drafter, draft_max, draft_min, draft_p_min)
        if self.speculation.is_on and backend.records:
            self.warnings.append(RECORDING_LEFT)
        check_drafter(self.speculation, draft_model)
        check_head(drafter != "mtp" or not backend.records, "on a GPU none is run yet")
        check_head(drafter != "mtp" or not is_divided, "in several places none is run")
        if draft_model is not None and is_divided:
            raise UsageError(
                "a draft model can't guess for a model in several places yet",
                hint="leave out the options that divide the model, or guess with spec='ngram'",
            )
        place_process(cpus, strict=cpu_strict)
        end_cleanly_from_threads()
        gguf = open_gguf(_local_path(path), use_mmap=use_mmap)
        self.gguf = with_overrides(gguf, overrides)
        self.config: ModelSpec = checked_spec(self.gguf)
        has_head = self.config.prediction is not None
        is_free = spec is None and draft_model is None
        if has_head and is_free and not backend.records and not is_divided:
            self.speculation = replace(self.speculation, drafter="mtp")
        if self.speculation.drafter == "mtp":
            check_head(has_head, f"{self.gguf.path.name} has none")
            check_tensors(self.gguf, self.config, predicts=True)
        adapters: list[tuple[AdapterFile, float]] = []
        adapter_sizes = (0, 0)
        if lora is not None:
            from localkv.loader.adapter_file import adapter_memory, opened_adapters

            adapters = opened_adapters(lora, self.gguf, self.config, backend.name)
            adapter_sizes = adapter_memory([file for file, _ in adapters], self.config)
            self.warnings += [line for file, _ in adapters for line in file.warnings]
        context = chosen_context(n_ctx, self.config)
        self.warnings += beyond_training(context, self.config)
        cache = CacheConfig(
            cache_type_k or CacheConfig.type_k,
            cache_type_v or CacheConfig.type_v,
            n_ctx=context,
            n_sequences=n_parallel,
            n_tokens=None if n_cache_tokens == "fit" else n_cache_tokens,
            kv_rotation=kv_rotation,
            type_k_swa=cache_type_k_swa,
            type_v_swa=cache_type_v_swa,
            swa_full=swa_full,
            type_k_rope=cache_type_k_rope,
            ctx_checkpoints=ctx_checkpoints,
            checkpoint_min_step=checkpoint_min_step,
            kv_tail=kv_tail,
            kv_sink=kv_sink,
        )
        budgeted = Budgeted.of(kv_budget, kv_ladder)
        budgeted.check(
            types=(cache_type_k, cache_type_v, kv_profile, kv_bits),
            sizes=(n_cache_tokens, n_cache_bytes),
            before_rope=k_before_rope,
        )
        cache = budgeted.cache(cache, self.config)
        named = (cache_type_k, cache_type_v, cache_type_k_swa, cache_type_v_swa)
        chosen = chosen_cache(
            self.gguf,
            self.config,
            cache,
            profile=kv_profile,
            bits=kv_bits,
            scales=kv_scales,
            names_types=any(named),
            n_batch=n_batch,
        )
        self.cache, self.kv_types, smoothing = chosen.cache, chosen.types, chosen.smoothing
        self.warnings += chosen.warnings
        if adapters and smoothing is not None:
            raise UsageError(
                "adapters can't be used with a KV profile that smooths channels",
                hint="leave out the profile, and name types with cache_type_k and cache_type_v",
            )
        if adapters and SMOOTHED in self.gguf.metadata:
            raise UsageError(
                "adapters can't be used with a file that localkv quantize --smooth made: they read "
                "channels as they were before",
                hint="take a file that is not smoothed",
            )
        if adapters and is_divided:
            raise UsageError(
                "adapters can't be used with a model in several places",
                hint="leave out what divides it",
            )
        n_threads = n_threads or default_threads(frozenset(cpus or ()))
        most_threads = max(n_threads, n_threads_batch or 0)
        if cpus is not None and len(set(cpus)) < most_threads:
            self.warnings.append(f"{most_threads} threads share {counted(len(set(cpus)), 'CPU')}")
        use_threads(n_threads, n_threads_batch)
        tensors = tuple(self.gguf.tensors.values())
        memory = ModelMemory(
            tensors,
            self.config,
            backend.name,
            n_batch,
            most_threads,
            is_file=use_mmap,
            changed=changed_tensors(smoothing, self.config, self.gguf.tensors),
            activations=activations,
            n_between=0 if backend.records else self.speculation.n_between,
            adapters=adapter_sizes,
        )
        draft, types = None, (cache_type_k_draft, cache_type_v_draft)
        if draft_model is not None:
            from localkv.memory.draft_file import DraftFile

            draft = DraftFile.of(_local_path(draft_model), self.gguf, *types)
            memory = replace(memory, draft=draft.memory(memory))
        budgets = free_on(gpus, backend) if gpus and fit == "on" else {}
        if gpus:
            # a cache that takes what is left has at least one context
            is_rest = n_cache_tokens == "fit" or n_cache_bytes is not None
            asked = replace(self.cache, n_tokens=context) if is_rest else self.cache
            memory, lines = in_places(memory, asked, offload, gpus, budgets)
            self.warnings += lines
        places = places_of(memory.placement, gpus, backend, self.config)
        backend = places.whole
        if not places.is_one and kv_budget == "auto":
            raise UsageError(
                "a budget of what is free needs a model in one place",
                hint="say how large it is: --kv-budget SIZE",
            )
        head_cache = None
        if self.speculation.drafter == "mtp":
            from localkv.memory.draft_file import head_memory

            of_head = head_memory(memory, *types, n_parallel)
            head_cache, memory = of_head.cache, replace(memory, draft=of_head)
        self.cache, lines = budgeted.fitted(
            self.cache, memory, lambda: free_memory(backend), names_context=bool(n_ctx)
        )
        self.warnings += lines
        if n_cache_bytes is not None:
            self.cache, lines = cache_in_bytes(memory, self.cache, n_cache_bytes)
            self.warnings += lines
        elif n_cache_tokens == "fit":
            budget = free_memory(backend) if fit == "on" else None
            self.cache, lines = cache_that_fits(memory, self.cache, budget, budgets)
            self.warnings += lines
        if fit == "on" and places.is_one:
            self._check_fit(memory, backend)
        elif fit == "on":
            check_parts_fit(memory, self.cache, budgets)
        with (
            uncollected(),
            reporting(printable(self.gguf.path.name), progress, on_progress) as report,
        ):
            loaded = loaded_engine(
                self.gguf,
                self.config,
                places,
                self.cache,
                n_batch=n_batch,
                exact=exact,
                smoothing=smoothing,
                decoded=memory.decoded,
                speculation=self.speculation,
                head_cache=head_cache,
                adapters=adapters,
                mlock=mlock,
                use_mmap=use_mmap,
                report=report,
            )
        self.engine, self.lora_adapters = loaded.engine, loaded.adapters
        self.warnings += loaded.warnings
        if draft is not None:
            self.draft = self._drafting(
                draft,
                device=backend.name,
                n_threads=n_threads,
                n_threads_batch=n_threads_batch,
                n_batch=n_batch,
                use_mmap=use_mmap,
            )
        place_caller()
        self.gguf.check_unchanged()
        self._kernels = dict[str, str]()
        used = tuple(
            info
            for name, info in self.gguf.tensors.items()
            if name not in loaded.unused and not self._ignores(name)
        )
        self._memory, self._fit = replace(memory, tensors=used), fit
        self.memory = self._memory.plan(self.cache)
        self.places, self.backend = places, places.whole
        self._step_ms = step_ms
        self._smoothing, self._k_before_rope = smoothing, k_before_rope
        if folder is not None:
            self._keep_on_disk(folder, activations)
        self.load_seconds = time.perf_counter() - started

    def __reduce_ex__(self, protocol: object) -> Never:
        raise UsageError(
            "a loaded model can't be copied or pickled",
            hint="give its path instead, and load it there: LLM(path)",
        )

    def __repr__(self) -> str:
        if "memory" not in self.__dict__:
            return f"<{type(self).__name__}: not loaded>"
        name, cache = self.config.name or "a model without a name", self.cache
        if "engine" not in self.__dict__:
            return f"<{type(self).__name__} {printable(name)}: closed>"
        draft = f", draft {printable(self.draft.config.name)}" if self.draft else ""
        return (
            f"<{type(self).__name__} {printable(name)}: context {cache.n_ctx}, "
            f"K/V {cache.types_text}, {self.backend.name}{draft}>"
        )

    def _keep_on_disk(self, folder: DiskFolder, activations: str) -> None:
        """Have texts that leave the cache kept in a folder."""
        from localkv import __version__  # whose kernels may round otherwise
        from localkv.engine.disk_cache import DiskCache
        from localkv.simd.cpu_features import CPU_LEVEL

        kernels = CPU_LEVEL if self.backend.name == "cpu" else self.backend.name
        kernels = f"{__version__} {kernels} {activations}"
        stats = [os.stat(part) for part in self.gguf.parts]
        files = [(part.st_size, part.st_mtime_ns) for part in stats]  # a fingerprint is of samples
        identity = {**self._identity, "kernels": kernels, "files": repr(files)}
        for name in ("model_name", "choices"):  # for people, and said by the cache
            del identity[name]
        self.disk = DiskCache(
            folder,
            self.engine.cache,
            identity,
            exact=self.engine.slot.exact,
            on_problem=self.warnings.append,
        )
        self.engine.slot.keep_on_disk(self.disk)

    def _ignores(self, tensor: str) -> bool:
        """Whether a tensor of the file is none that text, or a guess, needs."""
        head = self.config.prediction if self.speculation.drafter == "mtp" else None
        if head is not None and tensor.startswith(f"blk.{head.block}."):
            return False
        return self.config.ignores(tensor)

    def _drafting(self, file: DraftFile, **arguments: Any) -> LLM:
        """Load a model that drafts for this one."""
        draft = LLM(
            file.gguf.path,
            n_ctx=file.n_ctx(self.cache.n_ctx),
            cache_type_k=file.cache.type_k,
            cache_type_v=file.cache.type_v,
            exact=False,
            spec="none",
            fit="off",  # it was counted before
            progress=False,
            **arguments,
        )
        self.warnings += [f"draft: {line}" for line in draft.warnings]
        self.engine.draft = DraftModel(
            draft.engine.slot, draft.cache.n_ctx, file.n_shared, self.engine.prices
        )
        self.engine.draft.warm_up()
        return draft

    def _check_fit(self, memory: ModelMemory, backend: Backend) -> None:
        """Refuse or warn of a model that does not fit, if free memory is known."""
        budget = free_memory(backend)
        if budget and (warning := check_fit(memory, self.cache, budget)):
            self.warnings.append(warning)

    def check_further_cache(self, cache: CacheConfig) -> None:
        """Refuse another cache for which there is no room now that the model is loaded.

        Raises:
            DoesNotFitError: names settings that would fit.
        """
        budget = free_memory(self.backend)
        if self._fit == "on" and budget:
            # weights are there already
            check_fit(replace(self._memory, tensors=()), cache, budget)


def _local_path(model: str | os.PathLike[str]) -> str | os.PathLike[str]:
    """`localkv.loader.hub.find.local_path`, which a file does without."""
    if os.path.exists(model):
        return model
    from localkv.loader.hub.find import local_path

    return local_path(model)
