"""The child's side of `limited_process`: answers requests within a bound of memory.

Requests come on stdin and answers go to stdout, each after its length; `READY` precedes them. The
process ends when its stdin does. If the parent is gone before the answer, an alarm ends it.
"""

from __future__ import annotations

import json
import marshal
import os
import signal
import struct
import sys
from collections.abc import Callable
from contextlib import suppress
from threading import Thread, stack_size
from typing import Any, BinaryIO

ALARM_SECONDS = 10
"""Seconds after which an answer ends the process; the parent should have ended it long before."""

READY = b"\n"
LENGTH = struct.Struct(">Q")
OUT_OF_MEMORY = b'{"out_of_memory":true}'

Answer = Callable[[Any], dict[str, Any]]


def serve(answer: Answer, source: BinaryIO, out: BinaryIO) -> None:
    """Answer requests until `source` ends."""
    out.write(READY)
    out.flush()
    while head := source.read(LENGTH.size):
        request = marshal.loads(source.read(*LENGTH.unpack(head)))
        signal.alarm(ALARM_SECONDS)
        try:
            data = json.dumps(answer(request)).encode()
        except MemoryError:
            data = OUT_OF_MEMORY
        signal.alarm(0)
        out.write(LENGTH.pack(len(data)) + data)
        out.flush()


def limit_memory(most: int) -> None:
    """Bound this process's memory, if the system can, and forbid core files."""
    import resource

    for what, limit in ((resource.RLIMIT_AS, most), (resource.RLIMIT_CORE, 0)):
        _, hard = resource.getrlimit(what)
        if hard == resource.RLIM_INFINITY or limit < hard:
            with suppress(ValueError, OSError):  # macOS has this limit, but accepts no value
                resource.setrlimit(what, (limit, limit))


def run(answer: Answer, *, memory: int, stack: int | None = None) -> None:
    """Answer requests on stdin; what the answers print goes to stderr.

    Args:
        answer: answers one request; import what it needs before, or the first request pays.
        memory: bytes of address space.
        stack: bytes that calls may take; None for the system's default.
    """
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    limit_memory(memory)
    if stack is None:
        serve(answer, sys.stdin.buffer, out)
        return
    stack_size(stack)
    thread = Thread(target=serve, args=(answer, sys.stdin.buffer, out))
    thread.start()
    thread.join()
