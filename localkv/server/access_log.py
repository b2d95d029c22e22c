"""A line for each request, as JSON: when, which, how it ended, how long it took, how many tokens.

It never has a key, a part of a prompt or of an answer; a path is cut before its query.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from logging.handlers import WatchedFileHandler

from localkv.errors import UsageError, printable
from localkv.server.event_stream import to_json
from localkv.server.request_record import RequestRecord

STDERR = "-"


class AccessLog:
    """Where the lines go.

    If the file was moved away, a new one is begun, as logrotate needs it. If it can't be written,
    the first error is told, and requests go on.

    Args:
        path: of the file; "-" for stderr.
        say: tells the user of a problem.

    Raises:
        UsageError: it can't be written.
    """

    def __init__(self, path: str, say: Callable[[str], None]) -> None:
        self._say, self._path, self._has_failed = say, path, False
        try:
            self._handler: logging.StreamHandler = (  # type: ignore[type-arg]
                logging.StreamHandler(sys.stderr) if path == STDERR else WatchedFileHandler(path)
            )
        except OSError as error:
            raise UsageError(f"--log-file {printable(path)}: {error.strerror}") from error
        self._handler.handleError = self._failed  # type: ignore[assignment,method-assign]

    def write(self, record: RequestRecord) -> None:
        """Add the line of a request."""
        fields: dict[str, object] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "id": record.id,
            "method": record.method,
            "path": record.path[:200],
            "status": record.status,
            "ms": round(1e3 * record.seconds, 1),
        }
        if record.key:
            fields["key"] = record.key
        if record.n_prompt:
            fields["prompt_tokens"] = record.n_prompt
            fields["cached_tokens"] = record.n_cached
            fields["tokens"] = record.n_generated
        if record.ended:
            fields["ended"] = record.ended
        line = to_json(fields).decode()
        try:
            self._handler.emit(logging.LogRecord("", 0, "", 0, "%s", (line,), None))
        except OSError:  # the file was moved, and its place can't be opened
            self._failed(None)

    def close(self) -> None:
        """No line follows."""
        with suppress(OSError):
            self._handler.close()

    def _failed(self, _: object) -> None:
        if not self._has_failed:
            self._has_failed = True
            error = sys.exc_info()[1]
            self._say(f"warning: --log-file {printable(self._path)}: {error}; lines are lost")
