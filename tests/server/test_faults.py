"""Clients that break off, engines that die, and servers that are ended, while others are served."""

from __future__ import annotations

import os
import signal
import ssl
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

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


@pytest.mark.slow
def test_over_tls_with_a_key(tmp_path: Path):
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    certificate.cert_chain_pems[0].write_to_path(cert)
    certificate.private_key_pem.write_to_path(key)
    (tmp_path / "keys").write_text("sesame\n")
    server = RunningServer(
        "--ssl-cert-file", str(cert), "--ssl-key-file", str(key),
        "--api-key-file", str(tmp_path / "keys"), "--cors", "https://chat.example",
    )  # fmt: skip
    context = ssl.create_default_context()
    authority.configure_trust(context)
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
