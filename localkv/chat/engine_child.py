"""The child of `EngineProcess`: `python -m localkv.chat.engine_child`, lines of JSON in and out.

It ends when its stdin does, so it never outlives its parent, however that ended.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import BinaryIO

from localkv.chat.engine import ChatEngine, EngineOptions
from localkv.chat.local_engine import LocalEngine
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
    failure,
)
from localkv.errors import LocalKVError
from localkv.system.bus_errors import end_cleanly
from localkv.system.limits import exhausted


def serve(source: BinaryIO, out: BinaryIO) -> None:
    """Answer requests until `source` ends; then the process ends, in the middle of any work."""
    answers: SimpleQueue[Iterator[object]] = SimpleQueue()
    options = decode(source.readline())
    if not isinstance(options, EngineOptions):
        raise ValueError("the first line must name the model to load")
    engine: ChatEngine = LocalEngine(options)

    def listen() -> None:
        try:
            for line in source:
                request = decode(line)
                if isinstance(request, Cancel):
                    engine.cancel()
                elif isinstance(request, AuditAnswer):
                    answers.put(engine.audit())  # begun here, too
                elif isinstance(request, CountTokens):
                    answers.put(_counted(partial(engine.count_tokens, request)))
                elif isinstance(request, SaveState):
                    answers.put(_counted(partial(engine.save_state, request.path)))
                elif isinstance(request, LoadState):
                    answers.put(_counted(partial(engine.load_state, request.path)))
                else:
                    answers.put(engine.answer(request))  # begun here: a Cancel comes after
        finally:  # even if a line is damaged: nobody would notice the end any more
            os._exit(0)

    def send(value: object) -> None:
        out.write(encode(value))
        out.flush()

    Thread(target=listen, daemon=True).start()
    try:
        send(engine.load(send))
    except Exception as error:
        send(_failure(error))
        return
    while True:
        try:
            for answer in answers.get():
                send(answer)
        except Exception as error:
            send(_failure(error))


def _failure(error: Exception) -> Failure:
    """The error for the user. A bug of localkv ends the process instead."""
    known = error if isinstance(error, LocalKVError) else exhausted(error)
    if known is None:
        raise error
    return failure(known)


def _counted(count: Callable[[], int]) -> Iterator[TokenCount]:
    yield TokenCount(count())


def main() -> None:
    """Keep stdout for the protocol: libraries' prints go to stderr."""
    end_cleanly()
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    serve(sys.stdin.buffer, out)


if __name__ == "__main__":
    main()
