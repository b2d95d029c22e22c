"""What is noted of a request while it is answered, for the log and the metrics."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field

_GIVEN_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")


@dataclass
class RequestRecord:
    """One request; nothing here tells what it is about.

    Attributes:
        id: the client's, or one of ours.
        address: the client's.
        key: the number of its API key; 0 for none.
        n_body: bytes of its body.
        n_kept: bytes of memory that it needs, about.
        n_prompt, n_cached, n_generated: tokens of all its texts.
        ended: why texts of it ended before they were complete.
        warnings: one line for each field that has no effect on this model.
        at_end: called when nothing more is sent, whatever the reason; ends what is still open.
        keep: is told of bytes that the request needs, and of fewer when they are free again; raises
            RequestError where there is no room.
    """

    id: str
    method: str
    path: str
    address: str = ""
    key: int = 0
    n_body: int = 0
    n_kept: int = 0
    status: int = 0
    n_prompt: int = 0
    n_cached: int = 0
    n_generated: int = 0
    ended: str = ""
    warnings: tuple[str, ...] = ()
    at_end: list[Callable[[], None]] = field(default_factory=list)
    keep: Callable[[int], None] = lambda n_bytes: None
    started: float = field(default_factory=time.perf_counter)

    @property
    def client(self) -> str:
        """Who asks: a key, or an address."""
        return f"key {self.key}" if self.key else self.address

    @property
    def seconds(self) -> float:
        """Since it came."""
        return time.perf_counter() - self.started


current: ContextVar[RequestRecord | None] = ContextVar("current", default=None)
"""The request that a task answers."""


def warn(*lines: str) -> None:
    """Note what has no effect in the request, for the header and the log."""
    if (record := current.get()) is not None:
        record.warnings = tuple(dict.fromkeys((*record.warnings, *lines)))


def request_id(given: str) -> str:
    """A client's id of a request if it is one, else one of ours."""
    return given if _GIVEN_ID.fullmatch(given) else secrets.token_hex(8)
