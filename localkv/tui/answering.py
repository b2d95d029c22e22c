"""`Answering`: what an engine and an answer go through, on whatever screen shows them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from textual import on
from textual.screen import Screen

from localkv.chat.cache_figures import CacheFigures, cache_figures, larger_cache
from localkv.chat.conversation import Message
from localkv.chat.engine import ChatEngine, EngineFacts, EngineOptions, EngineStoppedError
from localkv.chat.session import ChatSession
from localkv.errors import ContextOverflowError, LocalKVError
from localkv.tui.choice_screen import ChoiceScreen
from localkv.tui.engine_driver import EngineDriver
from localkv.tui.figures import size
from localkv.tui.messages import (
    AnswerEnded,
    AnswerFailed,
    AnswerGrew,
    EngineFailed,
    EngineLoading,
    EngineReady,
    TokensCounted,
    TurnsDropped,
)
from localkv.tui.widgets.cache_meter import MeterState
from localkv.tui.widgets.load_strip import LoadStrip
from localkv.tui.widgets.message_view import MessageView
from localkv.tui.widgets.speed import Speed
from localkv.tui.widgets.transcript import Transcript

SAVE_SECONDS = 1.0
"""An answer is saved so often while it is written."""

EngineFactory = Callable[[EngineOptions], ChatEngine]


class Answering(Screen[None]):
    """Owns the engine and the session; subclasses draw.

    Args:
        session: the conversation.
        options: what to load.
        new_engine: makes an engine that is not loaded yet.

    Attributes:
        meter: what is known of the context.
        answer: the message that is being written, or None.
        wants_answer: an answer begins once the model is loaded.
        editing: the message that is said differently, or None.
    """

    def __init__(
        self, session: ChatSession, options: EngineOptions, new_engine: EngineFactory
    ) -> None:
        super().__init__()
        self.session = session
        self.options = options
        self.new_engine = new_engine
        self.driver: EngineDriver | None = None
        self.meter = MeterState()
        self.answer: Message | None = None
        self.wants_answer = False
        self.editing: Message | None = None
        self._saved = 0.0

    # for subclasses to fill in

    async def show_conversation(self) -> None:
        raise NotImplementedError

    def show_meter(self) -> None:
        raise NotImplementedError

    def show_model(self) -> None:
        raise NotImplementedError

    def show_settings(self) -> None:
        raise NotImplementedError

    @property
    def transcript(self) -> Transcript:
        raise NotImplementedError

    # the engine

    def start_engine(self) -> None:
        """Begin to load; the engine before is given up."""
        if self.driver is not None:
            self.driver.close()
        self.meter = replace(self.meter, facts=None)
        self.query_one(LoadStrip).start()
        self.driver = EngineDriver(self.new_engine(self.options), self.post_message)
        self.driver.load()

    async def restart_engine(self) -> None:
        """End what goes on, and load anew."""
        if self.answer is not None:
            await self._fail_answer(LocalKVError("the engine was restarted"))
        self.start_engine()
        self.show_meter()

    @on(EngineLoading)
    def _loading(self, event: EngineLoading) -> None:
        if event.driver is self.driver:
            self.query_one(LoadStrip).show_progress(event.progress)

    @on(EngineReady)
    async def _ready(self, event: EngineReady) -> None:
        if event.driver is not self.driver:
            return
        facts = event.facts
        self.meter = replace(self.meter, facts=facts, n_tokens=None)
        self.session.model, self.session.model_name = self.options.model, facts.name
        self.session.save()
        self.query_one(LoadStrip).done()
        self.show_model()
        self.show_meter()
        for line in facts.warnings:
            self.notify(line, severity="warning", timeout=10)
        if self.wants_answer:
            await self.begin_answer()
        else:
            self.count_tokens()

    @on(EngineFailed)
    async def _failed(self, event: EngineFailed) -> None:
        if event.driver is not self.driver:
            return
        self.wants_answer = False
        if self.meter.facts is None or isinstance(event.error, EngineStoppedError):
            self._lose_engine(event.error)
        else:
            await self.transcript.note(str(event.error), error=True)

    def _lose_engine(self, error: LocalKVError) -> None:
        self.meter = replace(self.meter, facts=None)
        self.query_one(LoadStrip).fail(error)

    def count_tokens(self) -> None:
        """Find out how full the context is, where no answer has told."""
        if self.driver is None or self.meter.facts is None or self.answer is not None:
            return
        messages = self.session.request().messages
        if messages:
            self.driver.count_tokens(messages)
        else:
            self.meter = replace(self.meter, n_tokens=0)
            self.show_meter()

    @on(TokensCounted)
    def _counted(self, event: TokensCounted) -> None:
        if event.driver is self.driver and self.answer is None:
            self.meter = replace(self.meter, n_tokens=event.n_tokens)
            self.show_meter()

    # the answer

    @property
    def busy(self) -> bool:
        """Whether an answer is being written, or waits for the model."""
        return self.answer is not None or self.wants_answer

    def refuse_while_busy(self) -> bool:
        """Say so if an answer is being written."""
        if self.busy:
            self.notify("First Esc, to stop the answer", severity="warning")
        return self.busy

    async def begin_answer(self) -> None:
        """Have the message at the end answered, as soon as there is a model."""
        self.wants_answer = self.meter.facts is None
        if self.wants_answer or self.driver is None:
            if self.query_one(LoadStrip).has_class("-error"):
                self.wants_answer = False
                await self.transcript.note("there is no engine: F5 starts it again", error=True)
            return
        self.answer = self.session.begin_answer()
        self._saved = time.monotonic()
        await self.show_conversation()
        self._view().begin()
        self.query_one(Speed).clear()
        self.driver.answer(self.session.request())

    def _view(self) -> MessageView:
        """The view of the answer that is being written."""
        return self.transcript.views()[-1]

    async def stop_answer(self) -> None:
        """End the answer after its next token; one that has not begun does not begin."""
        self.wants_answer = False
        if self.answer is not None and self.driver is not None:
            self.driver.cancel()

    @on(AnswerGrew)
    async def _grew(self, event: AnswerGrew) -> None:
        if event.driver is not self.driver or self.answer is None:
            return
        now = time.monotonic()
        save = now - self._saved >= SAVE_SECONDS
        self._saved = now if save else self._saved
        self.session.extend(self.answer, event.delta.text, save=save)
        self._view().grow()
        speed = self.query_one(Speed)
        speed.add(event.delta)
        self.meter = replace(
            self.meter,
            n_tokens=event.delta.n_tokens or self.meter.n_tokens,
            tokens_per_second=speed.tokens_per_second,
        )
        self.show_meter()

    @on(AnswerEnded)
    async def _ended(self, event: AnswerEnded) -> None:
        if event.driver is not self.driver or self.answer is None:
            return
        answer, self.answer = self.answer, None
        stats = event.stats
        self.meter = replace(
            self.meter,
            n_tokens=stats.total_tokens,
            last=stats,
            tokens_per_second=stats.decode_per_second,
        )
        if answer.content or stats.finish_reason != "cancelled":
            self.session.finish(answer, stats)
            await self._view().end()
        else:
            await self._discard(answer)
        self.show_meter()
        if stats.context_full:
            self.ask_about_full_context("The context is full, and the answer was cut.")

    @on(AnswerFailed)
    async def _answer_failed(self, event: AnswerFailed) -> None:
        if event.driver is not self.driver or self.answer is None:
            return
        await self._fail_answer(event.error)
        if isinstance(event.error, EngineStoppedError):
            self._lose_engine(event.error)
        elif isinstance(event.error, ContextOverflowError):
            self.ask_about_full_context(
                f"{event.error.message[:1].upper()}{event.error.message[1:]}."
            )
        else:
            await self.transcript.note(str(event.error), error=True)

    async def _fail_answer(self, error: LocalKVError) -> None:
        """End the answer with what there is of it."""
        assert self.answer is not None
        answer, self.answer = self.answer, None
        if answer.content:
            self.session.fail(answer, error.message)
            await self._view().end()
        else:
            await self._discard(answer)

    async def _discard(self, answer: Message) -> None:
        await self._view().end()
        self.session.discard(answer)
        await self.show_conversation()

    # a full context

    def ask_about_full_context(self, what: str) -> None:
        """Let the user decide; nothing is cut without that."""
        facts = self.meter.facts
        assert facts is not None
        larger = larger_cache(facts)
        choices = [
            (
                "drop",
                "Drop the oldest turns",
                "The model is not told them any more; you still see them",
            ),
            _larger_choice(facts, larger),
            ("new", "New chat", "This one is kept"),
        ]

        async def decide(choice: str | None) -> None:
            if choice == "drop" and self.driver is not None:
                self.driver.drop_oldest_turns(self.session, facts.n_ctx)
            elif choice == "larger" and larger is not None:
                await self._take_larger_cache(larger)
            elif choice == "new":
                await self.show_session(self.session.new())

        self.app.push_screen(ChoiceScreen(what, choices), decide)

    async def _take_larger_cache(self, larger: CacheFigures) -> None:
        arguments = {
            **self.options.arguments,
            "n_ctx": larger.n_ctx,
            "cache_type_k": larger.type_k,
            "cache_type_v": larger.type_v,
        }
        self.options = replace(self.options, arguments=arguments)
        path = self.session.conversation.path()
        self.wants_answer = bool(path) and path[-1].role == "user"
        await self.restart_engine()

    @on(TurnsDropped)
    async def _dropped(self, event: TurnsDropped) -> None:
        if event.driver is not self.driver:
            return
        self.session.save()
        await self.show_conversation()
        plural = "s are" if event.n_turns != 1 else " is"
        await self.transcript.note(f"{event.n_turns} turn{plural} not told to the model any more")
        path = self.session.conversation.path()
        if path and path[-1].role == "user":
            await self.begin_answer()
        else:
            self.count_tokens()

    async def show_session(self, session: ChatSession) -> None:
        """Go over to another session."""
        session.model_name = self.session.model_name
        self.session = session
        self.editing = None
        self.meter = replace(self.meter, last=None, n_tokens=None, tokens_per_second=0.0)
        self.query_one(Speed).clear()
        self.show_settings()
        await self.show_conversation()
        self.show_meter()
        self.count_tokens()

    def on_unmount(self) -> None:
        """Keep what was written so far."""
        if self.answer is not None:
            self.session.extend(self.answer, "", save=True)
        if self.driver is not None:
            self.driver.close()


def _larger_choice(facts: EngineFacts, larger: CacheFigures | None) -> tuple[str, str, str]:
    if larger is None:
        return (
            "",
            "A larger context",
            f"Not with this model, which was trained for {facts.n_ctx_train:,} tokens",
        )
    now = cache_figures(facts)
    return (
        "larger",
        f"{larger.n_ctx:,} tokens, with K {larger.type_k} and V {larger.type_v}",
        f"The cache takes {size(larger.n_bytes)} instead of {size(now.n_bytes)}; the engine "
        "starts again",
    )
