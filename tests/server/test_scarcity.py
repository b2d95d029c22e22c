"""Servers that lack something: files, connections, room on the disk, a steady clock."""

from __future__ import annotations

import http.client
import os
import resource
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from support.rude_client import at_work, engine_pid, until
from support.server import RunningServer

STORY = {"prompt": "Once upon a time a dog " * 20, "n_predict": 12, "temperature": 0}
SHORT = {"prompt": "Once", "n_predict": 3}

pytestmark = pytest.mark.slow


@pytest.fixture
def many_files() -> Iterator[None]:
    """Let this process open all the files that the system allows."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def _connected(server: RunningServer, n: int, stack: ExitStack) -> list[socket.socket]:
    url = urlsplit(server.url)
    return [
        stack.enter_context(socket.create_connection((url.hostname, url.port), 30))
        for _ in range(n)
    ]


def _kept(server: RunningServer, stack: ExitStack) -> http.client.HTTPConnection:
    """A connection that was there before the crowd."""
    kept = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=60)
    stack.callback(kept.close)
    _asked(kept)
    return kept


def _asked(kept: http.client.HTTPConnection) -> None:
    kept.request("POST", "/completion", '{"prompt": "Once", "n_predict": 3}')
    answer = kept.getresponse()
    answer.read()
    assert answer.status == 200


def _is_free(server: RunningServer) -> bool:
    """Whether somebody new is served."""
    try:
        return server.post("/completion", SHORT)[0] == 200
    except OSError:
        return False


def test_2000_connections_hold_up_nobody_who_is_served(many_files: None):
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 2100:
        pytest.skip("the system does not allow this process 2,000 connections")
    server = RunningServer().wait()
    try:
        with ExitStack() as stack:
            kept = _kept(server, stack)
            crowd = _connected(server, 2000, stack)
            crowd[-1].settimeout(30)
            answer = crowd[-1].recv(1 << 16)
            assert answer.startswith(b"HTTP/1.1 503 ")
            assert b"too many connections" in answer
            _asked(kept)
        until(lambda: _is_free(server))
    finally:
        assert server.stop() == 0
    assert "Traceback" not in "".join(server.lines)


def test_connections_leave_files_for_an_engine():
    server = RunningServer(limits={resource.RLIMIT_NOFILE: 128}).wait()
    try:
        with ExitStack() as stack:
            kept = _kept(server, stack)
            _connected(server, 300, stack)
            _asked(kept)
            os.kill(engine_pid(server), 9)
            until(lambda: _health(kept) == 503)
            until(lambda: _health(kept) == 200, 60)
            _asked(kept)
        until(lambda: _is_free(server))
    finally:
        assert server.stop() == 0
    said = "".join(server.lines)
    assert "another one is started" in said
    assert "Traceback" not in said
    assert "accept" not in said


def _health(kept: http.client.HTTPConnection) -> int:
    kept.request("GET", "/health")
    answer = kept.getresponse()
    answer.read()
    return answer.status


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="only Linux limits other processes")
def test_a_state_that_may_not_be_so_large_changes_nothing(tmp_path: Path):
    server = RunningServer("--state-dir", str(tmp_path)).wait()
    try:
        text = server.post("/completion", STORY)[1]["content"]
        assert server.post("/slots/0?action=save", {"filename": "a.state"})[0] == 200
        most = (tmp_path / "a.state").stat().st_size // 2
        resource.prlimit(engine_pid(server), resource.RLIMIT_FSIZE, (most, most))
        _finds_no_room(server, tmp_path, text)
    finally:
        assert server.stop() == 0


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on a disk of its own, with 4 MiB."""
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(tmp_path)]
    if os.geteuid() or subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("only root can mount a small disk")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_state_on_a_full_disk_changes_nothing(small_disk: Path):
    server = RunningServer("--state-dir", str(small_disk)).wait()
    try:
        text = server.post("/completion", STORY)[1]["content"]
        assert server.post("/slots/0?action=save", {"filename": "a.state"})[0] == 200
        size = (small_disk / "a.state").stat().st_size
        room = os.statvfs(small_disk)
        (small_disk / "fill").write_bytes(bytes(room.f_bavail * room.f_frsize - size // 2))
        _finds_no_room(server, small_disk, text)
    finally:
        assert server.stop() == 0


def _finds_no_room(server: RunningServer, folder: Path, text: str) -> None:
    """A state can't be saved; the one of before, the folder and the server are as they were."""
    names, before = sorted(os.listdir(folder)), (folder / "a.state").read_bytes()
    for name in ("a.state", "b.state"):
        status, answer = server.post("/slots/0?action=save", {"filename": name})
        assert status == 400
        assert "cannot be written" in answer["error"]["message"]
        assert str(folder) not in answer["error"]["message"]
    assert sorted(os.listdir(folder)) == names
    assert (folder / "a.state").read_bytes() == before
    assert server.post("/completion", STORY)[1]["content"] == text
    assert server.post("/slots/1?action=restore", {"filename": "a.state"})[0] == 200


JUMPING = """
import itertools, time
steady, jumps = time.time, itertools.cycle([0, 86400, -86400, 10**9])
time.time = lambda: steady() + next(jumps)
"""


def test_a_clock_that_jumps_ends_nothing_early_or_late(tmp_path: Path):
    (tmp_path / "sitecustomize.py").write_text(JUMPING)
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    server = RunningServer(
        "--timeout", "3", "-c", "200000", "-n", "-1", env={"PYTHONPATH": path}
    ).wait()
    try:
        created = {server.post("/v1/completions", {**SHORT, "max_tokens": 1})[1]["created"]}
        created.add(server.post("/v1/completions", {**SHORT, "max_tokens": 1})[1]["created"])
        assert max(created) - min(created) > 3600  # it does jump there
        for _ in range(4):
            assert server.post("/completion", SHORT)[0] == 200
        began = time.monotonic()
        assert server.post("/completion", {"prompt": "Once", "ignore_eos": True})[0] == 504
        assert 2.9 < time.monotonic() - began < 30
        until(lambda: at_work(server) == (0, 0, 0))
    finally:
        assert server.stop() == 0
