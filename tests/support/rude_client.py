"""A client that breaks off, for tests."""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from support.server import RunningServer


def asked(server: RunningServer, body: dict[str, Any]) -> socket.socket:
    """A connection on which a chat was asked for."""
    url = urlsplit(server.url)
    data = json.dumps(body).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {url.netloc}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    sock = socket.create_connection((url.hostname, url.port), 30)
    sock.sendall(head.encode() + data)
    return sock


def reset(sock: socket.socket) -> None:
    """Close a connection with RST."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def read_all(sock: socket.socket) -> bytes:
    """What comes until the end of a chunked answer, or of the connection."""
    data = b""
    while not data.endswith(b"0\r\n\r\n") and (more := sock.recv(1 << 16)):
        data += more
    sock.close()
    return data


def read_until(sock: socket.socket, wanted: bytes) -> bytes:
    """What comes until something is there."""
    data = b""
    while wanted not in data:
        more = sock.recv(1 << 16)
        assert more, data
        data += more
    return data


def until(holds: Callable[[], bool], seconds: float = 20.0) -> None:
    """Wait for a condition."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.01)


def at_work(server: RunningServer) -> tuple[int, int, int]:
    """Requests that run and that wait, and pages of those that run."""
    status, cache = server.get("/localkv/cache")
    assert status == 200, cache
    requests = cache["requests"]
    return requests["running"], requests["waiting"], cache["pages"]["running"]


def children(server: RunningServer) -> list[int]:
    """The processes that it has started, by any of its threads."""
    tasks = Path(f"/proc/{server.process.pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


def engine_pid(server: RunningServer) -> int:
    """The process of its engine."""
    for child in children(server):
        if b"engine_process" in Path(f"/proc/{child}/cmdline").read_bytes():
            return child
    raise AssertionError("there is no engine")
