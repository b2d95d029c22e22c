"""Serve a polite client while others send harmful requests, one kind after the other.

    python benchmarks/hostile_neighbours.py

A process of its own plays the polite client: it reads one answer after the other, token by token,
and asks for `/health` every 20 ms. Hostile clients send requests of one kind for some seconds, and
then of the next. They send numbers that no field can hold, bodies that are slow to read, samplers
and stop strings by the thousand, and grammars that take long. Some break off. They need not get an
answer, but the polite client must.

The table has a line for each kind: how many requests were sent, and what they got. It also has the
polite client's slowest `/health` and longest gap between two tokens meanwhile. Last is the most
memory of the server's front, of its engine, and of all its other processes. A step of the engine is
planned to take 100 ms, so a gap of three steps is 300 ms. Exit code 1 says that something was too
late or too large, that a status was wrong, or that texts, pages or the server itself were lost.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import itertools
import json
import multiprocessing
import random
import socket
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread
from typing import Any

from serve_client import Client, Stream
from soak import START_SECONDS, Server

from localkv.engine.batch_engine import STEP_MS_CPU
from localkv.system.processor import processor_name

OPTIONS = ("-np", "8", "-c", "1024", "--queue", "64")
"""Options of the server: hostile prompts can exceed its context and fill its queue."""
HEALTH_SECONDS = 0.02
"""Between two questions after `/health`."""
MOST_WAIT = 60.0
"""How long a hostile client waits for an answer."""
IDLE_SECONDS = 60.0
"""How long it may take until nothing runs, once nobody asks."""

Body = bytes
Request = tuple[str, Body]


def json_request(path: str, **fields: Any) -> Request:
    """A request with a body of JSON."""
    return path, json.dumps(fields).encode()


def completion(**fields: Any) -> Request:
    """A text to a short prompt."""
    return json_request("/completion", **{"prompt": "Once upon", "n_predict": 4, **fields})


def chat(**fields: Any) -> Request:
    """An answer to a short message."""
    messages = [{"role": "user", "content": "Hello"}]
    return json_request("/v1/chat/completions", **{"messages": messages, "max_tokens": 4, **fields})


def schema(value: Any) -> Request:
    """An answer that keeps to a schema."""
    return chat(response_format={"type": "json_schema", "json_schema": {"schema": value}})


def chain(kind: Callable[[str], Any], n: int) -> Any:
    """A chain of schemas: each names the next."""
    names = {f"d{i}": kind(f"#/$defs/d{i + 1}") for i in range(n)}
    return {"$defs": {**names, f"d{n}": {"type": "integer"}}, "$ref": "#/$defs/d0"}


def array_of(ref: str) -> Any:
    return {"type": "array", "items": {"$ref": ref}}


def object_of(ref: str) -> Any:
    return {"type": "object", "properties": {"a": {"$ref": ref}}, "required": ["a"]}


def null_or(ref: str) -> Any:
    return {"anyOf": [{"$ref": ref}, {"type": "null"}]}


def rule_chain(n: int) -> str:
    """A grammar whose rules name one another."""
    rules = "".join(f"r{i} ::= r{i + 1}\n" for i in range(n))
    return f'root ::= r0\n{rules}r{n} ::= "a"\n'


def many_rules(n: int) -> str:
    """A grammar of rules that nothing names."""
    return 'root ::= "a"\n' + "".join(f'r{i} ::= "b" | "c"\n' for i in range(n))


BIG = (2**64, 2**70, 10**400, -(2**63) - 1)
"""Integers that no field holds."""


def big_integers() -> Iterator[Request]:
    """Each of some fields with a number that is too large."""
    fields = ("top_k", "n_probs", "seed", "min_keep", "repeat_last_n", "n_predict", "id_slot")
    for name, value in itertools.product(fields, BIG):
        yield completion(**{name: value})
    for value in BIG:
        yield chat(seed=value, n=2, max_tokens=900, ignore_eos=True)
        yield chat(logprobs=True, top_logprobs=value)
        yield json_request("/v1/messages", messages=[], max_tokens=value)
        yield json_request("/v1/responses", input="hi", max_output_tokens=value)
        yield json_request("/api/generate", prompt="hi", options={"num_predict": value})
    yield chat(seed=2**64 - 1, n=2, max_tokens=900, ignore_eos=True)


def odd_sampling() -> Iterator[Request]:
    """Values with which nothing could be drawn."""
    odd: list[dict[str, Any]] = [
        {"temperature": 5e-324},
        {"temperature": 1e308},
        {"repeat_penalty": 1e308},
        {"repeat_penalty": 0},
        {"presence_penalty": 1e308},
        {"dynatemp_range": 1e308, "temperature": 1.0},
        {"logit_bias": {"5": 1e308}},
        {"logit_bias": {"5": -1e308}},
        {"dry_multiplier": 1e308, "dry_base": 1e308},
        {"top_n_sigma": 5e-324},
        {"grammar": 'root ::= root "a"'},
    ]
    yield from (completion(**fields) for fields in odd)
    yield schema(
        {"$defs": {"A": {"$ref": "#/$defs/B"}, "B": {"$ref": "#/$defs/A"}}, "$ref": "#/$defs/A"}
    )


def slow_bodies() -> Iterator[Request]:
    """Bodies that take a careless reader long."""
    yield "/tokenize", b'{"content":"' + b'\\"' * 32_000
    yield "/tokenize", b'{"content":"' + b'\\"' * 4_000_000
    yield "/completion", b"[" * 8_000_000
    yield "/completion", b'{"prompt":' + b"[" * 4_000_000 + b"]" * 4_000_000 + b"}"
    yield "/completion", b'{"prompt":"a","x":' + b"9" * 8_000_000 + b"}"
    yield "/completion", b'{"prompt":"a","x":[' + b"1e5," * 1_900_000 + b"1]}"
    yield "/completion", b'{"prompt":[' + b"1e-322," * 1_000_000 + b"1]}"
    yield "/v1/chat/completions", b'{"messages":[' + b"{}," * 2_600_000 + b"{}]}"
    yield "/completion", b'{"prompt":"' + b"\\u0000" * 1_300_000 + b'"}'


def long_texts() -> Iterator[Request]:
    """Texts that are far longer than the context."""
    yield completion(prompt="a " * 3_900_000)
    yield completion(prompt="a" * 7_800_000)
    yield completion(prompt=[5] * 2_500_000)
    yield completion(prompt=["a"] * 1_900_000)
    yield chat(messages=[{"role": "user", "content": "a " * 500_000}])
    yield chat(messages=[{"role": "user", "content": "a"}] * 200_000)
    yield chat(chat_template_kwargs={f"k{i}": 1 for i in range(450_000)})
    yield json_request("/tokenize", content="a b " * 1_900_000)
    yield json_request("/detokenize", tokens=[5] * 2_500_000)
    yield json_request(
        "/v1/messages/count_tokens", messages=[{"role": "user", "content": "a b " * 1_900_000}]
    )
    yield json_request("/api/generate", model="x", prompt="a " * 1_000_000, stream=False)


def long_lists() -> Iterator[Request]:
    """Lists whose items each cost something, some at each token."""
    yield completion(samplers="k" * 100_000, n_predict=900, ignore_eos=True)
    yield completion(samplers=["penalties"] * 10_000, n_predict=900, ignore_eos=True)
    breakers = [f"b{i}" for i in range(20_000)]
    yield completion(dry_multiplier=1.0, dry_sequence_breakers=breakers, n_predict=900)
    yield completion(dry_multiplier=1.0, dry_sequence_breakers=["a" * 4_000_000])
    yield completion(logit_bias=[["aa", 1]] * 90_000)
    yield completion(logit_bias=[["a b " * 250_000, 1]])
    yield completion(logit_bias={str(i): 1 for i in range(400_000)})
    yield completion(stop=["a" * 100_000] * 16)
    yield completion(stop=["a"] * 1_000_000)
    yield json_request(
        "/api/generate", model="x", prompt="a", options={"stop": ["a" * 100_000] * 10}
    )
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    yield chat(tools=[tool] * 50_000)
    yield chat(n=128, max_tokens=900)
    yield completion(n_probs=100_000, n_predict=900)
    yield completion(n_probs=100, n_cmpl=64, n_predict=900, ignore_eos=True)


def chains() -> Iterator[Request]:
    """Grammars in which one thing leads to the next, a thousand times."""
    for kind, n in itertools.product((array_of, object_of, null_or), (300, 1_100, 1_700)):
        yield schema(chain(kind, n))
        parameters = chain(kind, n)
        tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
        yield chat(tools=[tool], tool_choice="required")
    for n in (500, 1_700, 20_000):
        yield completion(grammar=rule_chain(n))
    nested: Any = {"type": "integer"}
    for _ in range(20):
        nested = {"type": "array", "items": nested, "minItems": 9, "maxItems": 99}
    yield schema(nested)


def large_grammars() -> Iterator[Request]:
    """Grammars that take long to compile."""
    yield completion(grammar=many_rules(30_000))
    yield completion(grammar="root ::= " + "|".join(f'"{i}"' for i in range(650_000)))
    yield completion(grammar=f'root ::= "{"a" * 7_000_000}"')
    yield completion(grammar="root ::= [a-z]{1,100000}")
    yield schema({"type": "string", "pattern": "(a{1000}){1000}"})
    yield schema({"type": "string", "pattern": "(.*a){30}"})
    yield schema({"enum": [f"{i}" * 10 for i in range(100_000)]})
    properties = {f"p{i}": {"type": "string"} for i in range(20_000)}
    yield schema({"type": "object", "properties": properties})


def many_answers() -> Iterator[Request]:
    """Honest requests, more than there is room for."""
    yield completion(n_predict=200, ignore_eos=True)
    yield completion(prompt="once upon a time " * 150, n_predict=50)
    yield chat(max_tokens=100, n=4)


KINDS: dict[str, Callable[[], Iterator[Request]]] = {
    "many answers": many_answers,
    "integers": big_integers,
    "sampling": odd_sampling,
    "bodies": slow_bodies,
    "long texts": long_texts,
    "lists": long_lists,
    "chains": chains,
    "grammars": large_grammars,
}
"""What is sent, by its name in the table."""
BREAKING_OFF = "breaking off"
"""All of these, by clients that leave at random moments."""


@dataclass
class Polite:
    """What the polite client met.

    Attributes:
        health: seconds until each answer of `/health`, with when it was asked.
        gaps: seconds between tokens, with when the later one came.
        problems: what it got that it should not have.
    """

    health: list[tuple[float, float]] = field(default_factory=list)
    gaps: list[tuple[float, float]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def be_polite(port: int, pipe: Connection) -> None:
    """Ask until told to end, and send what was met whenever asked for it."""
    met = Polite()
    client = Client(port)

    async def ask_health() -> None:
        while True:
            at = time.monotonic()
            try:
                status, took = await client.get("/health")
                if status != 200:
                    met.problems.append(f"/health has status {status}")
            except (OSError, ValueError, EOFError) as error:
                took = time.monotonic() - at
                met.problems.append(f"/health: {type(error).__name__}")
            met.health.append((at, took))
            await asyncio.sleep(HEALTH_SECONDS)

    async def read_answers() -> None:
        for number in itertools.count():
            stream = Stream(time.perf_counter())
            reading = asyncio.create_task(client.complete([1, 300 + number % 99], 400, into=stream))
            n_told = 0
            while not reading.done():
                await asyncio.wait({reading}, timeout=0.05)
                times = stream.times
                # a token that has not come yet is late already
                shown = [*times, time.perf_counter()] if times and not reading.done() else times
                for a, b in itertools.pairwise(shown[max(0, n_told - 1) :]):
                    met.gaps.append((time.monotonic(), b - a))
                n_told = len(times)
            error = reading.exception()
            if error is not None and "429" not in str(error) and "wait already" not in str(error):
                met.problems.append(f"an answer ended: {str(error) or type(error).__name__:.200}")
            elif error is not None:
                await asyncio.sleep(0.05)

    async def told() -> None:
        nonlocal met
        loop = asyncio.get_running_loop()
        tasks = [loop.create_task(ask_health()), loop.create_task(read_answers())]
        while await loop.run_in_executor(None, pipe.recv):
            pipe.send(met)
            met.health, met.gaps, met.problems = [], [], []
        for task in tasks:
            task.cancel()

    asyncio.run(told())


@dataclass
class Sent:
    """What hostile clients of one kind did.

    Attributes:
        statuses: what they got; None where they left or nothing came in time.
        most: bytes that the front, the engine and the other processes took at most.
    """

    statuses: Counter[int | None] = field(default_factory=Counter)
    most: list[int] = field(default_factory=lambda: [0, 0, 0])


def send(port: int, request: Request, draw: random.Random, *, leaves: bool) -> int | None:
    """Send a request; its status, or None where no answer was waited for or came."""
    path, body = request
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Length: {len(body)}\r\n\r\n"
    whole = head.encode() + body
    try:
        with socket.create_connection(("127.0.0.1", port), MOST_WAIT) as sock:
            if leaves:
                end = len(whole) if draw.random() < 0.5 else draw.randrange(len(whole))
                sock.settimeout(5)
                sock.sendall(whole[:end])
                time.sleep(draw.choice([0, 0.001, 0.01, 0.1]))
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                return None
            with suppress(OSError):  # a body that is too large is refused before it has all come
                sock.sendall(whole)
            response = http.client.HTTPResponse(sock)
            response.begin()
            while response.read(1 << 16):
                pass
            return response.status
    except (OSError, http.client.HTTPException):
        return None


def attack(
    server: Server, requests: list[Request], seconds: float, n_clients: int, *, leaves: bool
) -> Sent:
    """Send requests, again and again, from some clients; each kind at least once."""
    sent, end = Sent(), time.monotonic() + seconds
    turns = itertools.cycle(requests)
    left = itertools.count()

    def client(number: int) -> None:
        draw = random.Random(number)
        while next(left) < len(requests) or time.monotonic() < end:
            sent.statuses[send(server.port, next(turns), draw, leaves=leaves)] += 1
            if server.process.poll() is not None:
                return

    threads = [Thread(target=client, args=(number,)) for number in range(n_clients)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        time.sleep(0.05)
        for i, size in enumerate(memory_of(server)):
            sent.most[i] = max(sent.most[i], size)
    return sent


def memory_of(server: Server) -> tuple[int, int, int]:
    """Bytes of the front, of the engine, and of all other processes together."""
    try:
        sizes, engine = server.memory, server.engine_pid
    except (FileNotFoundError, ProcessLookupError):  # one has just ended
        return 0, 0, 0
    front = sizes.pop(server.process.pid, 0)
    in_engine = sizes.pop(engine, 0) if engine is not None else 0
    return front, in_engine, sum(sizes.values())


def lost(port: int) -> list[str]:
    """What differs from before anybody asked."""
    end = time.monotonic() + IDLE_SECONDS
    while True:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        connection.request("GET", "/localkv/cache")
        cache = json.loads(connection.getresponse().read())
        if not any(cache["requests"].values()):
            break
        if time.monotonic() > end:
            return [f"requests that nobody waits for: {cache['requests']}"]
        time.sleep(0.1)
    pages = cache["pages"]
    if pages["running"] or pages["lost"] or pages["kept"] + pages["free"] != pages["all"]:
        return [f"pages are missing: {pages}"]
    return []


class Watch:
    """Watches a server and its polite client while others are hostile.

    Args:
        server: that they all ask.
        options: what is too late or too large.

    Attributes:
        problems: a line each.
        figures: by what was sent.
    """

    def __init__(self, server: Server, options: argparse.Namespace) -> None:
        self.problems = list[str]()
        self.figures = dict[str, Any]()
        self._server, self._options = server, options
        self._pipe, pipe = multiprocessing.Pipe()
        self._polite = multiprocessing.Process(
            target=be_polite, args=(server.port, pipe), daemon=True
        )
        self._polite.start()
        time.sleep(1.0)
        self._met()

    def _met(self) -> Polite:
        self._pipe.send(True)
        met: Polite = self._pipe.recv()
        return met

    def quiet(self) -> None:
        """Let some time pass in which nobody is hostile."""
        time.sleep(self._options.seconds)
        self._note("nothing", Sent(most=list(memory_of(self._server))))

    def attacked(self, name: str) -> None:
        """Let hostile clients send what has a name in the table."""
        leaves, options = name == BREAKING_OFF, self._options
        kinds = [*KINDS.values()] if leaves else [KINDS[name]]
        requests = [request for kind in kinds for request in kind()]
        sent = attack(self._server, requests, options.seconds, options.clients, leaves=leaves)
        if self._server.process.poll() is not None:
            sys.exit(f"{name}: the server is gone:\n{self._server.said[-2000:]}")
        if bad := [status for status in sent.statuses if status in (500, 502, 504)]:
            self.problems.append(f"{name}: status {bad[0]}")
        if not leaves and sent.statuses[None]:
            self.problems.append(f"{name}: {sent.statuses[None]} requests without an answer")
        self._note(name, sent)

    def _note(self, name: str, sent: Sent) -> None:
        """Print a line, and keep what is wrong in it."""
        met, options = self._met(), self._options
        health = 1e3 * max((took for _, took in met.health), default=0.0)
        gap = 1e3 * max((took for _, took in met.gaps), default=0.0)
        mib = [size / 2**20 for size in sent.most]
        statuses = sorted(sent.statuses.items(), key=lambda item: item[0] or 0)
        said = ", ".join(f"{count} x {status or 'none'}" for status, count in statuses)
        cells = [name, str(sent.statuses.total()), said, f"{health:.0f}", f"{gap:.0f}"]
        print(f"| {' | '.join([*cells, *(f'{size:.0f}' for size in mib)])} |", flush=True)
        counts = {str(status): count for status, count in statuses}
        self.figures[name] = {"statuses": counts, "health_ms": health, "gap_ms": gap, "mib": mib}
        self.problems += [f"{name}: {line}" for line in dict.fromkeys(met.problems)]
        if health > options.health_ms:
            self.problems.append(f"{name}: /health took {health:.0f} ms")
        if gap > options.steps * STEP_MS_CPU:
            self.problems.append(f"{name}: a token came after {gap:.0f} ms")
        if sum(mib) > options.memory_mib:
            self.problems.append(f"{name}: the server took {sum(mib):.0f} MiB")

    def end(self) -> None:
        """Let the polite client go, and look for what is lost."""
        self._pipe.send(False)
        self._polite.join(10)
        self.problems += lost(self._server.port)


def main() -> int:
    """Run it; 1 if the polite client was harmed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=4.0, help="of each kind, at least (4)")
    parser.add_argument("--clients", type=int, default=4, help="hostile ones at a time (4)")
    parser.add_argument("--kinds", help=f"some of: {', '.join((*KINDS, BREAKING_OFF))}")
    parser.add_argument("--health-ms", type=float, default=250.0, help="latest /health (250)")
    parser.add_argument("--steps", type=float, default=3.0, help="slowest gap, in steps (3)")
    parser.add_argument("--memory-mib", type=float, default=1024.0, help="all processes (1024)")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    names = options.kinds.split(",") if options.kinds else [*KINDS, BREAKING_OFF]
    if unknown := [name for name in names if name not in (*KINDS, BREAKING_OFF)]:
        parser.error(f"no such kind: {unknown[0]!r}")
    print(f"{processor_name()}\n\n{HEAD}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder), OPTIONS)
        try:
            wait_until_loaded(server)
            watch = Watch(server, options)
            watch.quiet()
            for name in names:
                watch.attacked(name)
            watch.end()
        finally:
            code = server.stop()
        problems = watch.problems
        if "Traceback" in server.said or "error:" in server.said:
            problems.append(f"the server said:\n{server.said[-2000:]}")
    if code:
        problems.append(f"exit code {code}")
    if options.json:
        options.json.write_text(json.dumps({"cpu": processor_name(), **watch.figures}, indent=1))
    print("", *(f"problem: {line}" for line in problems), sep="\n")
    return 1 if problems else 0


HEAD = """\
| Hostile clients send | requests | statuses | latest /health, ms | slowest gap, ms \
| front, MiB | engine, MiB | others, MiB |
|---|---:|---|---:|---:|---:|---:|---:|"""


def wait_until_loaded(server: Server) -> None:
    """Wait for a model that answers.

    Raises:
        SystemExit: it takes too long.
    """
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
        connection.request("GET", "/health")
        if connection.getresponse().status == 200:
            return
        time.sleep(0.1)
    sys.exit(f"the model is not loaded after {START_SECONDS:g} s:\n{server.said}")


if __name__ == "__main__":
    sys.exit(main())
