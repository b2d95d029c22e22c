"""The engine's process: `python -m localkv.engine_process.child`, messages in and out.

One thread runs the model; another reads what the client sends. The process ends when its input
does, in the middle of any work, so it does not outlive its client, however that ended. Only what is
still to be written to a prompt cache on the disk takes some seconds more.
"""

from __future__ import annotations

import os
import sys
from threading import Thread
from typing import BinaryIO, NoReturn

from localkv.engine_process.conversation import ConversationServer, known_error
from localkv.engine_process.wire import Failed, Message, decode_load, framed, read_message
from localkv.system.bus_errors import end_cleanly


def serve(source: BinaryIO, out: BinaryIO) -> int:
    """Serve until `source` ends; the process's exit code, if the model can't be loaded."""

    def send(message: Message) -> None:
        out.write(framed(message))
        out.flush()

    body = read_message(source)
    if body is None:
        raise ValueError("the first message must name the model to load")
    load = decode_load(body)
    if load.converses:
        server: ConversationServer | TextServer = ConversationServer(load.options, send)
    else:
        from localkv.engine_process.text_server import TextServer  # imports the libraries at once

        server = TextServer(load.options, send)

    def listen() -> None:
        try:
            while (body := read_message(source)) is not None:
                server.take(server.decode(body))
        finally:  # even if a message is damaged: nobody would notice the end any more
            server.end()

    Thread(target=listen, daemon=True).start()
    try:
        server.load()
    except Exception as error:
        known = known_error(error)
        send(Failed(known.message, known.hint, known.exit_code))
        return known.exit_code
    server.run()
    return 0


def main() -> NoReturn:
    """Keep stdout for the protocol: libraries' prints go to stderr."""
    end_cleanly()
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    code = serve(sys.stdin.buffer, out)
    sys.stderr.flush()
    os._exit(code)  # Python would wait a second for the thread that reads


if __name__ == "__main__":
    main()
