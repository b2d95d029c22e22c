"""`FullContext`: what becomes of a conversation that no longer fits the context."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from textual import on, work

from localkv.chat.cache_figures import CacheFigures, larger_cache
from localkv.chat.engine import EngineOptions
from localkv.config import MIXED
from localkv.errors import LocalKVError
from localkv.tui.auditing import Auditing
from localkv.tui.full_context_screen import FullContextScreen
from localkv.tui.messages import ContextMeasured, TurnsDropped


class FullContext(Auditing):
    """Lets the user decide: nothing is cut without that.

    Afterwards the message that had no answer is answered, and an answer that was cut goes on.
    """

    def ask_about_full_context(self, what: str) -> None:
        """Find out what could help, and ask."""
        if self.driver is not None:
            self.driver.measure_context(
                what, self.session.request(), self.session.last_turn_request()
            )

    @on(ContextMeasured)
    def _measured(self, event: ContextMeasured) -> None:
        if event.driver is self.driver and not self.busy:
            self._offer(event)

    @work(group="context", exclusive=True)
    async def _offer(self, event: ContextMeasured) -> None:
        facts, session = self.meter.facts, self.session
        assert facts is not None
        choices = []
        last_fits = event.n_last < facts.n_ctx
        if last_fits and len(session.conversation.turns()) > 1:
            choices.append("drop")
        larger = larger_cache(facts, event.n_tokens)
        if larger is not None:
            try:
                await asyncio.to_thread(self.check_options, self._with_cache(larger))
            except Exception:  # whatever it is, the choice could not work
                larger = None
        if larger is not None:
            choices.append("larger")
        if not session.awaits_answer or (last_fits and len(session.conversation.path()) > 1):
            choices.append("new")
        if session is not self.session or self.busy:
            return
        if not choices:
            await self.transcript.note(
                f"the message alone takes {event.n_last:,} of {facts.n_ctx:,} tokens: shorten it "
                "(Alt+Up, e)",
                error=True,
            )
            return
        screen = FullContextScreen(event.what, facts, choices, larger, session.awaits_answer)

        def decide(choice: str | None) -> None:
            if choice == "drop" and self.driver is not None:
                self.wants_answer = True
                self.driver.drop_oldest_turns(self.session, facts.n_ctx)
            elif choice == "larger" and larger is not None:
                self.call_later(self._take_larger_cache, larger)
            elif choice == "new":
                self.call_later(self.begin_new_chat)

        self.app.push_screen(screen, decide)

    def _with_cache(self, cache: CacheFigures) -> EngineOptions:
        arguments = {**self.options.arguments, "n_ctx": cache.n_ctx}
        if MIXED not in (cache.type_k, cache.type_v):  # else layers keep types of their own
            arguments |= {"cache_type_k": cache.type_k, "cache_type_v": cache.type_v}
        return replace(self.options, arguments=arguments)

    async def _take_larger_cache(self, larger: CacheFigures) -> None:
        self.options = self._with_cache(larger)
        self.wants_answer = True
        await self.restart_engine()

    async def begin_new_chat(self) -> None:
        """Go over to a new chat, with the message that has no answer here."""
        old, new = self.session, self.session.new()
        moved = old.conversation.path()[-1] if old.awaits_answer else None
        if moved is not None:
            try:
                new.say(moved.content)
            except LocalKVError as error:
                await self.transcript.note(str(error), error=True)
                return
            old.take_back(moved)
        await self.show_session(new)
        if moved is not None:
            await self.begin_answer()

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
