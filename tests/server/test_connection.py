"""Connections that cost something and ask for nothing; by bytes on a socket."""

from __future__ import annotations

import asyncio
import re

import pytest

from localkv.server import access, http_server
from support.front import models_of, said, served

GET = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n"


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Limits of a fraction of a second."""
    monkeypatch.setattr(http_server, "HEAD_SECONDS", 0.15)
    monkeypatch.setattr(http_server, "STUCK_SECONDS", 0.2)
    monkeypatch.setattr(http_server, "LINGER_SECONDS", 0.05)
    monkeypatch.setattr(access, "BODY_SECONDS", 0.15)


def _run(port_uses, app=None):
    async def main():
        async with served(models_of(), app) as port:
            return await port_uses(port)

    return asyncio.run(main())


def test_a_connection_without_a_request_is_closed():
    assert _run(said) == b""


@pytest.mark.parametrize("parts", [(b"GET / HT",), (GET, b"X: ", b"1\r\n"), (b"\r\n", b"\r\n")])
def test_half_a_head_is_not_waited_for(parts):
    answer = _run(lambda port: said(port, *parts, pause=0.06))
    assert answer.startswith(b"HTTP/1.1 408") or not answer


def test_a_head_of_any_size_is_not_kept():
    answer = _run(lambda port: said(port, GET + b"X: ", *[b"a" * 32768] * 4))
    assert answer.startswith(b"HTTP/1.1 431")


@pytest.mark.parametrize("kind", [b"Content-Length: 10\r\n", b"Transfer-Encoding: chunked\r\n"])
def test_half_a_body_is_not_waited_for(kind):
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n" + kind + b"\r\n"
    answer = _run(lambda port: said(port, head, b"2\r\n{", pause=0.05))
    assert answer.startswith(b"HTTP/1.1 408")
    assert b"timeout_error" in answer


def test_the_rest_of_a_body_that_was_refused_is_not_waited_for():
    head = b"POST /nowhere HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n"
    answer = _run(lambda port: said(port, head, *[b"a"] * 6, pause=0.03))
    assert answer.startswith(b"HTTP/1.1 404")


def test_no_body_is_asked_for_that_is_too_large():
    head = (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\n"
        b"Connection: close\r\nContent-Length: "
    )
    answer = _run(lambda port: said(port, head + b"9000000\r\n\r\n"))
    assert answer.startswith(b"HTTP/1.1 413")
    answer = _run(lambda port: said(port, head + b"2\r\n\r\n", b"{", b"]", pause=0.01))
    assert answer.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 400")


@pytest.mark.parametrize(
    "bad",
    [
        b"\x16\x03\x01 hello\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
)
def test_what_is_not_http_is_refused(bad):
    answer = _run(lambda port: said(port, bad))
    assert answer.startswith((b"HTTP/1.1 400", b"HTTP/1.1 404", b"HTTP/1.1 408"))


def test_requests_one_after_the_other_are_answered_in_order():
    last = GET + b"Connection: close\r\n\r\n"
    missing = b"GET /none HTTP/1.1\r\nHost: localhost\r\n\r\n"
    answer = _run(lambda port: said(port, GET + b"\r\n" + missing + last))
    assert re.findall(rb"HTTP/1.1 (\d+)", answer) == [b"200", b"404", b"200"]


def test_who_sends_requests_without_end_is_cut_off():
    async def slow(scope, receive, send):
        await asyncio.sleep(5)

    answer = _run(lambda port: said(port, (GET + b"\r\n") * 40), slow)
    assert answer == b""


def test_only_so_many_connect(monkeypatch):
    monkeypatch.setattr(http_server, "MOST_CONNECTIONS", 5)
    monkeypatch.setattr(http_server, "HEAD_SECONDS", 5)

    async def many(port):
        others = [await asyncio.open_connection("127.0.0.1", port) for _ in range(5)]
        await asyncio.sleep(0.02)
        refused = await said(port, GET + b"\r\n")
        others.pop()[1].close()
        await asyncio.sleep(0.02)
        served_again = await said(port, GET + b"Connection: close\r\n\r\n")
        for _, writer in others:
            writer.close()
        return refused, served_again

    refused, served_again = _run(many)
    assert refused.startswith(b"HTTP/1.1 503")
    assert b"retry-after" in refused
    assert served_again.startswith(b"HTTP/1.1 200")


def test_who_does_not_read_is_cut_off():
    cut_off = asyncio.Event()

    async def endless(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        waiting = asyncio.ensure_future(receive())
        while not waiting.done() or waiting.result()["type"] != "http.disconnect":
            if waiting.done():
                waiting = asyncio.ensure_future(receive())
            await send({"type": "http.response.body", "body": b"a" * 100000, "more_body": True})
            await asyncio.sleep(0)
        cut_off.set()

    async def stuck(port):
        _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1000)
        writer.write(GET + b"\r\n")
        await asyncio.wait_for(cut_off.wait(), 5)
        writer.close()

    _run(stuck, endless)


def test_there_are_only_so_many_headers():
    answer = _run(lambda port: said(port, GET + b"a:\r\n" * 200 + b"\r\n"))
    assert answer.startswith(b"HTTP/1.1 431")
    elsewhere = b"GET /nowhere HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    answer = _run(lambda port: said(port, elsewhere + b"a:\r\n" * 100 + b"\r\n"))
    assert answer.startswith(b"HTTP/1.1 404")


def test_a_body_of_tiny_chunks_is_refused():
    head = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    answer = _run(lambda port: said(port, head, b"1\r\na\r\n" * 1000))
    assert answer.startswith(b"HTTP/1.1 400")
    assert answer.count(b"HTTP/1.1") == 1
    assert b"chunks have fewer than" in answer
