"""`localkv serve` as its users start it, for tests."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Event, Thread
from types import MappingProxyType
from typing import Any

from support.paths import MODELS

START_SECONDS = 120.0
SHIPPED_MODEL = MODELS / "tales-4M-Q8_0.gguf"


class RunningServer:
    """A server in a process of its own, on a port of its own.

    Args:
        arguments: of `localkv serve`, instead of those for the shipped model.
        model: the one that it serves; None if the arguments name all.
        program: what Python runs instead of localkv.
        limits: most of what the system gives it, by `resource.RLIMIT_*`.

    Attributes:
        url: where it listens.
        context: whose certificates are trusted, for TLS.
    """

    context: ssl.SSLContext | None = None

    def __init__(
        self,
        *arguments: str,
        model: Path | None = SHIPPED_MODEL,
        program: Sequence[str] = ("-m", "localkv"),
        env: dict[str, str] | None = None,
        limits: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        named = [] if model is None else ["-m", str(model)]
        command = [sys.executable, "-X", "faulthandler", *program, "serve", *named, "--port", "0"]

        def limit() -> None:
            for what, most in limits.items():
                resource.setrlimit(what, (most, most))

        self.process = subprocess.Popen(
            [*command, "-t", "1", "-np", "4", *arguments],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **(env or {})},
            preexec_fn=limit if limits else None,
        )
        self.lines = list[str]()
        self._listens = Event()
        self._reading = Thread(target=self._read, daemon=True)  # a full pipe would stop the server
        self._reading.start()
        self._listens.wait(START_SECONDS)
        match = re.search(r"listening on (https?://[^\s;]+)", "".join(self.lines))
        if match is None:
            self.process.kill()
            raise RuntimeError("".join(self.lines))
        self.url = match[1]

    def _read(self) -> None:
        """Take what it says as it comes."""
        assert self.process.stderr is not None
        with self.process.stderr as lines:
            for line in lines:
                self.lines.append(line)
                if "listening on http" in line:
                    self._listens.set()
        self._listens.set()

    def wait(self) -> RunningServer:
        """Until the model is loaded."""
        end = time.monotonic() + START_SECONDS
        while self.get("/health")[0] != 200:
            if time.monotonic() > end or self.process.poll() is not None:
                raise RuntimeError("the server does not load its model")
            time.sleep(0.05)
        return self

    def get(self, path: str, **headers: str) -> tuple[int, Any]:
        """Status and JSON, or text, of a path."""
        return self._answered(urllib.request.Request(self.url + path, headers=headers))

    def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        """Status and answer of a request with a JSON body."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"content-type": "application/json", **headers}
        return self._answered(urllib.request.Request(self.url + path, data, headers))

    def _answered(self, request: urllib.request.Request) -> tuple[int, Any]:
        try:
            with urllib.request.urlopen(
                request, timeout=START_SECONDS, context=self.context
            ) as answer:
                status, text = answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            status, text = error.code, error.read().decode()
        try:
            return status, json.loads(text)
        except json.JSONDecodeError:
            return status, text

    def stop(self) -> int:
        """End it as the system does; its exit code."""
        self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(40)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        self._reading.join()
        if code < 0:  # a signal ended it: pytest shows where it was
            sys.stderr.writelines(self.lines)
        return code
