"""A conversation with a model of this process: `LocalEngine` is a `ChatEngine` on top of `LLM`, and
`ConversationServer` lets the client of another process have it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from queue import SimpleQueue
from threading import Event
from typing import TYPE_CHECKING

from localkv.cache.layout import typed_groups, types_in
from localkv.chat.engine import (
    AnswerNews,
    Audited,
    ChatRequest,
    EngineFacts,
    EngineOptions,
    EngineStoppedError,
    Finished,
    LoadProgress,
    PromptProgress,
    TextDelta,
)
from localkv.engine_process.wire import (
    Ask,
    Cancel,
    Message,
    Progress,
    Refused,
    SlotAction,
    ToConversation,
    Told,
    to_conversation,
)
from localkv.errors import LocalKVError, UsageError
from localkv.system.limits import before_model, exhausted

if TYPE_CHECKING:
    from localkv.engine.stream import Completion, TextStream
    from localkv.llm import LLM
    from localkv.loader.chat_prompt import ChatPrompt
    from localkv.loader.chat_template import ChatTemplate


AUDIT_BATCH = 64
"""Tokens that an audit evaluates at a time: as many are evaluated once it is cancelled."""
DELTA_SECONDS = 0.05
"""Deltas come at most so often: a screen that is drawn 20 times a second needs no more."""


class LocalEngine:
    """Answers through the model's chat template.

    Args:
        options: the model to load, and how.
    """

    def __init__(self, options: EngineOptions) -> None:
        self.options = options
        self._cancel = Event()
        self._closed = False
        self._loaded: tuple[LLM, ChatTemplate | None] | None = None
        self._last: TextStream | None = None

    def load(self, on_progress: Callable[[LoadProgress], None]) -> EngineFacts:
        started = time.perf_counter()
        on_progress(LoadProgress("header"))
        from localkv.loader.gguf_file import open_gguf

        open_gguf(self.options.model)  # reports a bad file at once
        on_progress(LoadProgress("runtime"))
        from localkv.loader.template_process import start_ahead

        start_ahead()
        before_model()
        from localkv.llm import LLM

        llm = LLM(
            self.options.model,
            **self.options.arguments,
            on_progress=lambda stage, done, total: on_progress(LoadProgress(stage, done, total)),
        )
        source = self.options.chat_template
        own = None if source is None else llm.chat_template_from(source)
        facts = self._facts(llm, own, time.perf_counter() - started)
        self._loaded = llm, own
        return facts

    def _facts(self, llm: LLM, own: ChatTemplate | None, load_seconds: float) -> EngineFacts:
        from localkv.loader.chat_prompt import without_effect

        options = self.options
        template = own or llm.chat_template
        tool_template = own or llm.tool_template
        if template is None or tool_template is None:
            raise UsageError(
                "the model has no chat template",
                hint="--chat-template NAME or --chat-template-file gives one; localkv complete "
                "goes on with plain text",
            )
        used = tool_template if "tools" in options.uses else template
        return replace(
            engine_facts(llm, load_seconds),
            has_think_switch=template.think_switch is not None,
            takes_tools=tool_template.takes_tools,
            warnings=(
                *dict.fromkeys((*llm.warnings, *llm.tokenizer.warnings)),
                *without_effect(llm.tokenizer, used, options.variables, options.uses),
            ),
        )

    def _ready(self) -> tuple[LLM, ChatTemplate | None]:
        if self._closed or self._loaded is None:
            raise EngineStoppedError("the engine is not running")
        return self._loaded

    def count_tokens(self, request: ChatRequest) -> int:
        return len(self._prompt(request).ids)

    def _prompt(self, request: ChatRequest) -> ChatPrompt:
        llm, template = self._ready()
        return llm.chat_prompt(
            request.messages,
            template=template,
            tools=request.tools,
            template_kwargs=request.template_kwargs,
            enable_thinking=request.think,
            reasoning_budget=request.reasoning_budget,
            prefill=request.prefill,
            continued=request.continued,
        )

    def answer(self, request: ChatRequest) -> Iterator[AnswerNews]:
        self._cancel.clear()  # now, not when iteration begins: a later request counts
        return self._answer(request)

    def _answer(self, request: ChatRequest) -> Iterator[AnswerNews]:
        llm, _ = self._ready()
        self._last = stream = llm.stream(
            self._prompt(request),
            max_tokens=request.max_tokens,
            stop=request.stop,
            ignore_eos=request.ignore_eos,
            params=request.params,
            cancel=self._cancel,
            audit=request.audit,
        )
        stream.audited = None  # when it is asked for
        yield from _progress(stream, llm.engine.n_batch)
        yield from _deltas(stream, lambda: _pages(llm))
        degenerate = stream.degeneration().line(llm.cache, _pages(llm))
        yield replace(_finished(stream.completion), degenerate=degenerate)

    def audit(self) -> Iterator[Audited]:
        self._cancel.clear()
        return self._audit()

    def _audit(self) -> Iterator[Audited]:
        llm, _ = self._ready()
        if self._last is None:
            raise UsageError("there is no answer to audit yet")
        found = llm.audit(self._last, n_batch=AUDIT_BATCH, cancel=self._cancel)
        if found is None:
            yield Audited()
            return
        yield Audited(
            line=found.line(),
            text=self._last.completion.text,
            n_tokens=found.n_tokens,
            kld_mean=found.kld_mean,
            flips=tuple(map(str, found.flips)),
            starts=tuple(flip.start for flip in found.flips),
            ends=tuple(flip.end for flip in found.flips),
        )

    def save_state(self, path: str) -> int:
        return self._ready()[0].save_state(path)

    def load_state(self, path: str) -> int:
        return len(self._ready()[0].load_state(path))

    def cancel(self) -> None:
        self._cancel.set()

    def close(self) -> None:
        self._closed = True
        self.cancel()


def _pages(llm: LLM) -> tuple[int, ...]:
    """Pages on each rung of the cache's ladder, if it has one."""
    ladder = llm.engine.cache.ladder
    return () if ladder is None else tuple(ladder.counts())


