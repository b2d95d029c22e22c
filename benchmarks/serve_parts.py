"""What `serve.py` asks servers for, part by part.

A part puts its figures into a dict as it comes to know them: one that is broken off, since the
server takes too long, leaves those that it has.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial

from serve_client import Client, Stream

COUNTS = (1, 2, 4, 8, 16)
PROMPT, ANSWER = 128, 128
N_CROWD, N_IDLE = 256, 500
FIRST_WORD = 300
"""Tokens from here on are words."""

Figures = dict[str, float]


class Prompts:
    """Random tokens, which are others each time."""

    def __init__(self, n_vocab: int, seed: int) -> None:
        self._random, self._n_vocab = random.Random(seed), n_vocab

    def new(self, n: int) -> list[int]:
        return [1, *(self._random.randrange(FIRST_WORD, self._n_vocab) for _ in range(n - 1))]


@dataclass
class Asked:
    """A server that is asked.

    Attributes:
        n_long: tokens of a long prompt.
        memory_mib: tells what the server's process takes, without its children.
    """

    client: Client
    prompts: Prompts
    n_long: int
    memory_mib: Callable[[], float]


Part = Callable[[Asked, Figures], Awaitable[None]]


def percentile(values: Sequence[float], part: float) -> float:
    """The value below which a part of them is."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]


