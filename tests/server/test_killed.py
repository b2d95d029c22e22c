"""Processes of a server that are killed, at each stage of their work; and damaged states."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from support.rude_client import asked, at_work, children, engine_pid, read_all, read_until, until
from support.server import SHIPPED_MODEL, RunningServer

STORY = {"prompt": "Once upon a time a dog " * 40, "n_predict": 8, "temperature": 0}
CHAT = {"messages": [{"role": "user", "content": "Tell me of a dog."}], "ignore_eos": True}

pytestmark = pytest.mark.slow


def _kill_engine(server: RunningServer) -> int:
    """Its process, which is no more."""
    pid = engine_pid(server)
    os.kill(pid, signal.SIGKILL)
    until(lambda: not _runs(pid))
    return pid


def _runs(pid: int) -> bool:
    """Whether a process is there, and not only waits for its parent to notice its end."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def _has_other_engine(server: RunningServer, than: int) -> bool:
    try:
        return engine_pid(server) != than
    except AssertionError:
        return False


def test_an_engine_killed_as_it_loads_for_the_first_time_ends_the_server():
    server = RunningServer()
    try:
        until(lambda: _has_other_engine(server, 0))
        os.kill(engine_pid(server), signal.SIGKILL)
        assert server.process.wait(30) == 1
    finally:
        server.stop()
    assert "error: the engine stopped (SIGKILL)" in "".join(server.lines)
    assert "Traceback" not in "".join(server.lines)


def test_an_engine_killed_in_a_prompt_and_the_next_as_it_loads():
    server = RunningServer("-c", "16384").wait()
    try:
        first = server.post("/completion", STORY)[1]["content"]
        with ThreadPoolExecutor() as pool:
            long = pool.submit(server.post, "/completion", {"prompt": [7] * 16000, "n_predict": 1})
            until(lambda: at_work(server)[0] == 1)
            pid = _kill_engine(server)
            status, answer = long.result()
        assert (status, answer["error"]["code"]) == (503, 503)
        until(lambda: _has_other_engine(server, pid))
        _kill_engine(server)
        until(lambda: server.get("/metrics")[1].count("localkv_engine_restarts_total 2.0") == 1)
        server.wait()
        assert server.post("/completion", STORY)[1]["content"] == first
        until(lambda: at_work(server) == (0, 0, 0))
    finally:
        assert server.stop() == 0
    assert "Traceback" not in "".join(server.lines)


def test_an_engine_killed_as_it_saves_leaves_a_whole_state(tmp_path: Path):
    server = RunningServer("--state-dir", str(tmp_path)).wait()
    save = ("/slots/0?action=save", {"filename": "a.state"})
    try:
        first = server.post("/completion", STORY)[1]["content"]
        assert server.post(*save)[0] == 200
        for pause in (0.0, 0.002):
            server.post("/completion", STORY)
            with ThreadPoolExecutor() as pool:
                saving = pool.submit(lambda: [server.post(*save)[0] for _ in range(20)])
                time.sleep(0.05 + pause)
                _kill_engine(server)
                # at most one was being done; there is nothing to save then, and soon no engine
                assert set(saving.result()) <= {200, 503, 400}
            server.wait()
            status, answer = server.post("/slots/1?action=restore", {"filename": "a.state"})
            assert status == 200, answer
            again = server.post("/completion", STORY)[1]
            assert again["content"] == first
            assert again["timings"]["cache_n"] > 100
    finally:
        assert server.stop() == 0


@pytest.mark.parametrize("is_working", [True, False])
def test_nothing_is_left_of_a_server_whose_front_is_killed(is_working: bool):
    server = RunningServer().wait()
    server.post("/v1/chat/completions", {**CHAT, "max_tokens": 1})
    started = children(server)
    assert len(started) == 2  # the engine, and the process of templates
    with asked(server, {**CHAT, "stream": True, "max_tokens": 1500 if is_working else 1}) as sock:
        read_until(sock, b'"content":"' if is_working else b"[DONE]")
        server.process.kill()
        server.process.wait()
    until(lambda: not any(map(_runs, started)))
    server.stop()


def test_the_process_of_templates_is_replaced():
    server = RunningServer().wait()
    try:
        body = {**CHAT, "max_tokens": 3, "seed": 1}
        first = server.post("/v1/chat/completions", body)[1]["choices"]
        (templates,) = set(children(server)) - {engine_pid(server)}
        os.kill(templates, signal.SIGKILL)
        assert server.post("/v1/chat/completions", body)[1]["choices"] == first
    finally:
        assert server.stop() == 0


def test_a_server_ended_under_load_answers_all_that_it_began(tmp_path: Path):
    server = RunningServer("-np", "2", "--queue", "64").wait()
    body = {**CHAT, "stream": True, "max_tokens": 1000, "seed": 1}
    try:
        socks = [asked(server, body) for _ in range(12)]
        until(lambda: sum(at_work(server)[:2]) == len(socks))
        server.process.send_signal(signal.SIGTERM)
        with ThreadPoolExecutor(len(socks)) as pool:
            answers = list(pool.map(read_all, socks))
        assert all(b"[DONE]" in answer for answer in answers)
        assert server.process.wait(30) == 0
    finally:
        server.stop()


def test_who_is_not_done_in_time_is_told_so():
    server = RunningServer("-c", "100000", "--drain", "1").wait()
    try:
        sock = asked(server, {**CHAT, "stream": True, "max_tokens": 90000})
        read_until(sock, b'"content":"')
        server.process.send_signal(signal.SIGTERM)
        rest = read_all(sock)
        assert b'"error":{"code":503' in rest
        assert b"[DONE]" not in rest
        assert server.process.wait(30) == 0
    finally:
        server.stop()


def test_damaged_states_change_nothing(tmp_path: Path):
    server = RunningServer("--state-dir", str(tmp_path)).wait()
    draw, file = random.Random(5), tmp_path / "a.state"
    try:
        first = server.post("/completion", STORY)[1]["content"]
        assert server.post("/slots/0?action=save", {"filename": "a.state"})[0] == 200
        whole = file.read_bytes()
        assert server.post("/slots/0?action=erase", b"")[0] == 200
        damaged = [whole[: draw.randrange(len(whole))] for _ in range(10)]
        for _ in range(20):
            at = draw.randrange(len(whole) if draw.random() < 0.5 else 2000)
            damaged.append(
                whole[:at] + bytes([whole[at] ^ 1 << draw.randrange(8)]) + whole[at + 1 :]
            )
        for data in damaged:
            file.write_bytes(data)
            status, answer = server.post("/slots/0?action=restore", {"filename": "a.state"})
            assert status == 400, answer
            assert at_work(server) == (0, 0, 0)
        again = server.post("/completion", STORY)[1]
        assert (again["content"], again["timings"]["cache_n"]) == (first, 0)
    finally:
        assert server.stop() == 0


def test_the_port_is_free_when_a_server_is_gone():
    """A server that is started again at once gets the address of the one before."""
    server = RunningServer().wait()
    sock = asked(server, {**CHAT, "stream": True, "max_tokens": 1500})
    read_until(sock, b'"content":"')
    port = server.url.rpartition(":")[2]
    server.process.kill()
    server.process.wait()
    command = [sys.executable, "-m", "localkv", "serve", "-m", str(SHIPPED_MODEL)]
    with subprocess.Popen([*command, "--port", port], stderr=subprocess.PIPE, text=True) as again:
        assert again.stderr is not None
        assert f"listening on http://127.0.0.1:{port};" in again.stderr.readline()
        again.terminate()
        again.stderr.read()
    sock.close()
    server.stop()