def _progress(stream: TextStream, n_batch: int) -> Iterator[PromptProgress]:
    """How much of a stream's prompt is read, again and again until the first token comes, if the
    prompt takes several batches."""
    n_prompt, request = stream.stats.n_prompt, stream.generation.request
    if n_prompt > n_batch:
        yield PromptProgress(0, n_prompt)
    sent = time.perf_counter()
    while not stream.advance():
        now = time.perf_counter()
        if now - sent >= DELTA_SECONDS:
            yield PromptProgress(stream.n_read, n_prompt, request.n_reused)
            sent = now


def _deltas(stream: TextStream, pages: Callable[[], tuple[int, ...]]) -> Iterator[TextDelta]:
    """Join the pieces that come within `DELTA_SECONDS`, and add the pages that there are then."""
    stats = stream.stats
    texts: list[str] = []
    seconds: list[float] = []
    sent, decoded, n_timed = time.perf_counter(), 0.0, 1
    for piece in stream:
        texts.append(piece)
        if (n_new := stats.n_generated - n_timed) > 0:
            # tokens without text of their own (half a character) share the time of the next
            seconds += [(stats.decode_seconds - decoded) / n_new] * n_new
            decoded, n_timed = stats.decode_seconds, stats.n_generated
        now = time.perf_counter()
        if now - sent >= DELTA_SECONDS:
            n_tokens = stats.n_prompt + stats.n_generated
            yield TextDelta("".join(texts), tuple(seconds), n_tokens, pages())
            texts, seconds, sent = [], [], now
    if texts:
        n_tokens = stats.n_prompt + stats.n_generated
        yield TextDelta("".join(texts), tuple(seconds), n_tokens, pages())


def _finished(completion: Completion) -> Finished:
    usage, timings = completion.usage, completion.timings
    return Finished(
        finish_reason=completion.finish_reason,
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
        prompt_seconds=timings.prompt_seconds,
        decode_seconds=timings.decode_seconds,
        decode_per_second=timings.decode_per_second,
        seed=completion.seed,
        context_full=completion.context_full,
        lost_tokens=usage.lost_tokens,
        drafted_tokens=usage.drafted_tokens,
        accepted_tokens=usage.accepted_tokens,
        verified_batches=usage.verified_batches,
        requantised_pages=usage.requantised_pages,
        requantise_seconds=timings.requantise_seconds,
    )


