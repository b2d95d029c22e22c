"""The front's side of the engine's process: texts are submitted, and events come back.

`Supervisor` keeps the process running: it starts it, and another one when it has died.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from typing import TYPE_CHECKING, Any

import msgspec

from localkv.chat.engine import EngineOptions, EngineStoppedError, LoadProgress
from localkv.engine_process.client import EngineClient, EngineFailedError
from localkv.engine_process.texts import (
    Again,
    Embed,
    Ended,
    Event,
    Facts,
    Piece,
    Reading,
    SlotDone,
    Status,
    Step,
    Submit,
    Vectors,
    Warned,
    from_engine,
)
from localkv.engine_process.wire import (
    Cancel,
    Load,
    Message,
    Progress,
    Refused,
    SlotAction,
    named_error,
)
from localkv.errors import LocalKVError
from localkv.server.failures import RequestError
from localkv.system.loading_line import compiling_line

if TYPE_CHECKING:
    from localkv.server.metrics import ObservedTexts


SAVING_SECONDS = 32.0
"""How long an engine may take to end that writes texts to the disk."""


@dataclass
class OpenText:
    """A text that grows, or waits.

    Attributes:
        submit: the request.
        n_cached: tokens of its prompt that were evaluated before it came.
        n_read: tokens of its prompt that are evaluated, those included.
        n_tokens: that were drawn.
        has_new_line: whether it has more than one line.
    """

    submit: Submit
    n_cached: int = 0
    n_read: int = 0
    n_tokens: int = 0
    has_new_line: bool = False


class OpenTexts(dict[int, OpenText]):
    """The texts that have not ended, by their numbers."""

    def add(self, submit: Submit) -> None:
        """A request goes to the engine."""
        self[submit.id] = OpenText(submit)

    def note(self, event: Event) -> None:
        """Something has happened to one of them."""
        text = self.get(event.id)
        if text is None:
            return
        if isinstance(event, Reading):
            text.n_cached, text.n_read = event.n_cached, event.n_held
        elif isinstance(event, Piece):
            text.n_tokens, text.n_read = event.n_tokens, len(text.submit.ids)
            text.has_new_line = text.has_new_line or "\n" in event.text
        elif isinstance(event, Ended | Refused):
            del self[event.id]


class Texts(AsyncIterator[list[tuple[int, Event]]]):
    """Texts that were submitted together, as they grow.

    Each item has everything that happened since the last, as (number of the text, event): a slow
    reader gets fewer and larger ones. It ends when all texts have.

    Args:
        client: runs them.
        ids: the client's numbers of the texts.

    Attributes:
        observer: is told what happens to them.
        keep: called with the bytes of events that wait, negative once they are read; raises
            RequestError if there is no room.
    """

    def __init__(self, client: TextClient, ids: Sequence[int]) -> None:
        self._client = client
        self.ids = tuple(ids)
        self._numbers = {id: number for number, id in enumerate(ids)}
        self._open = set(ids)
        self._events = list[tuple[int, Event]]()
        self._news = asyncio.Event()
        self._error: Exception | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.observer: ObservedTexts | None = None
        self.keep: Callable[[int], None] = lambda n_bytes: None
        self._n_kept = 0

    def end_after(self, seconds: float, *, of: float) -> None:
        """Let those that have not ended by then fail, with status 504.

        Args:
            of: the seconds that the whole request may take.
        """
        error = RequestError(504, f"the request took more than {of:g} s", "see --timeout")

        def expire() -> None:
            self.break_off("timeout")
            self._client.forget(self._open)
            self.fail(error)

        self._timer = asyncio.get_running_loop().call_later(seconds, expire)

    def put(self, event: Event) -> None:
        """Take an event of one of the texts. Events that wait for a slow reader take memory; if
        the client may take no more, the texts end."""
        n_bytes = _n_bytes(event)
        try:
            self.keep(n_bytes)
        except RequestError as error:
            self.break_off("disconnected")
            self._client.forget(self._open)
            self.fail(error)
            return
        self._n_kept += n_bytes
        self._events.append((self._numbers[event.id], event))
        if self.observer is not None:
            self.observer.take(event)
        if isinstance(event, Ended | Refused):
            self._open.discard(event.id)
            self._forget_deadline()
        self._news.set()

    def _forget_deadline(self) -> None:
        if self._timer is not None and not self._open:
            self._timer.cancel()

    def break_off(self, why: str) -> None:
        """Tell the observer that the texts that are still open will not be complete."""
        if self.observer is not None:
            self.observer.broke_off(self._open, why)

    def fail(self, error: Exception) -> None:
        """No further event will come."""
        self._error = error
        self._open.clear()
        self._forget_deadline()
        self._news.set()

    async def begun(self) -> None:
        """Wait until the engine has taken all of them.

        Raises:
            LocalKVError: it refuses one; the others are cancelled.
            EngineStoppedError: it is gone.
        """
        n_known, n_texts = 0, len(self._numbers)
        while n_known < n_texts:
            await self._news.wait()
            if self._error is not None:
                raise self._error
            for _, event in self._events:
                if isinstance(event, Refused):
                    self.close()
                    raise named_error(event.kind, event.message, event.hint)
            n_known = len({number for number, _ in self._events})
            self._news.clear()
        self._news.set()

    async def __anext__(self) -> list[tuple[int, Event]]:
        while not self._events:
            if self._error is not None:
                error, self._error = self._error, None
                raise error
            if not self._open:
                raise StopAsyncIteration
            await self._news.wait()
            self._news.clear()
        events, self._events = self._events, []
        self.keep(-self._n_kept)
        self._n_kept = 0
        return events

    def close(self) -> None:
        """Nobody reads the rest: let the engine end them."""
        self.break_off("disconnected")
        self._client.forget(self._open)
        self._open = set()
        self._forget_deadline()


class TextClient(EngineClient):
    """The client of an engine that writes texts.

    Args:
        options: the model to load, and how.
        on_progress: is told how far that is.
        command: the program, if it is another; for tests.

    Attributes:
        facts: of the model once it is loaded.
        status: what the engine does.
        open: the texts that have not ended.
        on_status: is told each of them.
        on_warning: is told what a user should know, a line.
    """

    def __init__(
        self,
        options: EngineOptions,
        on_progress: Callable[[LoadProgress], None] = lambda progress: None,
        command: Sequence[str] = (),
    ) -> None:
        super().__init__(Load(options), from_engine, self.take, self.end, command)
        self.facts: Facts | None = None
        self.status = Status()
        self.open = OpenTexts()
        self.on_status: Callable[[Status], None] = lambda status: None
        self.on_warning: Callable[[str], None] = lambda line: None
        if "cache_disk" in options.arguments:
            self.stop_seconds = SAVING_SECONDS
        self._on_progress = on_progress
        self._texts = dict[int, Texts]()
        self._numbers = count(1)
        self._acting = asyncio.Lock()
        self._owed: float | None = None  # since when the engine has something to do
        self._loaded = asyncio.Event()

    @property
    def is_running(self) -> bool:
        """Whether a model is loaded, and the process there."""
        return self.facts is not None and self._failure is None

    @property
    def n_open(self) -> int:
        """Texts that have not ended."""
        return len(self._texts)

    @property
    def stalled_seconds(self) -> float:
        """Seconds since the engine last answered while it had work; 0 if it has nothing to do."""
        return 0.0 if self._owed is None else time.monotonic() - self._owed

    async def start(self) -> None:
        await super().start()
        self._owed = time.monotonic()

    async def loaded(self) -> Facts:
        """Wait until the model is loaded.

        Raises:
            EngineFailedError: it can't be.
            EngineStoppedError: the process is gone.
        """
        await self._loaded.wait()
        if self.facts is None:
            raise self._failure or EngineStoppedError("the engine was stopped")
        return self.facts

    def submit(self, requests: Sequence[Submit]) -> Texts:
        """Give the engine new texts, and each one a number: all of them, or none.

        Raises:
            EngineStoppedError: the engine is not running.
        """
        numbered = [_numbered(request, next(self._numbers)) for request in requests]
        texts = Texts(self, [one.id for one in numbered])
        # what can fail comes before anything is counted
        self._send(*_with_less_said_again(numbered))
        for one in numbered:
            self._texts[one.id] = texts
            self.open.add(one)
        return texts

    async def act(self, action: SlotAction) -> SlotDone:
        """Let something be done with a text that is kept; the action has no number yet.

        Raises:
            EngineStoppedError: the engine is not running.
            LocalKVError: it can't be done.
        """
        async with self._acting:  # there is a step of all texts between two of them
            id = next(self._numbers)
            texts = Texts(self, [id])
            self._send(msgspec.structs.replace(action, id=id))
            self._texts[id] = texts
            try:
                await texts.begun()
                [(_, event)] = await anext(texts)
                assert isinstance(event, SlotDone)
                return event
            finally:
                self._texts.pop(id, None)

    async def vectors(self, request: Embed) -> Vectors:
        """Let texts become vectors, or be scored; the request has no number yet.

        Raises:
            EngineStoppedError: the engine is not running.
            LocalKVError: it can't be done.
        """
        id = next(self._numbers)
        texts = Texts(self, [id])
        self._send(msgspec.structs.replace(request, id=id))
        self._texts[id] = texts
        try:
            await texts.begun()
            [(_, event)] = await anext(texts)
            assert isinstance(event, Vectors)
            self._texts.pop(id, None)
            return event
        finally:
            self.forget({id})

    def forget(self, ids: set[int]) -> None:
        """End texts whose events nobody wants."""
        for id in ids:
            self.open.pop(id, None)
            if self._texts.pop(id, None) is not None:
                with suppress(EngineStoppedError):
                    self._send(Cancel(id))

    def _send(self, *messages: Message) -> None:
        super()._send(*messages)
        if self._owed is None:
            self._owed = time.monotonic()

    def take(self, message: Progress | Facts | Step | Warned) -> None:
        """Tell whom it concerns what the engine says."""
        if isinstance(message, Step):
            moved = message.status.n_steps != self.status.n_steps
            for event in message.events:
                moved |= self._hand_on(event)
            if not self._texts:
                self._owed = None
            elif moved:
                self._owed = time.monotonic()
            self.status = message.status
            self.on_status(message.status)
        elif isinstance(message, Progress):
            self._on_progress(message.value)
        elif isinstance(message, Warned):
            self.on_warning(message.line)
        else:
            self.facts, self._owed = message, None
            self._loaded.set()

    def end(self, failure: LocalKVError) -> None:
        """Tell everybody who waits that the process is gone."""
        self._loaded.set()
        for texts in set(self._texts.values()):
            texts.break_off("engine")
            texts.fail(EngineStoppedError(str(failure)))
        self._texts.clear()

    def _hand_on(self, event: Event) -> bool:
        """Tell those who wait for it; return whether anybody does."""
        self.open.note(event)
        texts = self._texts.get(event.id)
        if texts is None:
            return False
        if isinstance(event, Ended | Refused):
            del self._texts[event.id]
        texts.put(event)
        return True


def _n_bytes(event: Event) -> int:
    """Bytes of memory that an event takes, about."""
    if not isinstance(event, Piece):
        return 0
    n_ranked = sum(1 + len(one.top_logprobs) for one in event.logprobs)
    return 300 + len(event.text) + 250 * n_ranked


def _with_less_said_again(requests: Sequence[Submit]) -> Iterator[Submit | Again]:
    """Requests as they are sent; one that differs from the last only in its seed is short."""
    last: Submit | None = None
    for one in requests:
        seed = one.params.seed
        if last is not None:
            like = replace(last.params, seed=seed)
            if msgspec.structs.replace(last, id=one.id, params=like) == one:
                yield Again(one.id, seed)
                continue
        yield one
        last = one


def _numbered(request: Submit, id: int) -> Submit:
    return msgspec.structs.replace(request, id=id)


MOST_DEATHS, WITHIN_SECONDS = 3, 60.0
"""The server ends once `MOST_DEATHS` engines die within `WITHIN_SECONDS`."""
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 10.0
"""Seconds before the next one is started, which double from death to death."""


class Supervisor:
    """Runs an engine, as long as it is wanted, and again when it is wanted again.

    Args:
        options: the model to load, and how.
        say: tells whoever started the server what happens, a line each.
        command: the engine's program, if it is another; for tests.

    Attributes:
        say: as above.
        options: as above; they may change before the next engine is started.
        client: the process that runs, or ran last.
        known: facts of the engine that was loaded last, whether it runs or not.
        is_wanted: an engine runs, or is about to.
        n_restarts: how often one that died was replaced.
    """

    def __init__(
        self,
        options: EngineOptions,
        say: Callable[[str], None] = lambda line: None,
        command: Sequence[str] = (),
    ) -> None:
        self.n_restarts = 0
        self.say, self.options = say, options
        self.known: Facts | None = None
        self.is_wanted = False
        self._command = command
        self._progress = LoadProgress("header")
        self._has_told_of_kernels = False
        self._deaths = deque[float](maxlen=MOST_DEATHS)
        self._is_stopping = asyncio.Event()
        self._before = Status()
        self.client = self._new_client()

    @property
    def total(self) -> Status:
        """Counts of all engines so far; all else is the status of the engine that runs."""
        now, before = self.client.status, self._before
        counts = {
            name: getattr(now, name) + getattr(before, name)
            for name in ("n_steps", "n_generated", "n_prompt", "n_reused", "n_preempted")
        }
        return msgspec.structs.replace(now, **counts)

    def _new_client(self) -> TextClient:
        client = TextClient(self.options, self._note, self._command)
        client.on_warning = lambda line: self.say(f"warning: {line}")
        return client

    def _note(self, progress: LoadProgress) -> None:
        if progress.stage == "kernels" and progress.total and not self._has_told_of_kernels:
            self._has_told_of_kernels = True
            self.say(compiling_line(progress.total))
        self._progress = progress

    @property
    def facts(self) -> Facts | None:
        """Facts of the model; None while no engine has it."""
        return self.client.facts if self.client.is_running else None

    @property
    def progress(self) -> dict[str, Any]:
        """How far loading is."""
        now = self._progress
        return {"stage": now.stage, "done": now.done, "total": now.total}

    async def run(self, on_ready: Callable[[Facts], None]) -> None:
        """Keep an engine running until `stop`.

        Args:
            on_ready: is told whenever one is.

        Raises:
            EngineFailedError: the model can't be loaded.
            EngineStoppedError: engines die again and again.
        """
        self._is_stopping.clear()
        self._progress, self.is_wanted = LoadProgress("header"), True
        try:
            await self._keep_running(on_ready)
        finally:
            self.is_wanted = False

    async def _keep_running(self, on_ready: Callable[[Facts], None]) -> None:
        pause, is_first = FIRST_PAUSE, True
        while not self._is_stopping.is_set():
            self._renew()
            await self.client.start()
            try:
                self.known = await self.client.loaded()
                is_first, pause = False, FIRST_PAUSE
                on_ready(self.known)
            except EngineFailedError:
                raise
            except Exception as error:
                if not self._is_stopping.is_set():
                    self.say(str(error))
            problem = await self.client.ended()
            if self._is_stopping.is_set():
                return
            self._deaths.append(time.monotonic())
            is_often = len(self._deaths) == MOST_DEATHS
            if is_first or (is_often and self._deaths[-1] - self._deaths[0] < WITHIN_SECONDS):
                raise problem
            self.say(f"{problem}; another one is started")
            with suppress(TimeoutError):
                await asyncio.wait_for(self._is_stopping.wait(), pause)
            pause = min(2 * pause, LONGEST_PAUSE)
            self.n_restarts += 1

    def _renew(self) -> None:
        """Take a client that has no process yet, and keep what the one before has counted."""
        if self.client.pid is not None:
            self._before = self.total
            on_status, self.client = self.client.on_status, self._new_client()
            self.client.on_status = on_status

    async def stop(self) -> None:
        """End the engine."""
        self._is_stopping.set()
        await self.client.stop()
