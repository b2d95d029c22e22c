"""Processes with limits of time and memory, which work on what strangers send.

A process is started for the first request and kept for the next ones. A process that ran out of
time or memory, ended or was interrupted is replaced.
"""

from __future__ import annotations

import atexit
import json
import marshal
import math
import os
import selectors
import signal
import subprocess
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

from localkv.errors import LocalKVError, byte_size
from localkv.system.limited_child import LENGTH, READY
from localkv.system.python_child import child_command, start_child

START_SECONDS = 60.0
"""How long the process may take to start, on a machine that does much else."""


MOST_IDLE = 2
"""Idle processes that are kept, so that two threads of a server get answers at the same time."""


@dataclass(frozen=True)
class Pace:
    """How urgent the work of a thread is.

    Attributes:
        seconds: the most that all of its requests together may take; None for each one's limit.
        nice: how far its processes give way when others want the CPU.
    """

    seconds: float | None = None
    nice: int = 0


class _Turn(NamedTuple):
    """The pace of a thread's work, and when its time is up."""

    pace: Pace
    deadline: float


_NO_TURN = _Turn(Pace(), math.inf)
_turn: ContextVar[_Turn] = ContextVar("_turn", default=_NO_TURN)


@contextmanager
def at_pace(pace: Pace) -> Iterator[None]:
    """Let requests of this thread be answered at a pace."""
    seconds = math.inf if pace.seconds is None else pace.seconds
    token = _turn.set(_Turn(pace, time.monotonic() + seconds))
    try:
        yield
    finally:
        _turn.reset(token)


class OverTimeError(LocalKVError):
    """Requests took longer than the pace of their thread allows; others may have more time."""


class ChildEndedError(LocalKVError):
    """A request ended the process.

    Args:
        signal: that ended it, or 0.
    """

    def __init__(self, message: str, hint: str | None = None, signal: int = 0) -> None:
        super().__init__(message, hint)
        self.signal = signal


class LimitedProcesses:
    """Processes that do one kind of work; threads that ask at the same time get one each.

    Args:
        module: run as the child (`limited_child`).
        does: a verb for its work, such as "renders".
        many: what it works on, in the plural, such as "chat templates".
        memory: bytes that a process may have.
        refused: makes the error about a request that takes too much.

    Attributes:
        idle: processes that wait for the next request, `MOST_IDLE` of each pace at most.
    """

    def __init__(
        self,
        module: str,
        *,
        does: str,
        many: str,
        memory: int,
        refused: Callable[[str], LocalKVError],
    ) -> None:
        self._module, self._does, self._many, self._memory = module, does, many, memory
        self._refused = refused
        self.idle = list[_Process]()
        _all.add(self)

    def ask(self, request: Any, what: str, seconds: float) -> dict[str, Any]:
        """The answer to a request.

        Args:
            request: of types that `marshal` knows.
            what: names it in errors, such as "the chat template".
            seconds: how long it may take.

        Raises:
            ValueError: it is nested too deeply.
            OverTimeError: it takes longer than this thread's pace allows.
            ChildEndedError: it ended the process.
            LocalKVError: it takes too much time or memory (`refused`), or no process can be
                started.
        """
        message, turn = marshal.dumps(request), _turn.get()
        process = self._taken(turn.pace.nice)
        try:
            answer = self._answer(process, message, what, seconds, turn)
        except ChildEndedError:
            if not process.has_answered:
                raise
            process = self._started(turn.pace.nice)  # an idle process may have ended
            answer = self._answer(process, message, what, seconds, turn)
        if "out_of_memory" in answer:
            process.end()
            raise self._refused(f"{what} takes more than {byte_size(self._memory)} of memory")
        self._give_back(process)
        return answer

    def _answer(
        self, process: _Process, message: bytes, what: str, seconds: float, turn: _Turn
    ) -> dict[str, Any]:
        left = turn.deadline - time.monotonic()
        try:
            data = process.answer(message, max(0.0, min(seconds, left)))
            answer: dict[str, Any] = json.loads(data)
        except TimeoutError:
            process.end()
            if left < seconds:
                raise OverTimeError(f"{what} takes more than {turn.pace.seconds:g} s") from None
            raise self._refused(f"{what} takes more than {seconds:g} s") from None
        except EOFError:
            how, number = process.end_of_it()
            text = f"{what} ended the process that {self._does} it ({how})"
            raise ChildEndedError(text, signal=number) from None
        except BaseException:  # at Ctrl-C, too: its answer would be taken for the next one's
            process.end()
            raise
        return answer

    def start_ahead(self) -> None:
        """Start a process now, so that the first request need not wait for it."""
        if not self.idle:
            self._give_back(self._started(0))

    def _taken(self, nice: int) -> _Process:
        while True:
            last = reversed(self.idle)
            found = next((one for one in last if one.nice == nice), None)
            if found is None:
                return self._started(nice)
            try:
                self.idle.remove(found)
            except ValueError:
                continue  # another thread was faster
            if found.is_alive:
                return found
            found.end()

    def _started(self, nice: int) -> _Process:
        does = f"the process that {self._does} {self._many}"
        try:
            return _Process(self._module, nice, does)
        except OSError as error:
            raise LocalKVError(
                f"{does} can't be started: {error.strerror}",
                hint="the limits on processes and memory (ulimit) may be too low",
            ) from error

    def _give_back(self, process: _Process) -> None:
        if sum(one.nice == process.nice for one in self.idle) >= MOST_IDLE:
            process.end()
        else:
            self.idle.append(process)

    def end_idle(self) -> None:
        """End the processes that wait."""
        while self.idle:
            self.idle.pop().end()

    def forget_idle(self) -> None:
        """Leave them to the process that this one was forked from."""
        while self.idle:
            self.idle.pop().forget()


