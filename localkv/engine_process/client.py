"""The client of an engine's process: it starts the process, sends, reads, and tells why it ended.

`EngineClient` lives in an event loop. `EngineProcess` runs one in a thread, and is a `ChatEngine`.
So whoever draws the screen never waits for Python's lock, loads no model, and survives whatever
happens to the engine.
"""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import count
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any

from localkv.chat.engine import (
    AnswerNews,
    Audited,
    ChatRequest,
    EngineFacts,
    EngineOptions,
    EngineStoppedError,
    Finished,
    LoadProgress,
)
from localkv.engine_process.wire import (
    LENGTH,
    LONGEST,
    Ask,
    Cancel,
    Failed,
    Load,
    Message,
    Progress,
    Refused,
    SlotAction,
    Told,
    framed,
    from_conversation,
    named_error,
)
from localkv.errors import LocalKVError
from localkv.system.limits import exhausted
from localkv.system.python_child import child_command, child_environment

STOP_SECONDS = 2.0
"""How long the process may take to end by itself."""
LOOK_SECONDS = 0.1
"""How often it is looked whether it has to hurry."""
STDERR_TAIL = 4000
"""Bytes of what it said last that are looked at when it is gone."""


class EngineFailedError(LocalKVError):
    """The engine could not load the model; it makes no sense to try again."""

    def __init__(self, message: str, hint: str | None, exit_code: int) -> None:
        super().__init__(message, hint)
        self.exit_code = exit_code


class EngineClient:
    """A process with an engine, for an event loop.

    Args:
        load: the model, and how it is loaded.
        decode: makes a message of what the process sends.
        take: is told each message that is no `Failed`.
        end: is told why the process is gone.
        command: the program, if it is another; for tests.

    Attributes:
        stop_seconds: how long the process may take to end by itself; it may become less meanwhile.
    """

    def __init__(
        self,
        load: Load,
        decode: Callable[[bytes], Any],
        take: Callable[[Any], None],
        end: Callable[[LocalKVError], None],
        command: Sequence[str] = (),
    ) -> None:
        self._load, self._decode, self._take, self._end = load, decode, take, end
        self.stop_seconds = STOP_SECONDS
        self._command = list(command) or child_command("localkv.engine_process.child")
        self._process: asyncio.subprocess.Process | None = None
        self._failure: LocalKVError | None = None
        self._reading: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """The process's id, once it was started."""
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Start the process; it begins to load.

        Raises:
            EngineStoppedError: the system refuses.
        """
        try:
            # a file, since nobody would empty a pipe, and a full one would block the process
            self._stderr = tempfile.TemporaryFile()  # noqa: SIM115
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=self._stderr,
                env=child_environment(),
                start_new_session=True,  # Ctrl+C on the terminal is not meant for it
            )
        except OSError as error:
            reason = exhausted(error) or error.strerror or error
            raise EngineStoppedError(f"the engine can't be started: {reason}") from error
        if self._failure is not None:  # it was stopped meanwhile
            self._process.kill()
        self._reading = asyncio.create_task(self._read())
        self._write(framed(self._load))

    async def ended(self) -> LocalKVError:
        """Wait until the process is gone; why it is."""
        assert self._reading is not None
        await asyncio.shield(self._reading)
        return self._failure or EngineStoppedError("the engine was stopped")

    async def stop(self) -> None:
        """End the process."""
        self._failure = self._failure or EngineStoppedError("the engine was stopped")
        if self._process is None or self._reading is None:
            return
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        loop = asyncio.get_running_loop()
        began = loop.time()
        while not self._reading.done() and loop.time() - began < self.stop_seconds:
            await asyncio.wait({self._reading}, timeout=LOOK_SECONDS)
        if not self._reading.done():
            self._kill()
        await self._reading

    def _kill(self) -> None:
        assert self._process is not None
        with suppress(ProcessLookupError):
            self._process.kill()

    def _send(self, *messages: Message) -> None:
        """Send messages, all of them or none."""
        if self._process is None or self._failure is not None:
            raise EngineStoppedError("the engine is not running")
        self._write(b"".join(map(framed, messages)))

    def _write(self, data: bytes) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        # uvloop's, if the process has just died: `_conclude` will tell all that wait
        with suppress(RuntimeError):
            self._process.stdin.write(data)

    async def _read(self) -> None:
        """Hand on what the process says until it ends."""
        assert self._process is not None
        source = self._process.stdout
        assert source is not None
        try:
            while True:
                n_bytes = LENGTH.unpack(await source.readexactly(LENGTH.size))[0]
                if n_bytes > LONGEST:
                    raise ValueError(f"{n_bytes:,} bytes")
                message = self._decode(await source.readexactly(n_bytes))
                if isinstance(message, Failed):
                    self._failure = EngineFailedError(
                        message.message, message.hint, message.exit_code
                    )
                else:
                    self._take(message)
        except asyncio.IncompleteReadError:
            pass
        except ValueError as error:
            self._break_off(str(error))
        finally:
            await self._conclude()

    def _break_off(self, reason: str) -> None:
        """End a process whose further messages can't be understood either."""
        self._failure = self._failure or EngineStoppedError(
            "the engine was stopped: it sent something that is not a message", reason[:200]
        )
        self._kill()

    async def _conclude(self) -> None:
        """Tell everybody who waits that the process is gone."""
        assert self._process is not None
        try:  # killed while it ends, it would leave no exit code
            code = await asyncio.wait_for(self._process.wait(), STOP_SECONDS)
        except TimeoutError:
            self._kill()
            code = await self._process.wait()
        await self._empty_pipe()
        if self._failure is None:
            self._failure = self._reason(code)
        self._stderr.close()
        self._end(self._failure)

    async def _empty_pipe(self) -> None:
        """Read what a process that is gone has left unread: the event loop closes a pipe then."""
        assert self._process is not None
        assert self._process.stdout is not None
        with suppress(TimeoutError):
            async with asyncio.timeout(STOP_SECONDS):
                while await self._process.stdout.read(1 << 16):
                    pass

    def _reason(self, code: int) -> EngineStoppedError:
        """Why it is gone, with the last that it had to say."""
        how = f"exit code {code}"
        if code < 0:
            with suppress(ValueError):
                how = signal.Signals(-code).name
        size = os.fstat(self._stderr.fileno()).st_size
        self._stderr.seek(max(0, size - STDERR_TAIL))
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()
        last = lines[-1].removeprefix("error: ") if lines else None
        return EngineStoppedError(f"the engine stopped ({how})", last)


