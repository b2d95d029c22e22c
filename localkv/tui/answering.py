"""`Answering`: the life of an answer, on any screen that shows it."""

from __future__ import annotations

import time
from dataclasses import replace

from textual import on
from textual.timer import Timer

from localkv.chat.cache_figures import CacheFigures, larger_cache
from localkv.chat.conversation import Message
from localkv.chat.engine import EngineOptions, EngineStoppedError
from localkv.chat.session import ChatSession
from localkv.errors import ContextOverflowError, LocalKVError
from localkv.tui.engine_screen import EngineFactory, EngineScreen
from localkv.tui.full_context_screen import FullContextScreen
from localkv.tui.messages import AnswerEnded, AnswerFailed, AnswerGrew, TurnsDropped
from localkv.tui.widgets.load_strip import LoadStrip
from localkv.tui.widgets.message_view import MessageView
from localkv.tui.widgets.speed import Speed

DRAW_SECONDS = 0.1
DRAW_SECONDS_PER_BLOCK = 0.002
"""An answer is drawn so often, and the rarer the more paragraphs have to be laid out with it. It is
saved as often: text that was on the screen is not lost, however the program ends."""


class Answering(EngineScreen):
    """Has messages answered, and lets the user decide when the context is full.

    Attributes:
        editing: the message that is said differently, or None.
    """

    def __init__(
        self, session: ChatSession, options: EngineOptions, new_engine: EngineFactory
    ) -> None:
        super().__init__(session, options, new_engine)
        self.editing: Message | None = None
        self._drawn = 0.0
        self._growth: Timer | None = None

    async def begin_answer(self) -> None:
        """Have the message at the end answered, as soon as there is a model."""
        self.wants_answer = self.meter.facts is None
        if self.wants_answer or self.driver is None:
            if self.query_one(LoadStrip).has_class("-error"):
                self.wants_answer = False
                await self.transcript.note("there is no engine: F5 starts it again", error=True)
            return
        try:
            self.answer = self.session.begin_answer()
        except LocalKVError as error:
            await self.transcript.note(str(error), error=True)
            return
        await self.show_conversation()
        self._view().begin()
        self.query_one(Speed).begin()
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
        self.session.extend(self.answer, event.delta.text)
        self.query_one(Speed).add(event.delta)
        self.meter = replace(self.meter, n_tokens=event.delta.n_tokens or self.meter.n_tokens)
        if self._growth is None:
            pause = DRAW_SECONDS + DRAW_SECONDS_PER_BLOCK * self._view().n_blocks
            wait = max(0.001, self._drawn + pause - time.monotonic())
            self._growth = self.set_timer(wait, self._draw_growth)

    async def _draw_growth(self) -> None:
        """Draw everything that has come since the last time, at once."""
        self._growth, self._drawn = None, time.monotonic()
        if self.answer is None:
            return
        self.session.keep(self.answer)
        await self._view().grow()
        self._draw_speed()

    def _draw_speed(self) -> None:
        speed = self.query_one(Speed)
        speed.draw()
        self.meter = replace(self.meter, tokens_per_second=speed.tokens_per_second)
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
        self.query_one(Speed).draw(stats.decode_per_second)
        self.show_meter()
        if stats.context_full:
            self.ask_about_full_context("The context is full, and the answer was cut.")

    @on(AnswerFailed)
    async def _answer_failed(self, event: AnswerFailed) -> None:
        if event.driver is not self.driver or self.answer is None:
            return
        await self.fail_answer(event.error)
        if isinstance(event.error, EngineStoppedError):
            self.lose_engine(event.error)
        elif isinstance(event.error, ContextOverflowError):
            self.ask_about_full_context(
                f"{event.error.message[:1].upper()}{event.error.message[1:]}."
            )
        else:
            await self.transcript.note(str(event.error), error=True)

    async def fail_answer(self, error: LocalKVError) -> None:
        """End the answer with the text so far."""
        assert self.answer is not None
        answer, self.answer = self.answer, None
        self._draw_speed()
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

        def decide(choice: str | None) -> None:
            if choice == "drop" and self.driver is not None:
                self.wants_answer = self._waits_for_answer()
                self.driver.drop_oldest_turns(self.session, facts.n_ctx)
            elif choice == "larger" and larger is not None:
                self.call_later(self._take_larger_cache, larger)
            elif choice == "new":
                self.call_later(self.show_session, self.session.new())

        self.app.push_screen(FullContextScreen(what, facts, larger), decide)

    async def _take_larger_cache(self, larger: CacheFigures) -> None:
        arguments = {
            **self.options.arguments,
            "n_ctx": larger.n_ctx,
            "cache_type_k": larger.type_k,
            "cache_type_v": larger.type_v,
        }
        self.options = replace(self.options, arguments=arguments)
        self.wants_answer = self._waits_for_answer()
        await self.restart_engine()

    def _waits_for_answer(self) -> bool:
        path = self.session.conversation.path()
        return bool(path) and path[-1].role == "user"

    @on(TurnsDropped)
    async def _dropped(self, event: TurnsDropped) -> None:
        if event.driver is not self.driver:
            return
        self.session.save()
        await self.show_conversation()
        plural = "s are" if event.n_turns != 1 else " is"
        await self.transcript.note(f"{event.n_turns} turn{plural} no longer part of the prompt")
        if self.wants_answer:
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

    def keep_answer(self) -> None:
        """Keep the text so far."""
        if self.answer is not None:
            self.session.keep(self.answer)

    def on_unmount(self) -> None:
        self.keep_answer()
        if self.driver is not None:
            self.driver.close()
