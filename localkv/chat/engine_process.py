"""`EngineProcess`: a `ChatEngine` whose model lives in a child process.

So the one who draws the screen never waits for Python's lock, loads no model, and survives
whatever happens to the engine.
"""

from __future__ import annotations

import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from threading import Lock
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
    PromptProgress,
    TextDelta,
)
from localkv.chat.wire import (
    AuditAnswer,
    Cancel,
    CountTokens,
    Failure,
    LoadState,
    SaveState,
    TokenCount,
    decode,
    encode,
)
from localkv.errors import LocalKVError, UsageError
from localkv.system.limits import exhausted
from localkv.system.python_child import child_command, start_child

STOP_SECONDS = 2.0
"""How long `close` lets the child end by itself."""
LONGEST_LINE = 16 << 20
"""Bytes of a message from the child, which sends a few tokens at a time."""


class EngineProcess:
    """Starts its process when it has to load.

    Args:
        options: the model to load, and how.
        command: the program that serves, if it is another; for tests.
    """

    def __init__(
        self,
        options: EngineOptions,
        *,
        command: Sequence[str] = (),
    ) -> None:
        self.options = options
        self.command = list(command) or child_command("localkv.chat.engine_child")
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False
        self._writing = Lock()
        self._asking = Lock()

    @property
    def pid(self) -> int | None:
        """The child's process id; None before it is started."""
        return None if self._process is None else self._process.pid

    def load(self, on_progress: Callable[[LoadProgress], None]) -> EngineFacts:
        with self._asking:
            if self._closed or self._process is not None:
                raise EngineStoppedError("this engine was used before; start a new one")
            self._process = self._started()
            if self._closed:  # meanwhile
                self._process.kill()
            self._send(self.options)
            while isinstance(news := self._receive(LoadProgress, EngineFacts), LoadProgress):
                on_progress(news)
            facts: EngineFacts = news
            return facts

    def _started(self) -> subprocess.Popen[bytes]:
        try:
            # a file, since nobody would empty a pipe, and a full one would block the child
            self._stderr = tempfile.TemporaryFile()  # noqa: SIM115
            return start_child(self.command, stderr=self._stderr)
        except OSError as error:
            reason = exhausted(error) or error.strerror or error
            raise EngineStoppedError(f"the engine can't be started: {reason}") from error

    def count_tokens(self, request: ChatRequest) -> int:
        return self._counted(CountTokens(**vars(request)))

    def save_state(self, path: str) -> int:
        return self._counted(SaveState(path))

    def load_state(self, path: str) -> int:
        return self._counted(LoadState(path))

    def _counted(self, request: object) -> int:
        with self._asking:
            self._send(request)
            count: TokenCount = self._receive(TokenCount)
            return count.n_tokens

    def answer(self, request: ChatRequest) -> Iterator[AnswerNews]:
        with self._asking:
            self._send(request)
            news = None
            while not isinstance(news, Finished):
                news = self._receive(PromptProgress, TextDelta, Finished)
                try:
                    yield news
                except GeneratorExit:
                    if not isinstance(news, Finished):
                        self._abandon()
                    raise

    def audit(self) -> Iterator[Audited]:
        with self._asking:
            self._send(AuditAnswer())
            yield self._receive(Audited)

    def _abandon(self) -> None:
        """Let the answer end that nobody listens to any more."""
        with suppress(LocalKVError):
            self.cancel()
            while not isinstance(self._receive(PromptProgress, TextDelta, Finished), Finished):
                pass

    def cancel(self) -> None:
        with suppress(EngineStoppedError):
            self._send(Cancel())

    def close(self) -> None:
        self._closed = True
        process = self._process
        if process is None:
            return
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(OSError):
            process.stdin.close()  # which ends it
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if self._asking.acquire(timeout=STOP_SECONDS):  # waiting callers have seen the end by now
            process.stdout.close()
            self._stderr.close()
            self._asking.release()

    def _send(self, value: object) -> None:
        if self._process is None or self._closed:
            raise EngineStoppedError("the engine is not running")
        assert self._process.stdin is not None
        try:
            with self._writing:
                self._process.stdin.write(encode(value))
                self._process.stdin.flush()
        except (OSError, ValueError):
            raise self._stopped() from None

    def _receive(self, *expected: type) -> Any:
        """The next line's value; an error that it holds is raised."""
        assert self._process is not None
        assert self._process.stdout is not None
        line = self._process.stdout.readline(LONGEST_LINE)
        if not line.endswith(b"\n") and len(line) < LONGEST_LINE:
            raise self._stopped()
        try:
            news = decode(line)
            if not isinstance(news, (Failure, *expected)):
                raise ValueError(f"{type(news).__name__} is not the answer to the request")
        except (ValueError, UsageError) as error:
            # the rest can't be understood either
            self._process.kill()
            self._process.wait()
            raise EngineStoppedError(
                "the engine was stopped: it sent something that is not a message", str(error)[:200]
            ) from None
        if isinstance(news, Failure):
            raise news.error()
        return news

    def _stopped(self) -> EngineStoppedError:
        """Why the child is gone, with the last it had to say."""
        assert self._process is not None
        if self._closed:
            return EngineStoppedError("the engine was stopped")
        try:
            code = self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        how = f"exit code {code}"
        if code < 0:
            with suppress(ValueError):
                how = signal.Signals(-code).name
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()
        return EngineStoppedError(
            f"the engine stopped ({how})", lines[-1].removeprefix("error: ") if lines else None
        )