class EngineProcess(EngineClient):
    """A `ChatEngine` whose model lives in a child process, which is started when it has to load.

    Its event loop runs in a thread, and hands on what the process says through a queue.

    Args:
        options: the model to load, and how.
        command: the program that serves, if it is another; for tests.
    """

    def __init__(self, options: EngineOptions, *, command: Sequence[str] = ()) -> None:
        self._news = news = SimpleQueue[Any]()
        load = Load(options, converses=True)
        super().__init__(load, from_conversation, news.put, news.put, command)
        self.options = options
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: Thread | None = None
        self._stopping: asyncio.Future[None] | None = None
        self._asking = Lock()
        self._ids = count(1)
        self._asked = 0

    def load(self, on_progress: Callable[[LoadProgress], None]) -> EngineFacts:
        with self._asking:
            if self._failure is not None or self._thread is not None:
                raise EngineStoppedError("this engine was used before; start a new one")
            self._loop = asyncio.new_event_loop()
            self._thread = Thread(target=self._run, args=(self._loop,), daemon=True)
            try:
                self._thread.start()
            except RuntimeError as error:
                self._loop.close()
                self._failure = EngineStoppedError(f"the engine can't be started: {error}")
                raise self._failure from error
            while isinstance(news := self._received("facts"), LoadProgress):
                on_progress(news)
            facts: EngineFacts = news
            return facts

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        async def run() -> None:
            try:
                await self.start()
                await self.ended()
            except EngineStoppedError as error:
                self._failure = error
                self._end(error)

        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(run())

    def count_tokens(self, request: ChatRequest) -> int:
        return self._counted(Ask(next(self._ids), "count", request))

    def save_state(self, path: str) -> int:
        return self._counted(SlotAction(next(self._ids), "save", path=path))

    def load_state(self, path: str) -> int:
        return self._counted(SlotAction(next(self._ids), "restore", path=path))

    def _counted(self, request: Ask | SlotAction) -> int:
        with self._asking:
            self._ask(request)
            n_tokens: int = self._received("n_tokens")
            return n_tokens

    def answer(self, request: ChatRequest) -> Iterator[AnswerNews]:
        with self._asking:
            self._ask(Ask(next(self._ids), "answer", request))
            news = None
            while not isinstance(news, Finished):
                news = self._received("reading", "delta", "finished")
                try:
                    yield news
                except GeneratorExit:  # what still comes has the number of this answer
                    self.cancel()
                    raise

    def audit(self) -> Iterator[Audited]:
        with self._asking:
            self._ask(Ask(next(self._ids), "audit"))
            yield self._received("audited")

    def cancel(self) -> None:
        with suppress(EngineStoppedError):
            self._tell(Cancel(self._asked))

    def close(self) -> None:
        if self._thread is None:
            self._failure = self._failure or EngineStoppedError("the engine was stopped")
            return
        with suppress(EngineStoppedError):
            self._call(self._begin_to_stop)
        self._thread.join(2 * STOP_SECONDS)

    def _begin_to_stop(self) -> None:
        """End the process, unless it has ended: the loop takes no further task then."""
        has_ended = self._failure is not None if self._reading is None else self._reading.done()
        if not has_ended:
            self._stopping = asyncio.ensure_future(self.stop())

    def _ask(self, message: Ask | SlotAction) -> None:
        self._asked = message.id
        self._tell(message)

    def _tell(self, message: Message) -> None:
        """Send a message.

        Raises:
            EngineStoppedError: the engine is not running.
        """
        if self._process is None or self._failure is not None:
            raise EngineStoppedError("the engine is not running")
        self._call(self._write, framed(message))

    def _call(self, function: Callable[..., object], *arguments: object) -> None:
        """Let the thread call a function.

        Raises:
            EngineStoppedError: it has ended.
        """
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            raise EngineStoppedError("the engine is not running") from None

    def _received(self, *fields: str) -> Any:
        """What is told next, in one of these fields of `Told`, of what was asked last, or how far
        loading is; an error is raised."""
        while True:
            news = self._news.get()
            if isinstance(news, LocalKVError):
                raise news
            if isinstance(news, Progress) and "facts" in fields:
                return news.value
            if isinstance(news, Refused | Told) and 0 < news.id < self._asked:
                continue  # an answer that nobody wanted goes on
            if isinstance(news, Refused):
                raise named_error(news.kind, news.message, news.hint)
            for field in fields:
                if (value := getattr(news, field, None)) is not None:
                    return value
            self._call(self._break_off, f"{news!r:.80} is not the answer to the request")
