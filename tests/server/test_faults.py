"""Clients that break off, engines that die, and servers that are ended, while others are served."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import ssl
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import trustme

from support.rude_client import asked, at_work, engine_pid, read_all, read_until, reset, until
from support.server import RunningServer

IDLE = (0, 0, 0)


def _chat(words: str = "Tell me of a dog.", **fields: object) -> dict[str, object]:
    message = {"role": "user", "content": words}
    return {"messages": [message], "ignore_eos": True, "seed": 7, **fields}


@pytest.mark.parametrize("stage", ["queued", "prompt", "decoding"])
@pytest.mark.parametrize("stream", [True, False])
def test_pages_are_free_when_a_client_is_gone(server: RunningServer, stage: str, stream: bool):
    until(lambda: at_work(server) == IDLE)
    others = [
        asked(server, _chat(f"{n}", stream=True)) for n in range(4 if stage == "queued" else 0)
    ]
    if others:
        until(lambda: at_work(server)[0] == 4)
    long = "One day a dog ran to the park. " * (150 if stage == "prompt" else 1)
    sock = asked(server, _chat(long, stream=stream, max_tokens=1500))
    if stage == "decoding" and stream:
        read_until(sock, b'"content":"')
    elif stage == "queued":
        until(lambda: at_work(server)[1] == 1 or at_work(server) == IDLE)
    else:
        until(lambda: at_work(server)[0] == 1)
    for one in [sock, *others]:
        reset(one)
    until(lambda: at_work(server) == IDLE)
    text = server.get("/metrics")[1]
    assert 'localkv_texts_ended_total{reason="disconnected"}' in text


def test_who_reads_slowly_gets_all_and_holds_up_nobody(server: RunningServer):
    slow = asked(server, _chat(stream=True, max_tokens=60, temperature=0))
    time.sleep(0.3)
    status, _ = server.post("/v1/chat/completions", _chat(max_tokens=5))
    assert status == 200
    data = b""
    while not data.endswith(b"0\r\n\r\n"):
        more = slow.recv(37)
        assert more
        data += more
    slow.close()
    quick = read_all(asked(server, _chat(stream=True, max_tokens=60, temperature=0)))

    def texts(answer: bytes) -> list[bytes]:
        return [part.split(b'"')[0] for part in answer.split(b'"content":"')[1:]]

    assert b"".join(texts(data)) == b"".join(texts(quick))
    assert b"[DONE]" in data


@pytest.mark.slow
def test_each_answer_of_a_crowd_is_the_one_that_it_would_be_alone(server: RunningServer):
    def body(n: int) -> dict[str, object]:
        words = "Tell me of a " + "very big " * (n * 7 % 40) + ["dog", "cat", "owl"][n % 3]
        kinds = [{"temperature": 0}, {"temperature": 1.2}, {"top_k": 3, "repeat_penalty": 1.2}]
        return _chat(words, max_tokens=5 + n % 13, **kinds[n % 3], seed=n)

    def text(n: int) -> object:
        status, answer = server.post("/v1/chat/completions", body(n))
        assert status == 200, answer
        return answer["choices"][0]["message"]["content"]

    with ThreadPoolExecutor(16) as pool:
        crowd = list(pool.map(text, range(48)))
    assert crowd == [text(n) for n in range(48)]
    assert at_work(server) == IDLE


@pytest.mark.slow
def test_an_engine_that_dies_is_replaced_until_it_dies_too_often():
    server = RunningServer().wait()
    try:
        first = server.post("/v1/chat/completions", _chat(max_tokens=5))[1]["choices"]
        for death in range(3):
            sock = asked(server, _chat(stream=True))
            read_until(sock, b'"content":"')
            os.kill(engine_pid(server), signal.SIGKILL)
            died = time.monotonic()
            rest = read_all(sock)
            assert time.monotonic() - died < 5  # a second, on a machine that does nothing else
            assert b'"error":{"code":503' in rest
            assert b"[DONE]" not in rest
            if death < 2:
                assert server.get("/health")[0] == 503
                server.wait()
                again = server.post("/v1/chat/completions", _chat(max_tokens=5))[1]["choices"]
                assert again == first
                assert f"localkv_engine_restarts_total {death + 1}.0" in server.get("/metrics")[1]
        assert server.process.wait(20) == 1
    finally:
        server.stop()
    said = "".join(server.lines)
    assert said.count("another one is started") == 2
    assert "Traceback" not in said


@pytest.mark.slow
def test_an_engine_that_stands_still_holds_up_nothing_else():
    server = RunningServer("--timeout", "2").wait()
    try:
        pid = engine_pid(server)
        os.kill(pid, signal.SIGSTOP)
        assert server.get("/health")[0] == 200
        assert server.get("/metrics")[0] == 200
        status, answer = server.post("/v1/chat/completions", _chat(max_tokens=5))
        assert (status, answer["error"]["code"]) == (504, 504)
        os.kill(pid, signal.SIGCONT)
        assert server.post("/v1/chat/completions", _chat(max_tokens=5))[0] == 200
        until(lambda: at_work(server) == IDLE)
        os.kill(pid, signal.SIGSTOP)
    finally:
        assert server.stop() == 0


@pytest.mark.slow
def test_a_server_that_is_ended_lets_running_requests_end(tmp_path: Path):
    log = tmp_path / "log"
    server = RunningServer("--log-file", str(log)).wait()
    sock = asked(server, _chat(stream=True, max_tokens=400))
    until(lambda: at_work(server)[0] == 1)
    server.process.send_signal(signal.SIGTERM)
    until(lambda: server.get("/health")[0] == 503)
    status, answer = server.post("/v1/chat/completions", _chat(max_tokens=5))
    assert status == 503
    assert "ending" in answer["error"]["message"]
    data = read_all(sock)
    assert b"[DONE]" in data
    assert server.process.wait(20) == 0
    server.stop()
    lines = log.read_text()
    assert '"tokens":400' in lines
    assert "dog" not in lines


@pytest.mark.slow
def test_whoever_asks_twice_does_not_wait():
    server = RunningServer("-c", "20000").wait()
    sock = asked(server, _chat(stream=True, max_tokens=15000))
    until(lambda: at_work(server)[0] == 1)
    server.process.send_signal(signal.SIGINT)
    until(lambda: server.get("/health")[0] == 503)
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(10) == 130
    assert b"the engine was stopped" in read_all(sock)
    server.stop()


DIALECTS = {
    "/v1/chat/completions": _chat(max_tokens=200),
    "/v1/completions": {"prompt": "A dog", "ignore_eos": True, "max_tokens": 200},
    "/completion": {"prompt": "A dog", "ignore_eos": True, "n_predict": 200},
    "/v1/responses": {"input": "A dog", "max_output_tokens": 200},
    "/v1/messages": {"messages": _chat()["messages"], "max_tokens": 200},
    "/api/chat": {"messages": _chat()["messages"], "options": {"num_predict": 200}},
    "/api/generate": {"prompt": "A dog", "options": {"num_predict": 200}},
}
LEAVES = {
    "in the head": lambda head, body: (head[:30], 0.01),
    "before the body": lambda head, body: (head, 0.01),
    "in the body": lambda head, body: (head + body[:20], 0.03),
    "in a chunk": lambda head, body: (_in_chunks(head) + body[:9], 0.03),
    "at once": lambda head, body: (head + body, 0.0),
    "soon": lambda head, body: (head + body, 0.004),
    "in the stream": lambda head, body: (head + body, 0.06),
    "late": lambda head, body: (head + body, 0.15),
    "with two requests": lambda head, body: (2 * (head + body), 0.03),
}
"""Moments: what was sent until then, and how long a client stays after that."""


def _in_chunks(head: bytes) -> bytes:
    lines = [line for line in head.split(b"\r\n") if not line.startswith(b"Content-Length")]
    lines[1:1] = [b"Transfer-Encoding: chunked"]
    return b"\r\n".join(lines) + b"40\r\n"


def _half_close(sock: socket.socket) -> None:
    raw = socket.socket(fileno=os.dup(sock.fileno()))  # without a word of TLS
    raw.shutdown(socket.SHUT_WR)
    raw.close()
    time.sleep(0.05)
    sock.close()


@pytest.fixture(scope="module")
def certified(tmp_path_factory) -> tuple[list[str], ssl.SSLContext]:
    """Options of a server with TLS, and a client's context that trusts it."""
    folder, authority = tmp_path_factory.mktemp("tls"), trustme.CA()
    certificate = authority.issue_cert("127.0.0.1")
    cert, key = folder / "cert.pem", folder / "key.pem"
    certificate.cert_chain_pems[0].write_to_path(cert)
    certificate.private_key_pem.write_to_path(key)
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return ["--ssl-cert-file", str(cert), "--ssl-key-file", str(key)], context


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_client_that_leaves_is_not_worth_a_word(scheme: str, certified):
    options, context = certified if scheme == "https" else ([], None)
    server = RunningServer(*options)
    server.context = context
    server.wait()
    until(lambda: "at a time" in "".join(server.lines))  # it says so just after it is healthy
    url, said = urlsplit(server.url), len(server.lines)

    def leave(case) -> None:
        (path, fields), stream, moment, goes = case
        body = json.dumps({"model": "tales-4M-Q8_0", **fields, "stream": stream}).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: {url.netloc}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        sock = socket.create_connection((url.hostname, url.port), 30)
        if context is not None:
            sock = context.wrap_socket(sock, server_hostname=url.hostname)
        data, seconds = moment(head.encode(), body)
        sock.sendall(data)
        time.sleep(seconds)
        goes(sock)

    ways = (reset, _half_close, socket.socket.close)
    cases = product(DIALECTS.items(), (True, False), LEAVES.values(), ways)
    try:
        with ThreadPoolExecutor(6) as pool:
            list(pool.map(leave, cases))
        until(lambda: at_work(server) == IDLE)
        text = server.get("/metrics")[1]
        assert "llamacpp:requests_processing 0.0" in text
        assert "llamacpp:requests_deferred 0.0" in text
        assert server.post("/v1/chat/completions", _chat(max_tokens=5))[0] == 200
    finally:
        assert server.stop() == 0
    assert server.lines[said:] == []


