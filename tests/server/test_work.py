"""Who waits for whom, and what the event loop leaves to threads."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec
import pytest

from localkv.chat.engine import EngineOptions
from localkv.engine.logprobs import TokenLogprob, TopLogprob, as_openai
from localkv.engine_process.texts import Piece
from localkv.server import json_body, work
from localkv.server.engine_client import TextClient, Texts
from localkv.server.failures import RequestError
from localkv.server.json_answer import JsonLists, to_json
from localkv.server.json_body import MOST_ITEMS, MOST_NESTED, MOST_ODD, MOST_PARTS, Nesting, nesting
from localkv.server.request_record import RequestRecord, current
from localkv.server.work import (
    LONG_SECONDS,
    MOST_OF_CLIENT,
    NICE,
    QUICK_SECONDS,
    SMALL,
    Bodies,
    Pool,
    Work,
)
from localkv.system.limited_process import OverTimeError, Pace, _turn
from support.front import models_of, said, served


class Held:
    """Calls that go on when told to, and the order in which they ended."""

    def __init__(self) -> None:
        self.may = threading.Event()
        self.done = list[str]()

    def call(self, name: str) -> str:
        assert self.may.wait(10)
        self.done.append(name)
        return name


def pool(**options: Any) -> Pool:
    return Pool(2, **{"most_of_client": 1, "most_waiting": 4, "pace": Pace(), **options})


async def test_one_client_leaves_a_thread_to_others() -> None:
    held, threads = Held(), pool()
    mine = [asyncio.create_task(threads.run("a", lambda: held.call("a"))) for _ in range(4)]
    await asyncio.sleep(0)
    assert await threads.run("b", lambda: "b") == "b"
    held.may.set()
    assert await asyncio.gather(*mine) == ["a"] * 4


async def test_clients_have_their_turns() -> None:
    held, threads = Held(), Pool(1, most_of_client=1, most_waiting=9, pace=Pace())
    names = ["a1", "a2", "a3", "b1", "c1"]
    calls = [
        asyncio.create_task(threads.run(name[0], lambda name=name: held.call(name)))
        for name in names
    ]
    await asyncio.sleep(0)
    held.may.set()
    await asyncio.gather(*calls)
    assert held.done == ["a1", "b1", "c1", "a2", "a3"] or held.done == [
        "a1",
        "a2",
        "b1",
        "c1",
        "a3",
    ]


async def test_a_client_that_asks_for_too_much_is_told_so() -> None:
    held, threads = Held(), pool()
    mine = [asyncio.create_task(threads.run("a", lambda: held.call("a"))) for _ in range(5)]
    await asyncio.sleep(0)
    with pytest.raises(RequestError) as refused:
        await threads.run("a", lambda: "a")
    assert (refused.value.status, refused.value.headers["retry-after"]) == (429, "1")
    assert await threads.run("b", lambda: "b") == "b"
    held.may.set()
    await asyncio.gather(*mine)


async def test_a_call_that_nobody_waits_for_is_not_made() -> None:
    held, threads = Held(), pool()
    first, second = (
        asyncio.create_task(threads.run("a", lambda name=name: held.call(name))) for name in "ab"
    )
    await asyncio.sleep(0)
    second.cancel()
    held.may.set()
    await first
    await asyncio.wait({second})
    assert await threads.run("a", lambda: "c") == "c"
    assert held.done == ["a"]


async def test_what_takes_longer_than_it_may_becomes_long_work() -> None:
    paces = list[Pace]()

    def call() -> str:
        paces.append(_turn.get().pace)
        raise OverTimeError("too long")

    with pytest.raises(RequestError, match="too long") as refused:
        await Work().run("a", 1, call)
    assert refused.value.status == 400
    assert [(pace.seconds, pace.nice) for pace in paces] == [
        (QUICK_SECONDS, 0),
        (LONG_SECONDS, NICE),
    ]


async def test_errors_of_calls_are_those_of_who_asked() -> None:
    with pytest.raises(ZeroDivisionError):
        await pool().run("a", lambda: 1 // 0)


def test_bodies_that_are_kept_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "MOST_BODIES", 100)
    monkeypatch.setattr(work, "MOST_OF_CLIENT", 60)
    bodies = Bodies()
    bodies.take("a", 60)
    with pytest.raises(RequestError, match="this client") as refused:
        bodies.take("a", 1)
    assert refused.value.status == 429
    with pytest.raises(RequestError, match="all clients") as refused:
        bodies.take("b", 50)
    assert (refused.value.status, refused.value.headers["retry-after"]) == (503, "1")
    bodies.give_back("a", 60)
    bodies.take("b", 50)


async def test_bodies_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    models = models_of()
    async with served(models) as port:
        head = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        for body in (b"{", b'{"content": 5}', b"[" * 9000):
            answer = await said(port, head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            assert answer.startswith(b"HTTP/1.1 400")
    assert not models.work.bodies._of_client
    assert not models.work.bodies._n_bytes


TOP = tuple(TopLogprob(i, "a", b"a", -1.0) for i in range(100))
PIECE = Piece(1, "a", 1, (TokenLogprob(1, "a", b"a", -1.0, TOP),))


async def test_what_waits_for_a_slow_reader_is_bounded() -> None:
    work, record = Work(), RequestRecord("x", "POST", "/", "127.0.0.1")
    texts = Texts(TextClient(EngineOptions("none.gguf")), [1])
    texts.keep = partial(work.keep, record)
    for _ in range(10_000):
        texts.put(PIECE)
        assert await anext(texts) == [(0, PIECE)]
    assert not record.n_kept
    for _ in range(10_000):
        texts.put(PIECE)
    assert work.bodies._n_bytes < MOST_OF_CLIENT
    await anext(texts)
    with pytest.raises(RequestError, match="this client"):
        await anext(texts)
    work.give_back(record)
    assert not work.bodies._of_client


async def test_an_answer_that_is_sent_whole_is_bounded() -> None:
    work, record = Work(), RequestRecord("x", "POST", "/", "127.0.0.1")
    record.keep = partial(work.keep, record)
    current.set(record)
    lists, logprobs = JsonLists(), as_openai(PIECE.logprobs)
    lists.add(logprobs)
    lists.add(logprobs)
    whole = msgspec.json.decode(to_json(lists.whole("content", "others")))
    assert whole == {"content": 2 * logprobs["content"], "others": []}
    with pytest.raises(RequestError, match="this client"):
        lists.add({"more": ["a" * MOST_OF_CLIENT]})


@pytest.mark.parametrize(
    "body",
    [
        b'{"content":"' + b'\\"' * SMALL,
        b'{"model":5,"content":"' + b"a" * SMALL + b'"}',
        b"[" * SMALL * 2,
        b'{"model":5,"content":[' + b"[]," * SMALL + b"[]]}",
    ],
)
async def test_a_large_body_is_never_read_on_the_loop(
    monkeypatch: pytest.MonkeyPatch, body: bytes
) -> None:
    threads = set[int]()

    def noted(body: bytes) -> Nesting:
        threads.add(threading.get_ident())
        return nesting(body)

    monkeypatch.setattr(json_body, "nesting", noted)
    async with served(models_of()) as port:
        head = b"POST /api/show HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        await said(port, head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    assert threads
    assert threading.get_ident() not in threads


# --- the structure of JSON


class Pieces(bytes):
    """Notes how much of it is taken."""

    taken = 0

    def __getitem__(self, key: Any) -> Any:
        piece = super().__getitem__(key)
        Pieces.taken += len(piece)
        return piece


@pytest.mark.parametrize("unit", [b'\\"', b"\\", b'"', b"a", b"{", b"]", b'\\\\"', b"\\u0041"])
def test_a_body_is_looked_at_once(unit: bytes) -> None:
    body = b'{"content":"' + unit * 200_000
    Pieces.taken, started = 0, time.thread_time()
    with suppress(RequestError):
        nesting(Pieces(body))
    assert Pieces.taken <= len(body)
    assert time.thread_time() - started < 2  # quadratic time was 26 s for a sixth of it


@pytest.mark.parametrize("piece", [1, 2, 3, 7, 64 << 10])
@pytest.mark.parametrize(
    ("text", "levels"),
    [
        (rb'{"a": [1, {"b": "}]{"}]}', 3),
        (rb'{"a\"[[[": "\\\\", "b": ["\\", "[[["]}', 2),
        (rb'"[[[\\\"[[["', 0),
        (rb'["\\", ["\\\\\"]"], "[["]', 2),
        (b"", 0),
        (b'"[', 0),
        (b"[[[", 3),
    ],
)
def test_nesting_is_the_same_in_pieces(
    monkeypatch: pytest.MonkeyPatch, piece: int, text: bytes, levels: int
) -> None:
    monkeypatch.setattr(json_body, "PIECE", piece)
    assert nesting(text).levels == levels


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"[" * (MOST_NESTED + 1), "levels deep"),
        (b"[" + b"{}," * MOST_PARTS + b"1]", "objects, lists and strings"),
        (b"[" + b'"",' * MOST_PARTS + b"1]", "objects, lists and strings"),
        (b"[" + b"1," * (MOST_ITEMS + 1) + b"1]", "commas"),
        (b"[" + b"1e-322," * (MOST_ODD + 1) + b"1]", "exponents"),
        (b"[" + b"2.2250738585072011E-308," * (MOST_ODD + 1) + b"1]", "exponents"),
        (b"[" + b"9" * 4000 + b"," + b"9" * 65 * MOST_ODD + b"]", "24 digits"),
        (b"[" + b"9007199254740993.0," * (21 * MOST_ODD) + b"1]", "24 digits"),
    ],
)
def test_too_much_of_anything_is_refused(body: bytes, says: str) -> None:
    with pytest.raises(RequestError, match=says) as refused:
        nesting(body)
    assert refused.value.status == 400


def test_many_numbers_as_programs_write_them_pass() -> None:
    biases = ",".join(f'"{i}": {i / 7}' for i in range(4096))
    texts = ",".join(['"1e5"'] * 2 * MOST_ODD)
    assert nesting(f'{{"a": {{{biases}}}, "b": [{texts}, true, false, 1e-6]}}'.encode()).levels == 2


async def test_work_for_a_large_body_is_done_in_a_thread() -> None:
    work = models_of().work
    for n_bytes, is_here in ((10, True), (SMALL + 1, False)):
        record = RequestRecord("x", "POST", "/", n_body=n_bytes)
        token = current.set(record)
        found = await work.for_body(threading.get_ident)
        current.reset(token)
        assert (found == threading.get_ident()) == is_here


@pytest.mark.parametrize(
    ("body", "least"),
    [
        (b'{"a": "' + b"a" * 1000 + b'"}', 0),
        (b"[" + b"1," * 1000 + b"1]", 32_000),
        (b"[" + b"[]," * 1000 + b"[]]", 56_000),
        ('{"a": "é' + "a" * 1000 + '"}', 1000),
        ('{"a": "\U0001f600' + "a" * 1000 + '"}', 3000),
        (b'{"a": "\\ud83d\\ude00' + b"a" * 1000 + b'"}', 3000),
    ],
)
def test_values_that_take_more_than_their_text_count_as_much(body: Any, least: int) -> None:
    text = body.encode() if isinstance(body, str) else body
    assert least <= nesting(text).n_bytes < 3 * least + 500


def test_decoders_are_made_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """msgspec crashes where two threads first meet a type at the same time."""
    made, busy = list[type](), threading.Lock()

    def make(kind: type) -> str:
        assert busy.acquire(blocking=False)
        time.sleep(0.02)
        made.append(kind)
        busy.release()
        return kind.__name__

    monkeypatch.setattr(msgspec.json, "Decoder", make)
    monkeypatch.setattr(json_body, "_decoders", {})
    kinds = [type(f"Body{n}", (), {}) for n in range(6)]
    with ThreadPoolExecutor(4) as pool:
        names = list(pool.map(json_body._decoder, [*kinds, *reversed(kinds)]))
    assert names == [f"Body{n}" for n in (*range(6), *reversed(range(6)))]
    assert sorted(one.__name__ for one in made) == sorted(set(names))