async def together(client: Client, prompts: Sequence[list[int]], n: int) -> list[Stream]:
    """Streams that begin at the same time."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(client.complete(ids, n)) for ids in prompts]
    return [task.result() for task in tasks]


async def streams(asked: Asked, found: Figures, count: int) -> None:
    """Run `count` equal streams.

    Finds the tokens per second of all, from the first request to the last token, and while all are
    written. It also finds the times to first tokens and between tokens, and how alike the rates of
    the streams are (Jain's index, 1 if all are the same; Jain, Chiu and Hawe 1984).
    """
    done = [Stream(time.perf_counter()) for _ in range(count)]
    try:
        async with asyncio.TaskGroup() as group:
            for stream in done:
                prompt = asked.prompts.new(PROMPT)
                group.create_task(asked.client.complete(prompt, ANSWER, into=stream))
    finally:
        last = max((stream.times[-1] for stream in done if stream.times), default=0.0)
        n_tokens = sum(len(stream.times) for stream in done)
        found["all_per_s"] = n_tokens / max(1e-9, last - done[0].began)
    begin = max(stream.times[0] for stream in done)
    end = min(stream.times[-1] for stream in done)
    gaps = [gap for stream in done for gap in stream.gaps]
    rates = [len(stream.times) / (stream.times[-1] - stream.began) for stream in done]
    found |= {
        "first_ms": 1e3 * statistics.median(stream.first for stream in done),
        "gap_p50_ms": 1e3 * percentile(gaps, 0.5),
        "gap_p99_ms": 1e3 * percentile(gaps, 0.99),
        "jain": sum(rates) ** 2 / (count * sum(rate**2 for rate in rates)),
    }
    if end > begin:
        n_tokens = sum(begin < at <= end for stream in done for at in stream.times)
        found["together_per_s"] = n_tokens / (end - begin)


async def long_alone(asked: Asked, found: Figures) -> None:
    """A long prompt alone."""
    stream = await asked.client.complete(asked.prompts.new(asked.n_long), 2)
    found["alone_s"] = stream.first


async def long_beside(asked: Asked, found: Figures) -> None:
    """A long prompt while four streams are written."""
    client, prompts = asked.client, asked.prompts
    async with asyncio.TaskGroup() as group:
        writing = [group.create_task(client.complete(prompts.new(64), 240)) for _ in range(4)]
        await asyncio.sleep(2.0)
        began = time.perf_counter()
        beside = await client.complete(prompts.new(asked.n_long), 2)
        found["beside_s"] = beside.first
    gaps = [
        b - a
        for task in writing
        for a, b in zip(task.result().times, task.result().times[1:], strict=False)
        if b > began and a < beside.times[0]
    ]
    found["gap_p99_ms"] = 1e3 * percentile(gaps, 0.99) if gaps else 0.0
    found["gap_max_ms"] = 1e3 * max(gaps, default=0.0)


async def short_behind_long(asked: Asked, found: Figures) -> None:
    """A request of 50 tokens that comes while a long prompt is read."""
    async with asyncio.TaskGroup() as group:
        group.create_task(asked.client.complete(asked.prompts.new(asked.n_long), 2))
        await asyncio.sleep(0.3)
        short = await asked.client.complete(asked.prompts.new(50), 2)
        found["first_ms"] = 1e3 * short.first


async def prefixes(asked: Asked, found: Figures) -> None:
    """What is evaluated of a conversation's next turn, and of 16 requests that begin alike."""
    client, prompts = asked.client, asked.prompts
    first = prompts.new(600)
    await client.complete(first, 32, return_tokens=True)
    turn = await client.complete([*first, *prompts.new(40)], 2)
    found |= {"turn_new": 40.0, "turn_read": float(turn.n_read), "shared_all": 16 * 1040.0}
    shared = prompts.new(1024)
    done = await together(client, [[*shared, *prompts.new(16)] for _ in range(16)], 4)
    found["shared_read"] = float(sum(stream.n_read for stream in done))
    found["shared_s"] = max(s.times[-1] for s in done) - done[0].began


async def liveness(asked: Asked, found: Figures) -> None:
    """/health and /metrics while a long prompt is read."""
    client = asked.client
    long = asyncio.create_task(client.complete(asked.prompts.new(asked.n_long), 1))
    took = dict[str, list[float]](health=[], metrics=[])
    try:
        while not long.done():
            for name, seconds in took.items():
                seconds.append((await client.get(f"/{name}"))[1])
                found[f"{name}_p99_ms"] = 1e3 * percentile(seconds, 0.99)
            await asyncio.sleep(0.02)
        await long
    finally:
        long.cancel()


async def gone(asked: Asked, found: Figures) -> None:
    """How soon another one is served when 16 clients go away in the middle of long answers."""
    client, prompts = asked.client, asked.prompts
    async with asyncio.TaskGroup() as group:
        for _ in range(16):
            group.create_task(client.complete(prompts.new(64), 2000, reads=3))
    after = await client.complete(prompts.new(16), 8)
    found["first_ms"] = 1e3 * after.first


async def crowd(asked: Asked, found: Figures) -> None:
    """256 streams beside 500 connections that say nothing; `errors` counts what is not whole."""
    found["errors"] = float(N_CROWD)
    began = time.perf_counter()

    async def one() -> None:
        await asked.client.complete(asked.prompts.new(16), 8)
        found["errors"] -= 1
        found["memory_mib"] = max(found.get("memory_mib", 0), asked.memory_mib())

    async with AsyncExitStack() as stack:
        for _ in range(N_IDLE):
            _, writer = await asyncio.open_connection("127.0.0.1", asked.client.port)
            stack.callback(writer.close)
        await asyncio.gather(*(one() for _ in range(N_CROWD)), return_exceptions=True)
    found["crowd_s"] = time.perf_counter() - began


_STREAMS = {f"{count} streams": partial(streams, count=count) for count in COUNTS}
PARTS: dict[str, list[tuple[str, Part]]] = {
    "streams": list(_STREAMS.items()),
    **{name: [(name, part)] for name, part in _STREAMS.items()},
    "long": [("long alone", long_alone), ("long beside", long_beside)],
    "short": [("short behind long", short_behind_long)],
    "prefixes": [("prefixes", prefixes)],
    "liveness": [("liveness", liveness)],
    "gone": [("gone", gone)],
    "crowd": [("crowd", crowd)],
}
"""What --parts names, and what each has measured."""
