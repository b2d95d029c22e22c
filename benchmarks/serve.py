"""`localkv serve` beside llama-server: `python benchmarks/serve.py --peer FILE --json FILE`.

A model with random weights (Q4_0, 1.1 billion unless --shape says another), K and V in q8_0,
contexts of 4,096 tokens, 16 requests at a time. Both servers are loaded, and asked in turn, with
the same tokens; a server that nobody asks waits without work. Each table's figures are medians of
the rounds.

- 1, 2, 4, 8 and 16 streams: tokens per second together, time to the first token, times between;
- a long prompt while four streams are written, and a short one behind a long one;
- the next turn of a conversation, and 16 requests with one beginning;
- /health while a long prompt is read; 256 streams and 500 idle connections; requests that go away.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from random_model import shape_of, write_model
from serve_client import Client, Stream
from serve_report import plot, table

from localkv.system.processor import processor_name

COUNTS = (1, 2, 4, 8, 16)
PROMPT, ANSWER = 128, 64
PARALLEL = 16
FIRST_WORD = 300
"""Tokens from here on are words."""


class Server:
    """A server's process.

    Args:
        command: what to run, without the port.
        port: given to it; 0 if it says which it took.
    """

    def __init__(self, command: Sequence[str], port: int = 0) -> None:
        self.began = time.perf_counter()
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            [*command, "--port", str(port)], stdout=self.log, stderr=subprocess.STDOUT
        )
        while not port:
            self.log.seek(0)
            if found := re.search(r"listening on http://127\.0\.0\.1:(\d+)", self.log.read()):
                port = int(found[1])
            self._check()
        self.client = Client(port)

    def _check(self) -> None:
        if self.process.poll() is not None:
            self.log.seek(0)
            sys.exit(f"a server ended:\n{self.log.read()[-2000:]}")
        time.sleep(0.005)

    async def ready(self) -> dict[str, float]:
        """Seconds from the start to the first answer, and to a loaded model."""
        answers = 0.0
        while True:
            self._check()
            try:
                status, _ = await self.client.get("/health")
            except OSError:
                continue
            answers = answers or time.perf_counter() - self.began
            if status == 200:
                return {"answers_s": answers, "loaded_s": time.perf_counter() - self.began}

    @property
    def memory_mib(self) -> float:
        """What the process itself takes, without its children."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        found = re.search(r"VmRSS:\s+(\d+)", status)
        return int(found[1]) / 1024 if found else 0.0

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(30)


class Prompts:
    """Random tokens, which are others each time."""

    def __init__(self, n_vocab: int, seed: int = 1) -> None:
        self._random, self._n_vocab = random.Random(seed), n_vocab

    def new(self, n: int) -> list[int]:
        return [1, *(self._random.randrange(FIRST_WORD, self._n_vocab) for _ in range(n - 1))]


def percentile(values: Sequence[float], part: float) -> float:
    """The value below which a part of them is."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]


async def together(client: Client, prompts: Sequence[list[int]], n: int) -> list[Stream]:
    """Streams that begin at the same time."""
    return list(await asyncio.gather(*(client.complete(ids, n) for ids in prompts)))


async def streams(client: Client, prompts: Prompts, count: int) -> dict[str, float]:
    """So many equal streams: tokens per second of all while all are written, and times."""
    done = await together(client, [prompts.new(PROMPT) for _ in range(count)], ANSWER)
    begin = max(stream.times[0] for stream in done)
    end = min(stream.times[-1] for stream in done)
    n_tokens = sum(begin < at <= end for stream in done for at in stream.times)
    gaps = [gap for stream in done for gap in stream.gaps]
    rates = [len(stream.gaps) / (stream.times[-1] - stream.times[0]) for stream in done]
    return {
        "tokens_per_s": n_tokens / (end - begin) if end > begin else 0.0,
        "first_ms": 1e3 * statistics.median(stream.first for stream in done),
        "gap_p50_ms": 1e3 * percentile(gaps, 0.5),
        "gap_p99_ms": 1e3 * percentile(gaps, 0.99),
        "all_per_s": count * ANSWER / (max(s.times[-1] for s in done) - done[0].began),
        "jain": sum(rates) ** 2 / (count * sum(rate**2 for rate in rates)),
    }


async def long_prompt(client: Client, prompts: Prompts, n_long: int) -> dict[str, float]:
    """A long prompt alone, and while four streams are written."""
    alone = (await client.complete(prompts.new(n_long), 2)).first
    writing = [asyncio.create_task(client.complete(prompts.new(64), 240)) for _ in range(4)]
    await asyncio.sleep(2.0)
    began = time.perf_counter()
    beside = await client.complete(prompts.new(n_long), 2)
    done = [await task for task in writing]
    gaps = [
        b - a
        for stream in done
        for a, b in zip(stream.times, stream.times[1:], strict=False)
        if b > began and a < beside.times[0]
    ]
    return {
        "alone_s": alone,
        "beside_s": beside.first,
        "gap_p99_ms": 1e3 * percentile(gaps, 0.99) if gaps else 0.0,
        "gap_max_ms": 1e3 * max(gaps, default=0.0),
    }


async def short_behind_long(client: Client, prompts: Prompts, n_long: int) -> dict[str, float]:
    """A request of 50 tokens that comes while a long prompt is read."""
    long = asyncio.create_task(client.complete(prompts.new(n_long), 2))
    await asyncio.sleep(0.3)
    short = await client.complete(prompts.new(50), 2)
    await long
    return {"first_ms": 1e3 * short.first}


async def prefixes(client: Client, prompts: Prompts) -> dict[str, float]:
    """What is evaluated of a conversation's next turn, and of 16 requests that begin alike."""
    first = prompts.new(600)
    answer = await client.complete(first, 32, return_tokens=True)
    turn = await client.complete([*first, *prompts.new(40)], 2)
    shared = prompts.new(1024)
    done = await together(client, [[*shared, *prompts.new(16)] for _ in range(16)], 4)
    return {
        "turn_new": 40.0,
        "turn_read": float(turn.n_read),
        "shared_all": 16 * 1040.0,
        "shared_read": float(sum(stream.n_read for stream in done)),
        "shared_s": max(s.times[-1] for s in done) - done[0].began,
        "answer_chars": float(len(answer.text)),
    }