def _generated(server: RunningServer) -> float:
    found = re.search(r"^localkv_generated_tokens_total (\S+)", server.get("/metrics")[1], re.M)
    return float(found[1]) if found else 0.0


@pytest.mark.slow
def test_whoever_left_with_a_second_request_waiting_has_neither_written(server: RunningServer):
    until(lambda: at_work(server) == IDLE)
    before = _generated(server)
    sock = asked(server, _chat(stream=True, max_tokens=1900))
    body = json.dumps(_chat(max_tokens=1900)).encode()
    sock.sendall(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json"
        b"\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    )
    read_until(sock, b'"content":"')
    reset(sock)
    until(lambda: at_work(server) == IDLE)
    assert _generated(server) - before < 1500


@pytest.mark.slow
def test_over_tls_with_a_key(tmp_path: Path, certified):
    options, context = certified
    (tmp_path / "keys").write_text("sesame\n")
    server = RunningServer(
        *options, "--api-key-file", str(tmp_path / "keys"), "--cors", "https://chat.example",
    )  # fmt: skip
    try:
        assert server.url.startswith("https://127.0.0.1")
        request = urllib.request.Request(
            server.url + "/v1/models", headers={"authorization": "Bearer sesame"}
        )
        with urllib.request.urlopen(request, context=context) as answer:
            assert answer.status == 200
        with pytest.raises(OSError, match="certificate"):
            urllib.request.urlopen(server.url + "/health", context=ssl.create_default_context())
    finally:
        assert server.stop() == 0
    assert "sesame" not in "".join(server.lines)