class _Process:
    """A process that answers, one request at a time.

    Attributes:
        has_answered: a request before.
    """

    def __init__(self, module: str, nice: int, does: str) -> None:
        self._child = start_child(child_command(module), stderr=subprocess.DEVNULL)
        self._does, self.nice = does, nice
        if nice:
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, self._child.pid, nice)
        self._is_ready = self.has_answered = False

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def is_alive(self) -> bool:
        return self._child.poll() is None

    def answer(self, message: bytes, seconds: float) -> bytes:
        """The child's answer.

        Raises:
            TimeoutError: it takes too long.
            EOFError: the process ends.
        """
        assert self._child.stdin is not None
        if not self._is_ready:
            try:
                is_ready = self._read(len(READY), START_SECONDS) == READY
            except (TimeoutError, EOFError):
                is_ready = False
            if not is_ready:
                self.end()
                raise LocalKVError(f"{self._does} does not start")
            self._is_ready = True
        deadline = time.monotonic() + seconds
        try:
            self._child.stdin.write(LENGTH.pack(len(message)) + message)
            self._child.stdin.flush()
        except BrokenPipeError:
            raise EOFError from None
        (length,) = LENGTH.unpack(self._read(LENGTH.size, seconds))
        data = self._read(length, deadline - time.monotonic())
        self.has_answered = True
        return data

    def _read(self, n_bytes: int, seconds: float) -> bytes:
        """`n_bytes` of the child's output, if they come in time."""
        assert self._child.stdout is not None
        deadline = time.monotonic() + seconds
        data = bytearray()
        with selectors.DefaultSelector() as selector:
            selector.register(self._child.stdout, selectors.EVENT_READ)
            while len(data) < n_bytes:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError
                more = os.read(self._child.stdout.fileno(), min(n_bytes - len(data), 1 << 20))
                if not more:
                    raise EOFError
                data += more
        return bytes(data)

    def end_of_it(self) -> tuple[str, int]:
        """How it ended by itself: words, and the signal or 0."""
        with suppress(subprocess.TimeoutExpired):
            self._child.wait(1)
        self.end()
        code = self._child.returncode
        if code < 0:
            with suppress(ValueError):
                return signal.Signals(-code).name, -code
        return f"exit code {code}", 0

    def end(self) -> None:
        """End it at once."""
        self._child.kill()
        self._child.wait()
        self._close_pipes()

    def forget(self) -> None:
        """Leave it to the process that this one was forked from."""
        self._child.returncode = 0
        self._close_pipes()

    def _close_pipes(self) -> None:
        for pipe in (self._child.stdin, self._child.stdout):
            assert pipe is not None
            with suppress(OSError):
                pipe.close()


_all: weakref.WeakSet[LimitedProcesses] = weakref.WeakSet()


def _end_all() -> None:
    for one in list(_all):
        one.end_idle()


def _forget_all() -> None:
    for one in list(_all):
        one.forget_idle()


atexit.register(_end_all)
os.register_at_fork(after_in_child=_forget_all)
