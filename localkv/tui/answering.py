"""`Answering`: the life of an answer, on any screen that shows it."""

from __future__ import annotations

import time
from dataclasses import replace

from textual import on
from textual.timer import Timer

from localkv.chat.conversation import Message
from localkv.chat.engine import EngineStoppedError
from localkv.chat.session import ChatSession
from localkv.errors import ContextOverflowError, LocalKVError
from localkv.tui.engine_screen import EngineScreen
from localkv.tui.messages import AnswerEnded, AnswerFailed, AnswerGrew, PromptRead
from localkv.tui.widgets.load_strip import LoadStrip
from localkv.tui.widgets.message_view import MessageView
from localkv.tui.widgets.speed import Speed

DRAW_SECONDS = 0.1
DRAW_SECONDS_PER_BLOCK = 0.002
"""An answer is drawn so often, and the rarer the more paragraphs have to be laid out with it. It is
saved as often: text that was on the screen is not lost, however the program ends."""


class Answering(EngineScreen):
    """Has messages answered.

    Attributes:
        editing: the message that is said differently, or None.
        audits: answers are audited when nothing else goes on.
    """

    editing: Message | None = None
    audits = False
    _drawn = 0.0
    _growth: Timer | None = None
    _written = 0

    # for subclasses to fill in

    def ask_about_full_context(self, what: str) -> None:
        raise NotImplementedError

    async def send_waiting(self) -> None:
        raise NotImplementedError

    async def show_waiting(self) -> None:
        raise NotImplementedError

    async def begin_answer(self) -> None:
        """Have the message at the end answered, or go on with a cut answer there.

        Without a model that happens as soon as there is one.
        """
        self.wants_answer = self.meter.facts is None
        if self.wants_answer or self.driver is None:
            if self.query_one(LoadStrip).has_class("-error"):
                await self.transcript.note(
                    "there is no engine: F5 or /model starts one, and this is answered then",
                    error=True,
                )
            return
        session = self.session
        if session.cut_answer is None and not session.awaits_answer:
            return
        if self.meter.facts is not None:
            session.runs_with(self.meter.facts)
        try:
            if session.cut_answer is not None:
                self.answer = session.cut_answer
                request = session.continue_request(self.answer)
            else:
                self.answer = session.begin_answer()
                request = session.request()
        except LocalKVError as error:
            await self.transcript.note(str(error), error=True)
            return
        await self.show_conversation()
        self._view().begin()
        self.query_one(Speed).begin()
        self._written = len(self.answer.content)
        self.driver.answer(replace(request, audit=self._keeps_predictions))
        self.refresh_bindings()

    @property
    def _keeps_predictions(self) -> bool:
        """Whether an audit needs to be prepared for: one of a cache with a budget can't be had
        otherwise, as pages change their types."""
        facts = self.meter.facts
        return self.audits or (facts is not None and facts.kv_budget is not None)

    def _view(self) -> MessageView:
        """The view of the answer that is being written."""
        return self.transcript.views()[-1]

    async def stop_answer(self) -> None:
        """End the answer after its next token; one that has not begun does not begin."""
        if self.wants_answer:
            self.wants_answer = False
            await self.offer_answer()
            await self.show_waiting()
        if self.answer is not None and self.driver is not None:
            self.driver.cancel()

    @on(PromptRead)
    def _read(self, event: PromptRead) -> None:
        if event.driver is self.driver and self.answer is not None:
            self._view().show_progress(event.progress)
            self.meter = replace(self.meter, n_tokens=event.progress.n_read)
            self.show_meter()

    @on(AnswerGrew)
    async def _grew(self, event: AnswerGrew) -> None:
        if event.driver is not self.driver or self.answer is None:
            return
        self.session.extend(self.answer, event.delta.text)
        self.query_one(Speed).add(event.delta)
        self.meter = replace(
            self.meter,
            n_tokens=event.delta.n_tokens or self.meter.n_tokens,
            pages=event.delta.pages or self.meter.pages,
        )
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
        self.evaluated = self.session.id
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
            await self.offer_answer()
            self.count_tokens()  # a server does not tell them of an answer that never began
        speed = self.query_one(Speed)
        speed.draw(stats.decode_per_second)
        speed.show_guesses(stats.drafted_tokens, stats.accepted_tokens)
        self.show_meter()
        self.refresh_bindings()
        if not stats.context_full and stats.finish_reason != "cancelled":
            await self.send_waiting()
            return
        await self.show_waiting()
        if stats.context_full:
            self.ask_about_full_context("The context is full, and the answer was cut.")

    @on(AnswerFailed)
    async def _answer_failed(self, event: AnswerFailed) -> None:
        if event.driver is not self.driver or self.answer is None:
            return
        is_new = not self.answer.content
        await self.fail_answer(event.error)
        if isinstance(event.error, EngineStoppedError):
            self.wants_answer = is_new
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
        if not answer.content:
            await self._discard(answer)
            await self.show_waiting()
            return
        if len(answer.content) > self._written or not answer.finish_reason:
            self.session.fail(answer, error.message)
        await self._view().end()
        await self.show_waiting()
        self.refresh_bindings()

    async def _discard(self, answer: Message) -> None:
        await self._view().end()
        self.session.discard(answer)
        await self.show_conversation()

    async def continue_answer(self) -> None:
        """Go on with the answer at the end, if it was cut."""
        if self.refuse_while_busy():
            return
        if self.session.cut_answer is None:
            self.notify("There is no answer at the end that was cut", severity="warning")
            return
        await self.begin_answer()

    async def offer_answer(self) -> None:
        """Say how to get an answer, if there is none to the last message and none is coming."""
        if self.session.awaits_answer and not self.busy:
            await self.transcript.note("This message has no answer: Ctrl+R has it answered")

    async def show_session(self, session: ChatSession) -> None:
        """Go over to another session."""
        self.save_state()
        session.model_name = self.session.model_name
        self.session = session
        self.load_state()
        self.editing = None
        self.meter = replace(self.meter, last=None, n_tokens=None, tokens_per_second=0.0)
        self.query_one(Speed).clear()
        self.show_settings()
        await self.show_conversation()
        self.show_model()
        await self.offer_answer()
        self.show_meter()
        self.count_tokens()
        self.refresh_bindings()

    def keep_answer(self) -> None:
        """Keep the text so far."""
        if self.answer is not None:
            self.session.keep(self.answer)

    def on_unmount(self) -> None:
        self.keep_answer()
        self.close_engine()
