"""Ask a server for hours, break off at random, and look whether it loses anything.

    python benchmarks/soak.py --minutes 60

Clients ask for texts of random lengths, many of which begin alike, in a cache that is too small for
all: requests wait, are preempted, and drop each other's texts. Some break off, by a reset of the
connection at a random moment. Then nothing may run, no page may be missing, a sample of the texts
must have the same bytes when they are asked for alone, and the processes' memory may have grown by
2 % since the end of the first tenth.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import re
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path
from threading import Lock, Thread
from typing import Any
from urllib.parse import urlsplit

MODEL = Path(__file__).parents[1] / "models" / "tales-4M-Q8_0.gguf"
MOST_GROWTH = 0.02
SAMPLE = 50
WORDS = ["dog", "cat", "owl", "boat", "tree", "king", "cake", "rain", "door", "star"]


class Soak:
    """A server, and clients that ask it.

    Args:
        url: of the server.
        seconds: how long they ask.
        seed: of what they ask.
    """

    def __init__(self, url: str, seconds: float, seed: int) -> None:
        self.address = urlsplit(url)
        self.end = time.monotonic() + seconds
        self.seed = seed
        self.lock = Lock()
        self.n_done = self.n_broken_off = self.n_refused = 0
        self.problems = list[str]()
        self.sample = list[tuple[dict[str, Any], str]]()

    def run(self, n_clients: int) -> None:
        """Ask until the time is over."""
        threads = [Thread(target=self._client, args=(n,)) for n in range(n_clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _client(self, number: int) -> None:
        draw = random.Random(1000 * self.seed + number)
        while time.monotonic() < self.end:
            body = body_of(draw)
            try:
                if draw.random() < 0.3:
                    self._break_off(body, draw)
                else:
                    self._ask(body, draw)
            except (OSError, http.client.HTTPException) as error:
                self._problem(f"{type(error).__name__}: {error}")

    def _ask(self, body: dict[str, Any], draw: random.Random) -> None:
        status, text = self.answer(body)
        with self.lock:
            if status == 429:
                self.n_refused += 1
                return
            if status != 200:
                self.problems.append(f"status {status}: {text[:200]}")
                return
            self.n_done += 1
            if len(self.sample) < SAMPLE:
                self.sample.append((body, text))
            elif draw.random() < SAMPLE / self.n_done:
                self.sample[draw.randrange(SAMPLE)] = body, text

    def answer(self, body: dict[str, Any]) -> tuple[int, str]:
        """Status and text of a request."""
        connection = http.client.HTTPConnection(self.address.netloc, timeout=300)
        connection.request("POST", "/completion", json.dumps(body))
        response = connection.getresponse()
        data = response.read().decode()
        connection.close()
        return response.status, json.loads(data)["content"] if response.status == 200 else data

    def _break_off(self, body: dict[str, Any], draw: random.Random) -> None:
        data = json.dumps({**body, "stream": draw.random() < 0.7}).encode()
        head = f"POST /completion HTTP/1.1\r\nHost: {self.address.netloc}\r\n"
        whole = f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data
        with socket.create_connection((self.address.hostname, self.address.port), 60) as sock:
            sock.sendall(whole[: draw.randrange(len(whole))] if draw.random() < 0.1 else whole)
            time.sleep(draw.choice([0, 0.001, 0.01, 0.05, 0.2]))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        with self.lock:
            self.n_broken_off += 1

    def _problem(self, line: str) -> None:
        with self.lock:
            self.problems.append(line)

    def get(self, path: str) -> Any:
        """The JSON of a path."""
        connection = http.client.HTTPConnection(self.address.netloc, timeout=60)
        connection.request("GET", path)
        value = json.loads(connection.getresponse().read())
        connection.close()
        return value

    def check(self) -> None:
        """Look for what is not as it must be."""
        end = time.monotonic() + 60
        while any((cache := self.get("/localkv/cache"))["requests"].values()):
            if time.monotonic() > end:
                self.problems.append(f"requests that nobody waits for: {cache['requests']}")
                break
            time.sleep(0.1)
        pages = cache["pages"]
        if pages["running"] or pages["kept"] + pages["free"] != pages["all"]:
            self.problems.append(f"pages are missing: {pages}")
        for body, text in self.sample:
            if self.answer(body) != (200, text):
                self.problems.append(f"another text alone: {json.dumps(body)[:200]}")


def body_of(draw: random.Random) -> dict[str, Any]:
    """A random request; many begin alike."""
    begins = f"Once upon a time there was a {draw.choice(WORDS[:3])}. " * draw.choice([1, 8, 30])
    return {
        "prompt": begins + " ".join(draw.choices(WORDS, k=draw.randrange(20))),
        "n_predict": draw.choice([1, 5, 20, 80, 200]),
        "ignore_eos": True,
        "temperature": draw.choice([0, 0.8]),
        "seed": draw.randrange(1 << 30),
    }


def processes(pid: int) -> list[int]:
    """A process and its children."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *map(int, children)]


def resident(pid: int) -> int:
    """Bytes that a process has in memory, files it maps left out."""
    fields = dict(re.findall(r"(RssAnon|VmRSS):\s+(\d+)", Path(f"/proc/{pid}/status").read_text()))
    return 1024 * int(fields["RssAnon"])


def main() -> int:
    """Run it; 1 if something was lost."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    command = [sys.executable, "-m", "localkv", "serve", "-m", str(MODEL), "--port", "0"]
    command += ["-np", "8", "--cache-tokens", "2560", "--queue", "32"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    try:
        url = re.search(r"on (http://\S+?);", server.stderr.readline())
        assert url is not None
        server.stderr.readline()  # ready
        warm = Soak(url[1], 6 * options.minutes, options.seed)
        warm.run(options.clients)
        before = {pid: resident(pid) for pid in processes(server.pid)}
        soak = Soak(url[1], 54 * options.minutes, options.seed + 1)
        soak.run(options.clients)
        after = {pid: resident(pid) for pid in before}
        soak.check()
        n_preempted = re.search(r"^localkv_preemptions_total (\S+)", _metrics(soak), re.MULTILINE)
    finally:
        server.terminate()
        code = server.wait()
    problems = [*warm.problems, *soak.problems]
    growth = sum(after.values()) / sum(before.values()) - 1
    if growth > MOST_GROWTH:
        problems.append(f"memory has grown by {growth:.1%}")
    if code:
        problems.append(f"exit code {code}")
    print(
        f"{soak.n_done} answers, {soak.n_broken_off} broken off, {soak.n_refused} refused, "
        f"{float(n_preempted[1]) if n_preempted else 0:.0f} preempted, memory {growth:+.1%}, "
        f"{len(soak.sample)} repeated alone"
    )
    for line in problems[:20]:
        print(f"problem: {line}")
    return 1 if problems else 0


def _metrics(soak: Soak) -> str:
    connection = http.client.HTTPConnection(soak.address.netloc, timeout=60)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    return text


if __name__ == "__main__":
    sys.exit(main())
