"""Hugging Face on loopback: the requests that huggingface_hub makes of it, and its bad days."""

from __future__ import annotations

import hashlib
import json
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "c0ffee" + "0" * 34

Answer = Iterable[bytes]
"""All of an answer, status line included, in pieces; the connection is cut after the last."""


@dataclass
class Request:
    """One request that arrived, and how many bytes of a file were sent for it."""

    method: str
    path: str
    range: str | None
    authorization: str | None
    host: str
    sent: int = 0


@dataclass
class FakeHub:
    """A hub, its repositories and what goes wrong.

    Attributes:
        repos: "org/repo" -> path -> bytes.
        commit: of all repositories.
        requests: all that arrived, in order.
        cuts: of each of the next downloads, the bytes after which the connection is cut.
        stall_after: bytes after which a download stops and `stalled` is set, until `go_on` is.
        failures: the start of a path -> (status, headers) instead of an answer.
        wrong: paths whose bytes are others than announced.
        ranges: whether ranges are served.
        redirects: whether files are served by another host.
        announced: repository path -> what the listing says instead of it.
        lie: takes "listing" or "file" and the path asked for, and answers, or leaves it (None).
        lie_bytes: what was sent of such answers.
        pace: seconds between pieces of 16 KiB of a file.
        waiting: if set, listings wait until `go_on` is, and `stalled` says that one does.
    """

    repos: dict[str, dict[str, bytes]] = field(default_factory=dict)
    commit: str = COMMIT
    requests: list[Request] = field(default_factory=list)
    cuts: list[int] = field(default_factory=list)
    stall_after: int | None = None
    stalled: Event = field(default_factory=Event)
    go_on: Event = field(default_factory=Event)
    failures: dict[str, tuple[int, dict[str, str]]] = field(default_factory=dict)
    wrong: set[str] = field(default_factory=set)
    ranges: bool = True
    redirects: bool = False
    announced: dict[str, str] = field(default_factory=dict)
    lie: Callable[[str, str], Answer | None] | None = None
    lie_bytes: int = 0
    pace: float = 0.0
    waiting: bool = False
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def downloads(self) -> list[Request]:
        """The requests for files, those that were redirected once only."""
        prefix = "/cdn/" if self.redirects else "/"
        return [
            request
            for request in self.requests
            if "/resolve/" in request.path and request.path.startswith(prefix)
        ]

    @contextmanager
    def running(self) -> Iterator[FakeHub]:
        handler = type("Handler", (_Handler,), {"hub": self})
        server = _Server(("127.0.0.1", 0), handler)
        self.port = server.server_address[1]
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield self
        finally:
            self.go_on.set()
            server.shutdown()
            thread.join()
            server.server_close()

    def listing(self, repo: str) -> dict[str, object]:
        """What the hub says of a repository; files of less than 100 bytes are not in LFS."""
        siblings = []
        for path, data in self.repos[repo].items():
            git = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
            lfs = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 9}
            sibling = {
                "rfilename": self.announced.get(path, path),
                "size": len(data),
                "blobId": git,
            }
            siblings.append(sibling if len(data) < 100 else {**sibling, "lfs": lfs})
        return {"id": repo, "sha": self.commit, "siblings": siblings, "tags": [], "private": False}


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """That a client has gone is no news: some tests kill it."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        hub, url = self.hub, urlsplit(self.path)
        headers = self.headers
        request = Request(
            "GET", url.path, headers["Range"], headers["Authorization"], headers["Host"]
        )
        hub.requests.append(request)
        path = unquote(url.path)
        kind = "listing" if path.startswith("/api/") else "file"
        if hub.lie is not None and (pieces := hub.lie(kind, self.path)) is not None:
            return self._lie(pieces)
        if hub.waiting and kind == "listing":
            hub.stalled.set()
            hub.go_on.wait(60)
        for prefix, (status, more) in hub.failures.items():
            if path.startswith(prefix):
                return self._answer(status, b"", more)
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/revision/([^/]+)", path):
            if match[1] not in hub.repos:
                return self._answer(404, b"", {"X-Error-Code": "RepoNotFound"})
            if match[2] not in ("main", hub.commit):
                return self._answer(404, b"", {"X-Error-Code": "RevisionNotFound"})
            return self._answer(200, json.dumps(hub.listing(match[1])).encode())
        if match := re.fullmatch(r"(/cdn)?/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            data = hub.repos.get(match[2], {}).get(match[4])
            if data is None or match[3] not in ("main", hub.commit):
                return self._answer(404, b"", {"X-Error-Code": "EntryNotFound"})
            if hub.redirects and not match[1]:
                target = f"http://localhost:{hub.port}/cdn{url.path}"
                return self._answer(302, b"", {"Location": target})
            return self._send_file(request, match[4], data)
        return self._answer(404, b"")

    def do_HEAD(self) -> None:
        """What huggingface_hub's own download asks of a file first."""
        match = re.fullmatch(
            r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)", unquote(urlsplit(self.path).path)
        )
        data = self.hub.repos.get(match[1], {}).get(match[2]) if match else None
        if data is None:
            self._answer(404, b"")
            return
        self.send_response(200)
        self.send_header("X-Repo-Commit", self.hub.commit)
        self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()

    def _answer(self, status: int, body: bytes, more: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(more or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def _lie(self, pieces: Answer) -> None:
        self.close_connection = True
        try:
            for piece in pieces:
                self.wfile.write(piece)
                self.wfile.flush()
                self.hub.lie_bytes += len(piece)
        except OSError:  # whoever asked has enough
            pass

    def _send_file(self, request: Request, path: str, data: bytes) -> None:
        hub = self.hub
        if path in hub.wrong:
            data = bytes(len(data))
        start, end = 0, len(data)
        if hub.ranges and request.range is not None:
            first, _, last = request.range.removeprefix("bytes=").partition("-")
            start, end = int(first), min(end, int(last) + 1) if last else end
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(data)}")
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(end - start))
        self.end_headers()
        announced = end
        if hub.cuts:
            end = min(end, start + hub.cuts.pop(0))
        elif hub.stall_after is not None:
            self._write(request, data[start : hub.stall_after])
            hub.stalled.set()
            hub.go_on.wait(60)
            start = hub.stall_after
        self._write(request, data[start:end])
        self.close_connection |= end < announced

    def _write(self, request: Request, data: bytes) -> None:
        request.sent += len(data)  # first: whoever has all of it may look at once
        pace, step = self.hub.pace, 1 << 14 if self.hub.pace else len(data) or 1
        try:
            for start in range(0, len(data), step):
                self.wfile.write(data[start : start + step])
                self.wfile.flush()
                time.sleep(pace)
        except OSError:  # whoever asked is gone
            self.close_connection = True
