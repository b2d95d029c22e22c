"""Turns of threads that share something, in the order in which they came.

A lock of `threading` would not do. It serves no order, and it knows nothing of `cancel`. It also
stays taken for good where Ctrl-C comes between taking it and the block that gives it back: an
exception may come between any two instructions of Python. Here a turn is a ticket at the head of a
queue, and all changes of the queue are single operations of a deque. The stack of a ticket's holder
tells when the holder has gone.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from threading import Event, Lock, get_ident
from types import FrameType
from typing import TYPE_CHECKING, Protocol, TypeVar

from localkv.errors import LocalKVError

if TYPE_CHECKING:
    from _thread import LockType

T = TypeVar("T")


class TurnUser(Protocol):
    """What has to be done around each piece of its work."""

    def begin_turn(self) -> None:
        """The turn has come."""
        ...

    def end_turn(self) -> None:
        """The work is done; not called where it broke off."""
        ...


LOOK_SECONDS = 0.02
"""How often who waits looks whether it is cancelled, or the thread before it has gone."""


class CancelledWaitError(Exception):
    """It was cancelled before its turn came; nothing was done."""


class _Ticket:
    """A place in the queue; `called` of one that waits is locked until somebody gives way to it."""

    __slots__ = ("called", "thread")

    def __init__(self) -> None:
        self.thread = get_ident()
        self.called: LockType | None = None


_users = list[int]()
"""The process that was the first to make `Turns`, here or in one that this is a fork of."""


def refuse_fork() -> None:
    """Refuse to run in a fork of a process that has loaded a model.

    A fork has neither our threads nor OpenMP's, and torch would wait for them.

    Raises:
        LocalKVError: this is a fork of a process that has loaded a model.
    """
    if not _users:
        _users.append(os.getpid())
    if _users[0] != os.getpid():
        raise LocalKVError(
            f"this process is a fork of one ({_users[0]}) that had loaded a model",
            hint="load models after forking, or start processes with 'spawn'",
        )


class Turns:
    """Lets one thread at a time do its work, first come, first served.

    Args:
        recover: called before the next work where some did not end: an exception, such as Ctrl-C,
            left it half done. It must do when it is itself begun more than once.

    Raises:
        LocalKVError: this is a fork of a process that has made some.
    """

    def __init__(self, recover: Callable[[], None] = lambda: None) -> None:
        self.recover = recover
        self._unfinished = False
        self._queue = deque[_Ticket]()
        refuse_fork()

    @property
    def are_taken(self) -> bool:
        """Whether somebody has a turn, or waits for one."""
        return bool(self._queue)

    @property
    def are_wanted(self) -> bool:
        """Whether others wait for the one whose turn it is."""
        return len(self._queue) > 1

    def run(
        self, work: Callable[[], T], cancel: Event | None = None, user: TurnUser | None = None
    ) -> T:
        """Do `work` when all who came before have done theirs.

        Args:
            cancel: ends the waiting.
            user: told when the work begins, and when it is done.

        Raises:
            CancelledWaitError: `cancel` was set while others were at work.
            LocalKVError: this very thread is at work already, so it would wait for itself; or this
                is a fork of the process.
        """
        refuse_fork()
        ticket = _Ticket()
        try:
            self._queue.append(ticket)
            if self._queue[0] is not ticket:
                self._wait(ticket, cancel)
            if self._unfinished:
                self.recover()
            self._unfinished = True
            if user is None:
                result = work()
            else:
                user.begin_turn()
                result = work()
                user.end_turn()
            self._unfinished = False
            return result
        finally:
            self._leave(ticket)

    def _wait(self, ticket: _Ticket, cancel: Event | None) -> None:
        for other in self._queue.copy():
            if other is not ticket and other.thread == ticket.thread:
                if is_on_stack(other.thread, "ticket", other):
                    raise LocalKVError(
                        "the model is at work in this thread already",
                        hint="do not use it in a signal handler or a callback that interrupts it",
                    )
                self._leave(other)
        called = Lock()
        called.acquire()
        ticket.called = called
        while (first := self._queue[0]) is not ticket:
            if cancel is not None and cancel.is_set():
                raise CancelledWaitError
            if called.acquire(timeout=LOOK_SECONDS):
                continue
            if not is_on_stack(first.thread, "ticket", first):
                self._leave(first)

    def _leave(self, ticket: _Ticket) -> None:
        queue = self._queue
        if queue and queue[0] is ticket:
            queue.popleft()
        else:
            with suppress(ValueError):  # somebody else found that it had gone
                queue.remove(ticket)
        if queue:
            with suppress(IndexError, AttributeError, RuntimeError):
                queue[0].called.release()  # type: ignore[union-attr]


def is_on_stack(thread: int, name: str, value: object) -> bool:
    """Whether a thread runs a function whose local variable `name` is `value` itself."""
    frame: FrameType | None = sys._current_frames().get(thread)
    while frame is not None:
        if name in frame.f_code.co_varnames and frame.f_locals.get(name) is value:
            return True
        frame = frame.f_back
    return False
