"""Work on requests beside the event loop, and whose turn it is.

Each kind of work has threads of its own, so short work never waits for long work. Clients use the
threads in turn, so a client that asks for much waits for itself.
"""

from __future__ import annotations

import asyncio
import ctypes
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from localkv.errors import LocalKVError, byte_size
from localkv.server.failures import RequestError, as_request_error
from localkv.server.request_record import RequestRecord, current
from localkv.system.limited_process import OverTimeError, Pace, at_pace

SMALL, LARGE = 8 << 10, 128 << 10
"""Most bytes of a body that is read on the loop, and of one whose work counts as quick."""

QUICK_SECONDS = 0.25
"""What a template or a grammar may take before it begins again as long work."""

LONG_SECONDS = 10.0
"""What all templates and grammars of a request may take."""

NICE = 5
"""How nice processes are that do long work, as `os.nice` has it."""

MOST_BODIES, MOST_OF_CLIENT = 128 << 20, 64 << 20
"""Most bytes that the open requests of all clients take, and of one client: their bodies, and what
these are read into."""

TRIM_SECONDS = 1.0
"""Least time between two calls that give free memory back to the system."""

T = TypeVar("T")


@dataclass(eq=False, repr=False)
class _Job:
    """A call. It may hold a whole body, so nothing compares or shows it."""

    call: Callable[[], Any]
    done: asyncio.Future[Any]


class Pool:
    """Threads that clients use in turn.

    Args:
        n_threads: how many work at the same time.
        most_of_client: how many of them may work for one client.
        most_waiting: how many calls of one client may wait.
        pace: limits the processes that the calls use.
    """

    def __init__(
        self, n_threads: int, *, most_of_client: int, most_waiting: int, pace: Pace
    ) -> None:
        self._executor = ThreadPoolExecutor(n_threads, "localkv-work")
        self._n_free, self._pace = n_threads, pace
        self._most_of_client, self._most_waiting = most_of_client, most_waiting
        self._waiting = OrderedDict[str, deque[_Job]]()
        self._running = Counter[str]()

    async def run(self, client: str, call: Callable[[], T]) -> T:
        """What a call returns, once it is this client's turn.

        Raises:
            RequestError: too many calls of the client wait.
        """
        waiting = self._waiting.setdefault(client, deque())
        if len(waiting) >= self._most_waiting:
            raise RequestError(
                429,
                f"{len(waiting)} large requests of this client wait already",
                "ask again later",
                headers={"retry-after": "1"},
            )
        job = _Job(partial(copy_context().run, self._call, call), _future())
        waiting.append(job)
        self._begin()
        try:
            result: T = await job.done
            return result
        finally:
            if job in waiting:
                waiting.remove(job)

    def _call(self, call: Callable[[], T]) -> T:
        with at_pace(self._pace):
            return call()

    def _begin(self) -> None:
        for client in list(self._waiting):
            if not self._waiting[client]:
                del self._waiting[client]
            elif self._n_free and self._running[client] < self._most_of_client:
                job = self._waiting[client].popleft()
                self._waiting.move_to_end(client)
                self._n_free -= 1
                self._running[client] += 1
                loop = asyncio.get_running_loop()
                working = loop.run_in_executor(self._executor, job.call)
                working.add_done_callback(partial(self._ended, client, job.done))

    def _ended(self, client: str, done: asyncio.Future[Any], working: asyncio.Future[Any]) -> None:
        self._n_free += 1
        self._running[client] -= 1
        if not self._running[client]:
            del self._running[client]
        error = None if working.cancelled() else working.exception()
        if not done.done():
            if working.cancelled():
                done.cancel()
            elif error is not None:
                done.set_exception(error)
            else:
                done.set_result(working.result())
        self._begin()


class Work:
    """All work of a server that is not done on the event loop."""

    def __init__(self) -> None:
        self.quick = Pool(3, most_of_client=2, most_waiting=1024, pace=Pace(seconds=QUICK_SECONDS))
        self.long = Pool(2, most_of_client=1, most_waiting=32, pace=Pace(LONG_SECONDS, NICE))
        self.bodies = Bodies()
        self._trimmed = 0.0

    async def run(self, client: str, n_bytes: int, call: Callable[[], T]) -> T:
        """What a call returns.

        Args:
            client: who asked for it.
            n_bytes: the size of what it works on.

        Raises:
            RequestError: too many calls of the client wait, or it takes too long.
        """
        if n_bytes <= LARGE:
            with suppress(OverTimeError):
                return await self.quick.run(client, call)
        try:
            return await self.long.run(client, call)
        except OverTimeError as error:
            raise RequestError(400, error.message, "a smaller request would work") from None
        finally:
            self._trim()

    async def in_thread(self, function: Callable[..., T], *arguments: Any, **options: Any) -> T:
        """Call a function that takes long in a thread; it may be called twice.

        Raises:
            RequestError: the call fails, or too many calls of this client wait.
        """
        record, call = current.get(), partial(function, *arguments, **options)
        client, n_bytes = ("", 0) if record is None else (record.client, record.n_body)
        try:
            return await self.run(client, n_bytes, call)
        except LocalKVError as error:
            raise as_request_error(error) from error

    async def for_body(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function whose time grows with the body: in a thread, unless the body is small.

        Raises:
            RequestError: the call fails, or too many calls of this client wait.
        """
        record = current.get()
        if record is None or record.n_body <= SMALL:
            return function(*arguments)
        return await self.in_thread(function, *arguments)

    def keep(self, record: RequestRecord, n_bytes: int) -> None:
        """Count memory that a request takes until it is answered.

        Raises:
            RequestError: the client, or all clients, would take too much.
        """
        self.bodies.take(record.client, n_bytes)
        record.n_kept += n_bytes

    def give_back(self, record: RequestRecord) -> None:
        """Give back the memory of a request that is answered."""
        self.bodies.give_back(record.client, record.n_kept)

    def _trim(self) -> None:
        now = time.monotonic()
        if now - self._trimmed > TRIM_SECONDS:
            self._trimmed = now
            asyncio.get_running_loop().run_in_executor(None, give_back_memory)


class Bodies:
    """The bytes that open requests take, which are bounded."""

    def __init__(self) -> None:
        self._n_bytes = 0
        self._of_client = Counter[str]()

    def take(self, client: str, n_bytes: int) -> None:
        """Count bytes that a client takes.

        Raises:
            RequestError: it, or all clients, would take too many.
        """
        if self._of_client[client] + n_bytes > MOST_OF_CLIENT:
            raise _full(429, "this client", MOST_OF_CLIENT)
        if self._n_bytes + n_bytes > MOST_BODIES:
            raise _full(503, "all clients", MOST_BODIES)
        self._n_bytes += n_bytes
        self._of_client[client] += n_bytes

    def give_back(self, client: str, n_bytes: int) -> None:
        """Give back the bytes of a request that is answered."""
        self._n_bytes -= n_bytes
        self._of_client[client] -= n_bytes
        if not self._of_client[client]:
            del self._of_client[client]


def _full(status: int, whose: str, most: int) -> RequestError:
    return RequestError(
        status,
        f"the open requests of {whose} would take more than {byte_size(most)} of memory",
        "ask again later",
        headers={"retry-after": "1"},
    )


def _future() -> asyncio.Future[Any]:
    return asyncio.get_running_loop().create_future()


def give_back_memory() -> None:
    """Give free memory back to the system, if the C library can."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