async def liveness(client: Client, prompts: Prompts, n_long: int) -> dict[str, float]:
    """/health while a long prompt is read."""
    long = asyncio.create_task(client.complete(prompts.new(n_long), 1))
    took = []
    while not long.done():
        took.append((await client.get("/health"))[1])
        await asyncio.sleep(0.02)
    await long
    return {"p99_ms": 1e3 * percentile(took, 0.99), "n": float(len(took))}


async def crowd(server: Server, prompts: Prompts) -> dict[str, float]:
    """256 streams beside 500 connections that say nothing."""
    client = server.client
    idle = [await asyncio.open_connection("127.0.0.1", client.port) for _ in range(500)]
    tasks = [client.complete(prompts.new(16), 8) for _ in range(256)]
    done = await asyncio.gather(*tasks, return_exceptions=True)
    for _, writer in idle:
        writer.close()
    errors = [one for one in done if isinstance(one, BaseException)]
    return {"errors": float(len(errors)), "front_mib": server.memory_mib}


async def gone(client: Client, prompts: Prompts) -> dict[str, float]:
    """How soon others are served when 16 clients go away in the middle of long answers."""
    await asyncio.gather(*(client.complete(prompts.new(64), 2000, reads=3) for _ in range(16)))
    after = await client.complete(prompts.new(16), 8)
    return {"first_ms": 1e3 * after.first}


async def measure(servers: dict[str, Server], n_vocab: int, arguments: argparse.Namespace) -> Any:
    """All tables, the servers in turn."""
    prompts, found = Prompts(n_vocab), dict[str, dict[str, list[dict[str, float]]]]()

    async def turn(
        what: str,
        act: Callable[[Server], Awaitable[dict[str, float]]],
        rounds: int = 1,
        only: str = "",
    ) -> None:
        for number in range(rounds):
            names = list(servers) if number % 2 == 0 else list(servers)[::-1]
            for name in names:
                if only and name != only:
                    continue
                figures = await act(servers[name])
                found.setdefault(what, {}).setdefault(name, []).append(figures)
                print(what, name, {k: round(v, 2) for k, v in figures.items()}, file=sys.stderr)

    for name, server in servers.items():
        found.setdefault("start", {})[name] = [await server.ready()]
    for server in servers.values():
        await server.client.complete(prompts.new(64), 8)
    for count in COUNTS:
        await turn(
            f"{count} streams",
            lambda server, count=count: streams(server.client, prompts, count),
            arguments.rounds,
        )
    n_long = min(arguments.context - 64, 3900)
    await turn("long prompt", lambda server: long_prompt(server.client, prompts, n_long))
    await turn("short behind long", lambda s: short_behind_long(s.client, prompts, n_long))
    await turn("prefixes", lambda server: prefixes(server.client, prompts))
    await turn("liveness", lambda server: liveness(server.client, prompts, n_long))
    await turn("gone", lambda server: gone(server.client, prompts))
    await turn("crowd", lambda server: crowd(server, prompts), only="localkv")
    return {
        what: {
            name: {key: statistics.median(one[key] for one in rounds) for key in rounds[0]}
            for name, rounds in by_name.items()
        }
        for what, by_name in found.items()
    }


def commands(model: Path, arguments: argparse.Namespace) -> dict[str, tuple[list[str], int]]:
    """How the servers are started, and their ports."""
    each = ["-m", str(model), "-ctk", "q8_0", "-ctv", "q8_0"]
    ours = [sys.executable, "-m", "localkv", "serve", *each, "-c", str(arguments.context)]
    ours += ["-np", str(PARALLEL), "--cache-tokens", str(PARALLEL * arguments.context // 2)]
    found = {"localkv": (ours, 0)}
    if arguments.peer:
        pool = str(PARALLEL * arguments.context // 2)
        peer = [
            arguments.peer,
            *each,
            "-c",
            pool,
            "-np",
            str(PARALLEL),
            "-fa",
            "on",
            "--kv-unified",
        ]
        found["llama-server"] = ([*peer, "--no-webui"], arguments.peer_port)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--peer", help="llama-server; without it localkv alone is measured")
    parser.add_argument("--peer-port", type=int, default=8123)
    parser.add_argument("--shape", default="llama-1.1b")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()
    shape = shape_of(arguments.shape)
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model.gguf"
        write_model(model, shape, "q4_0", has_words=True)
        servers = dict[str, Server]()
        try:
            for name, (command, port) in commands(model, arguments).items():
                servers[name] = Server(command, port)
            figures = asyncio.run(measure(servers, shape.n_vocab, arguments))
        finally:
            for server in servers.values():
                server.stop()
    result = {"machine": processor_name(), "shape": arguments.shape, "figures": figures}
    print(table(result))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    if arguments.plot:
        plot(result, arguments.plot)


if __name__ == "__main__":
    main()