class ConversationServer:
    """Asks a `LocalEngine` what the client of this process wants to know.

    Args:
        options: the model to load, and how.
        send: sends the client a message.
    """

    decode = staticmethod(to_conversation)

    def __init__(self, options: EngineOptions, send: Callable[[Message], None]) -> None:
        self._engine = LocalEngine(options)
        self._send = send
        self._answers = SimpleQueue[tuple[int, Iterator[Message]]]()
        self._begun = 0

    @staticmethod
    def end() -> None:
        """The client is gone."""
        os._exit(0)

    def take(self, message: ToConversation) -> None:
        """A message has come. An answer begins here, so that a `Cancel` comes after it."""
        if isinstance(message, Cancel):
            if message.id == self._begun:
                self._engine.cancel()
            return
        self._begun = message.id
        self._answers.put((message.id, self._answer(message)))

    def _answer(self, message: Ask | SlotAction) -> Iterator[Message]:
        id, engine = message.id, self._engine
        if isinstance(message, SlotAction):
            act = engine.save_state if message.action == "save" else engine.load_state
            return (Told(id, n_tokens=act(path)) for path in [message.path])
        if message.what == "answer":
            return (_told(id, news) for news in engine.answer(message.request))
        if message.what == "audit":
            return (Told(id, audited=audited) for audited in engine.audit())
        return (Told(id, n_tokens=engine.count_tokens(asked)) for asked in [message.request])

    def load(self) -> None:
        """Load the model. Raises LocalKVError."""
        self._send(Told(facts=self._engine.load(lambda at: self._send(Progress(at)))))

    def run(self) -> None:
        """Answer until the process ends; an error for users is an answer, a bug ends it."""
        while True:
            id, answer = self._answers.get()
            try:
                for message in answer:
                    self._send(message)
            except Exception as error:
                self._send(Refused.of(id, known_error(error)))


def _told(id: int, news: AnswerNews) -> Told:
    if isinstance(news, TextDelta):
        return Told(id, delta=news)
    return Told(id, finished=news) if isinstance(news, Finished) else Told(id, reading=news)


def known_error(error: Exception) -> LocalKVError:
    """The error for users that an error is; a bug of localkv is raised."""
    known = error if isinstance(error, LocalKVError) else exhausted(error)
    if known is None:
        raise error
    return known


def engine_facts(llm: LLM, load_seconds: float) -> EngineFacts:
    """What is known of a loaded model, without its chat template."""
    config, cache, threads = llm.config, llm.cache, llm.engine.slot.threads
    groups = typed_groups(cache, config.groups)
    type_k, type_v = cache.shown_types
    return EngineFacts(
        name=config.name,
        architecture=config.architecture,
        layers=tuple(len(group.layers) for group in groups),
        kv_heads=tuple(group.n_kv_heads for group in groups),
        key_dims=tuple(group.key_dim for group in groups),
        value_dims=tuple(group.value_dim for group in groups),
        n_ctx_train=config.n_ctx_train,
        n_ctx=cache.n_ctx,
        type_k=type_k,
        type_v=type_v,
        pairs=tuple("/".join(types_in(cache, group)) for group in groups if cache.layer_types),
        windows=tuple(group.reach for group in groups),
        n_batch=llm.engine.n_batch,
        type_k_swa=cache.type_k_swa,
        type_v_swa=cache.type_v_swa,
        swa_full=cache.swa_full,
        are_latent=tuple(group.is_latent for group in groups),
        type_k_rope=cache.type_k_rope,
        kv_tail=cache.kv_tail,
        kv_sink=cache.kv_sink,
        kv_budget=cache.ladder_bytes,
        kv_ladder=tuple("/".join(pair) for pair in cache.kv_ladder),
        kv_rotation=cache.kv_rotation,
        weight_bytes=llm.gguf.n_bytes,
        backend=llm.backend.name,
        n_threads=threads.one,
        n_threads_batch=threads.several,
        load_seconds=load_seconds,
    )
