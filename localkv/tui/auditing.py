"""`Auditing`: what the packed cache changed in the last answer, on any screen that shows it."""

from __future__ import annotations

from textual import on
from textual.timer import Timer

from localkv.chat.conversation import Message
from localkv.chat.engine import Audited, EngineStoppedError
from localkv.chat.session import ChatSession
from localkv.errors import UsageError
from localkv.tui.answering import Answering
from localkv.tui.audit_screen import AuditScreen
from localkv.tui.messages import AnswerAudited, AnswerEnded, EngineReady
from localkv.tui.widgets.audit_figures import AuditFigures

IDLE_SECONDS = 2.0
"""Without a key for so long, nobody waits for the model."""


class Auditing(Answering):
    """Audits the last answer, when it is asked to or, with `audits`, when nothing else goes on.

    Attributes:
        answered: the last answer that this engine has written.
        audited: what was found of it, if it was audited.
    """

    answered: Message | None = None
    audited: Audited | None = None
    _under_way = False
    _shows = False
    _idle: Timer | None = None

    @on(EngineReady)
    def _no_answer_yet(self, event: EngineReady) -> None:
        if event.driver is self.driver:
            self._forget(None)

    @on(AnswerEnded)
    def _note_answer(self, event: AnswerEnded) -> None:
        """Runs before the answer's own handler, which forgets it."""
        if event.driver is self.driver and self.answer is not None:
            self._forget(self.answer, event.stats.degenerate)
            if self.audits:
                self._wait_for_idleness()

    async def show_session(self, session: ChatSession) -> None:
        self.stop_audit()
        self._forget(None)
        await super().show_session(session)

    def _forget(self, answered: Message | None, degenerate: str = "") -> None:
        self.answered, self.audited = answered, None
        self._under_way = self._shows = False
        figures = self.query_one(AuditFigures)
        figures.degenerate = degenerate
        figures.show(None)

    def audit_answer(self) -> None:
        """Show what the packed cache changed in the last answer.

        Raises:
            UsageError: there is no answer, or one is being written.
        """
        if self.busy:
            raise UsageError("an answer is being written", hint="Esc stops it")
        answered = self.answered
        if answered is None or self.session.conversation.messages.get(answered.id) is not answered:
            raise UsageError(
                "this engine has written no answer here yet", hint="Ctrl+R answers again"
            )
        if self.audited is not None:
            self.app.push_screen(AuditScreen(self.audited))
            return
        self._shows = True
        self._begin()

    def _begin(self) -> None:
        if self.driver is not None and not self._under_way:
            self._under_way = True
            self.query_one(AuditFigures).show_running()
            self.driver.audit()

    def stop_audit(self) -> bool:
        """End an audit that is under way; whether one was."""
        was, self._shows = self._under_way, False
        if was and self.driver is not None:
            self.driver.cancel()
        return was

    def _wait_for_idleness(self) -> None:
        if self._idle is not None:
            self._idle.stop()
        self._idle = self.set_timer(IDLE_SECONDS, self._audit_if_idle)

    def _audit_if_idle(self) -> None:
        self._idle = None
        if self.audits and not self.busy and self.answered is not None and self.audited is None:
            self._begin()

    def key_pressed(self) -> None:
        """Somebody is at the keyboard: what goes on in the background waits."""
        if self._under_way and not self._shows:
            self.stop_audit()
        elif self._idle is not None:
            self._wait_for_idleness()

    async def begin_answer(self) -> None:
        self.stop_audit()
        await super().begin_answer()

    async def stop_answer(self) -> None:
        self.stop_audit()
        await super().stop_answer()

    @on(AnswerAudited)
    async def _audit_ended(self, event: AnswerAudited) -> None:
        if event.driver is not self.driver or not self._under_way:
            return
        shows, self._under_way, self._shows = self._shows, False, False
        figures = self.query_one(AuditFigures)
        figures.show(None)
        if isinstance(event.error, EngineStoppedError):
            self.lose_engine(event.error)
        elif event.error is not None:
            self.audits = self.audits and shows  # else it would say so after each answer
            await self.transcript.note(f"no audit: {event.error}", error=True)
        elif event.audited.line:
            self.audited = event.audited
            figures.show(event.audited)
            if shows:
                self.app.push_screen(AuditScreen(event.audited))
        elif self.audits and not self.busy:
            self._wait_for_idleness()
