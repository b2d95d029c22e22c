"""`EngineDriver`: runs a blocking engine in a thread and posts its results as messages."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from threading import Thread

from textual.message import Message

from localkv.chat.engine import (
    Audited,
    ChatEngine,
    ChatRequest,
    EngineFacts,
    Finished,
    LoadProgress,
    PromptProgress,
    TextDelta,
)
from localkv.chat.session import ChatSession
from localkv.errors import LocalKVError


@dataclass
class EngineMessage(Message):
    """From an engine; one that was replaced may still send some."""

    driver: EngineDriver


@dataclass
class EngineLoading(EngineMessage):
    """Loading has come further."""

    progress: LoadProgress


@dataclass
class EngineReady(EngineMessage):
    """The model is loaded."""

    facts: EngineFacts


@dataclass
class EngineFailed(EngineMessage):
    """Loading failed, or something that was asked between answers did."""

    error: LocalKVError


@dataclass
class PromptRead(EngineMessage):
    """More of the prompt is read; the answer begins after its end."""

    progress: PromptProgress


@dataclass
class AnswerGrew(EngineMessage):
    """More of the answer is there."""

    delta: TextDelta


@dataclass
class AnswerEnded(EngineMessage):
    """The answer is complete."""

    stats: Finished


@dataclass
class AnswerFailed(EngineMessage):
    """The answer ended with an error."""

    error: LocalKVError


@dataclass
class AnswerAudited(EngineMessage):
    """What the packed cache changed in the last answer; or why that is not known."""

    audited: Audited
    error: LocalKVError | None = None


@dataclass
class TokensCounted(EngineMessage):
    """The number of tokens that the conversation takes."""

    n_tokens: int


@dataclass
class StateLoaded(EngineMessage):
    """What was evaluated before is in the cache; or why it is not."""

    n_tokens: int
    error: LocalKVError | None = None


@dataclass
class StateNotSaved(EngineMessage):
    """Why what was evaluated is not in a file."""

    error: LocalKVError


@dataclass
class ContextMeasured(EngineMessage):
    """The conversation does not fit: what happened, its tokens, its last turn's tokens."""

    what: str
    n_tokens: int
    n_last: int


@dataclass
class TurnsDropped(EngineMessage):
    """The oldest turns are no longer part of the prompt."""

    n_turns: int


class EngineDriver:
    """One thread that asks an engine one thing after the other.

    Args:
        engine: not used by anybody else.
        post: a widget's `post_message`.
    """

    def __init__(self, engine: ChatEngine, post: Callable[[Message], object]) -> None:
        self.engine = engine
        self._post = post
        self._cancelled = False
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        # Textual finds the running app in a context variable
        context = contextvars.copy_context()
        self._thread = Thread(target=context.run, args=(self._work,), daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while job := self._jobs.get():
            job()

    def _tell(self, message: Message) -> None:
        with suppress(RuntimeError):  # the app has ended meanwhile
            self._post(message)

    def _ask(self, job: Callable[[], Message]) -> None:
        def ask() -> None:
            try:
                self._tell(job())
            except Exception as error:
                self._tell(EngineFailed(self, as_error(error)))

        self._jobs.put(ask)

    def load(self) -> None:
        """Ends with EngineReady or EngineFailed."""

        def job() -> Message:
            facts = self.engine.load(lambda progress: self._tell(EngineLoading(self, progress)))
            return EngineReady(self, facts)

        self._ask(job)

    def count_tokens(self, request: ChatRequest) -> None:
        """Ends with TokensCounted or EngineFailed."""
        self._ask(lambda: TokensCounted(self, self.engine.count_tokens(request)))

    def measure_context(self, what: str, whole: ChatRequest, last: ChatRequest) -> None:
        """Ends with ContextMeasured or EngineFailed."""
        count = self.engine.count_tokens
        self._ask(lambda: ContextMeasured(self, what, count(whole), count(last)))

    def drop_oldest_turns(self, session: ChatSession, n_ctx: int) -> None:
        """Ends with TurnsDropped or EngineFailed."""
        count = self.engine.count_tokens
        self._ask(lambda: TurnsDropped(self, session.drop_oldest_turns(n_ctx, count)))

    def load_state(self, path: Path) -> None:
        """Ends with StateLoaded."""

        def job() -> None:
            try:
                self._tell(StateLoaded(self, self.engine.load_state(str(path))))
            except Exception as error:
                self._tell(StateLoaded(self, 0, as_error(error)))

        self._jobs.put(job)

    def save_state(self, path: Path) -> None:
        """Ends without a message, or with StateNotSaved."""

        def job() -> None:
            try:
                self.engine.save_state(str(path))
            except Exception as error:
                self._tell(StateNotSaved(self, as_error(error)))

        self._jobs.put(job)

    def answer(self, request: ChatRequest) -> None:
        """Ends with AnswerEnded or AnswerFailed."""

        self._cancelled = False

        def job() -> None:
            try:
                for news in self.engine.answer(request):
                    if self._cancelled:  # perhaps before the engine had begun
                        self.engine.cancel()
                    if isinstance(news, Finished):
                        self._tell(AnswerEnded(self, news))
                    elif isinstance(news, PromptProgress):
                        self._tell(PromptRead(self, news))
                    else:
                        self._tell(AnswerGrew(self, news))
            except Exception as error:
                self._tell(AnswerFailed(self, as_error(error)))

        self._jobs.put(job)

    def audit(self) -> None:
        """Ends with AnswerAudited."""

        self._cancelled = False

        def job() -> None:
            try:
                for audited in [Audited()] if self._cancelled else self.engine.audit():
                    self._tell(AnswerAudited(self, audited))
            except Exception as error:
                self._tell(AnswerAudited(self, Audited(), as_error(error)))

        self._jobs.put(job)

    def cancel(self) -> None:
        """End the answer after its next token, or the audit."""
        self._cancelled = True
        self.engine.cancel()

    def close(self, *, saves: Path | None = None) -> None:
        """Stop the engine and the thread; does not wait for them.

        Args:
            saves: where what was evaluated is written before; the process does not end meanwhile.
        """
        if saves is None:
            self._jobs.put(None)
            Thread(target=self.engine.close, daemon=True).start()
            return
        self.cancel()
        self.save_state(saves)
        self._jobs.put(None)

        def close() -> None:
            self._thread.join()
            self.engine.close()

        Thread(target=close).start()


def as_error(error: Exception) -> LocalKVError:
    """An error to show: nobody would see a traceback of this thread, and all would wait."""
    if isinstance(error, LocalKVError):
        return error
    return LocalKVError(f"{type(error).__name__}: {error}", hint="a bug: please report it")
