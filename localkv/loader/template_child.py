"""The child of `template_process`: `python -m localkv.loader.template_child`, which renders.

A template can ask for any time and memory, in one step of C code that no check in Python can
interrupt: `'a' * 10**10`, or comparing two lists that each hold the next one twice, sixty deep. So
its process may have `MAX_MEMORY` and no more, and its parent ends it when time is up.

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
from contextlib import suppress
from functools import lru_cache
from typing import Any, BinaryIO

from localkv.errors import ChatTemplateError
from localkv.loader.template_program import TemplateProgram

MAX_MEMORY = 1 << 30
"""Bytes of address space: 40 MiB are Python and Jinja."""

ALARM_SECONDS = 10
"""When an answer is given up that the parent should have stopped long before."""

READY = b"\n"
LENGTH = struct.Struct(">Q")
OUT_OF_MEMORY = b'{"out_of_memory":true}'


def serve(source: BinaryIO, out: BinaryIO) -> None:
    """Answer requests until `source` ends."""
    program = lru_cache(maxsize=4)(TemplateProgram)
    out.write(READY)
    out.flush()
    while head := source.read(LENGTH.size):
        request = marshal.loads(source.read(*LENGTH.unpack(head)))
        signal.alarm(ALARM_SECONDS)
        try:
            answer = json.dumps(_answer(program, **request)).encode()
        except MemoryError:
            answer = OUT_OF_MEMORY
        signal.alarm(0)
        out.write(LENGTH.pack(len(answer)) + answer)
        out.flush()


def _answer(
    program: Any, template: tuple[str, str, str], variables: dict[str, Any], max_chars: int
) -> dict[str, Any]:
    try:
        return {"segments": program(*template).render(variables, max_chars)}
    except ChatTemplateError as error:
        return {"error": error.message}


def limit_memory() -> None:
    """Bound this process's memory, if the system can, and let it leave no core file."""
    import resource

    for what, most in ((resource.RLIMIT_AS, MAX_MEMORY), (resource.RLIMIT_CORE, 0)):
        _, hard = resource.getrlimit(what)
        if hard == resource.RLIM_INFINITY or most < hard:
            with suppress(ValueError, OSError):  # macOS knows the limit, and accepts none
                resource.setrlimit(what, (most, most))


def main() -> None:
    """Keep stdout for answers: nothing else may be printed there."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    import jinja2.ext
    import jinja2.sandbox  # noqa: F401  # before READY: importing is no template's time

    limit_memory()
    serve(sys.stdin.buffer, out)


if __name__ == "__main__":
    main()
