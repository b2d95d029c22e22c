"""What the clients of `soak.py` ask for, and how they break off."""

from __future__ import annotations

import http.client
import json
import random
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from threading import Lock, Thread
from typing import Any

WORDS = ["dog", "cat", "owl", "boat", "tree", "king", "cake", "rain", "door", "star"]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
ANSWER_SECONDS = 500.0
"""How long an answer may take before it is a problem."""


@dataclass
class Counts:
    """What has happened so far.

    Attributes:
        answers: that came whole.
        broken_off: by the client.
        refused: because the queue was full, with status 429.
        failed: because the engine was gone, with an error that says so.
        repeated: answers that were asked for again, alone.
    """

    answers: int = 0
    broken_off: int = 0
    refused: int = 0
    failed: int = 0
    repeated: int = 0


@dataclass
class Findings:
    """Counts and problems, for all threads.

    Attributes:
        answers: of this round, each with what was asked for.
    """

    counts: Counts = field(default_factory=Counts)
    problems: list[str] = field(default_factory=list)
    answers: list[tuple[dict[str, Any], str]] = field(default_factory=list)
    lock: Lock = field(default_factory=Lock)

    def problem(self, line: str) -> None:
        """Something is not as it must be; it is said at once."""
        with self.lock:
            self.problems.append(line)
        print(f"problem: {line}", flush=True)

    def count(self, name: str) -> None:
        """One more of something."""
        with self.lock:
            setattr(self.counts, name, getattr(self.counts, name) + 1)

    def answered(self, body: dict[str, Any], text: str) -> None:
        """An answer came whole."""
        with self.lock:
            self.counts.answers += 1
            self.answers.append((body, text))


class Client:
    """Asks a server on this machine.

    Args:
        port: where it listens.
        findings: where it says what happened.
        engine_may_die: answers may fail because the engine is gone.
    """

    def __init__(self, port: int, findings: Findings, *, engine_may_die: bool = False) -> None:
        self.port, self.findings, self.engine_may_die = port, findings, engine_may_die

    def ask_until(self, end: float, draw: random.Random) -> None:
        """Ask, one request after the other, until `time.monotonic()` is `end`."""
        while time.monotonic() < end:
            body = body_of(draw)
            act = draw.choices([self._ask, self._break_off, self._read_slowly, self._save], ACTS)[0]
            try:
                act(body, draw)
            except (OSError, http.client.HTTPException) as error:
                if not self.engine_may_die:
                    self.findings.problem(f"{type(error).__name__}: {error}")

    def answer(self, body: dict[str, Any], path: str = "/completion") -> tuple[int, str]:
        """Status and text of a request; of an error, all of the answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=ANSWER_SECONDS)
        try:
            connection.request("POST", path, json.dumps(body))
            response = connection.getresponse()
            data = response.read().decode()
        finally:
            connection.close()
        is_text = response.status == 200 and path == "/completion"
        return response.status, json.loads(data)["content"] if is_text else data

    def get(self, path: str) -> tuple[int, str]:
        """Status and body of a path."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read().decode()
        finally:
            connection.close()

    def _ask(self, body: dict[str, Any], draw: random.Random) -> None:
        status, text = self.answer(body)
        if status == 200:
            self.findings.answered(body, text)
        elif status == 429:
            self.findings.count("refused")
        elif status == 503 and self.engine_may_die:
            self.findings.count("failed")
            time.sleep(0.1)
        else:
            self.findings.problem(f"status {status}: {text[:200]}")

    def _break_off(self, body: dict[str, Any], draw: random.Random) -> None:
        """Close the connection at a random moment, some of them within the request."""
        whole = self._request({**body, "stream": draw.random() < 0.7})
        with self._connected() as sock:
            sock.sendall(whole[: draw.randrange(len(whole))] if draw.random() < 0.1 else whole)
            time.sleep(draw.choice([0, 0.001, 0.01, 0.05, 0.2]))
            _reset(sock)
        self.findings.count("broken_off")

    def _read_slowly(self, body: dict[str, Any], draw: random.Random) -> None:
        """Read some bytes of a stream, one by one, and go."""
        with self._connected() as sock:
            sock.settimeout(ANSWER_SECONDS)
            sock.sendall(self._request({**body, "stream": True}))
            for _ in range(draw.randrange(100)):
                if not sock.recv(1):
                    break
                time.sleep(0.01)
            _reset(sock)
        self.findings.count("broken_off")

    def _save(self, body: dict[str, Any], draw: random.Random) -> None:
        """Save the text that had a place last, or take a saved one back; there may be none."""
        action, place = draw.choice(["save", "restore"]), draw.randrange(8)
        name = {"filename": f"{draw.randrange(4)}.state"}
        status, text = self.answer(name, f"/slots/{place}?action={action}")
        if status not in (200, 400) and not (status == 503 and self.engine_may_die):
            self.findings.problem(f"{action}: status {status}: {text[:200]}")

    def _connected(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), 60)

    def _request(self, body: dict[str, Any]) -> bytes:
        data = json.dumps(body).encode()
        head = f"POST /completion HTTP/1.1\r\nHost: 127.0.0.1:{self.port}\r\n"
        return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


ACTS = (0.66, 0.26, 0.04, 0.04)
"""How often each of the things is done that a client does."""


def run_clients(client: Client, n_clients: int, seconds: float, seed: int) -> None:
    """Let many ask for some time."""
    end = time.monotonic() + seconds
    threads = [
        Thread(target=client.ask_until, args=(end, random.Random(1000 * seed + number)))
        for number in range(n_clients)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def repeat_alone(client: Client, answers: Sequence[tuple[dict[str, Any], str]], end: float) -> None:
    """Ask for answers again, one after the other, until `time.monotonic()` is `end`."""
    for body, text in answers:
        if time.monotonic() > end:
            return
        status, again = client.answer(body)
        if (status, again) != (200, text):
            client.findings.problem(
                f"not the same alone, status {status}: {json.dumps(body)[:300]}\n"
                f"  among others: {text[-80:]!r}\n  alone: {again[-80:]!r}"
            )
        client.findings.count("repeated")


def body_of(draw: random.Random) -> dict[str, Any]:
    """A random request; many begin alike, and some answers keep to a schema."""
    begins = f"Once upon a time there was a {draw.choice(WORDS[:3])}. " * draw.choice([1, 8, 30])
    body = {
        "prompt": begins + " ".join(draw.choices(WORDS, k=draw.randrange(20))),
        "n_predict": draw.choice([1, 5, 20, 20, 80, 80, 200, 600]),
        "temperature": draw.choice([0, 0.8]),
        "seed": draw.randrange(1 << 30),
    }
    return {**body, "json_schema": SCHEMA} if draw.random() < 0.1 else {**body, "ignore_eos": True}


def _reset(sock: socket.socket) -> None:
    """Let closing a connection be a reset."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
