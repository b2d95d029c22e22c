"""A server's prompt cache on the disk: after a stop, after a kill, and on a disk that refuses."""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.program import Program
from support.server import RunningServer

BODY = {"prompt": "Once upon a time a dog ran home. " * 50, "n_predict": 12, "temperature": 0}
LEFT_OUT = ("-c", "1024")


def until(holds: Callable[[], Any], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.slow
def test_texts_are_there_after_a_stop_and_after_a_kill(tmp_path: Path) -> None:
    """And a server with other rows finds nothing; two at the same time do no harm."""
    folder = tmp_path / "made" / "disk"
    options = ("--cache-disk", str(folder), *LEFT_OUT)
    first = RunningServer(*options).wait()
    one = first.post("/completion", BODY)[1]
    other = BODY | {"prompt": "A hen " * 150}
    assert one["timings"]["cache_n"] == 0
    assert first.stop() == 0  # at once

    second = RunningServer(*options).wait()
    again = second.post("/completion", BODY)[1]
    assert again["content"] == one["content"]
    assert again["timings"]["prompt_n"] == 1
    usage = second.post("/v1/completions", {"prompt": BODY["prompt"], "max_tokens": 1})[1]["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] - 1
    hen = second.post("/completion", other)[1]
    written = "localkv_cache_disk_written_bytes_total"
    until(lambda: f"{written} 0.0" not in second.get("/metrics")[1])  # while nobody asks
    until(lambda: second.get("/localkv/cache")[1]["disk"]["bytes_queued"] == 0)
    disk = second.get("/localkv/cache")[1]["disk"]
    assert disk["n_found"] == 1
    assert disk["n_tokens"] == one["tokens_evaluated"] - 1
    assert disk["bytes_now"] > disk["bytes_written"] > 0
    second.process.send_signal(signal.SIGKILL)
    second.process.wait()

    third = RunningServer(*options).wait()
    fourth = RunningServer(*options, "--rope-freq-base", "20000").wait()
    for server, n_evaluated in ((third, 1), (fourth, hen["tokens_evaluated"])):
        found = server.post("/completion", other)[1]
        assert found["timings"]["prompt_n"] == n_evaluated
    assert found["tokens_evaluated"] == hen["tokens_evaluated"]
    assert third.post("/completion", other)[1]["content"] == hen["content"]
    assert third.stop() == fourth.stop() == 0
    for path in (folder, *folder.rglob("*")):
        assert not path.stat().st_mode & 0o077


@pytest.mark.slow
def test_keys_share_nothing_after_a_restart_either(tmp_path: Path) -> None:
    """A key keeps its texts when others come before it, by which keys are numbered."""
    options = ("--cache-disk", str(tmp_path), "--cache-per-key", *LEFT_OUT)

    def cached(server: RunningServer, key: str) -> int:
        n: int = server.post("/completion", BODY, authorization=f"Bearer {key}")[1]["timings"][
            "cache_n"
        ]
        return n

    first = RunningServer("--api-key", "one,two", *options).wait()
    assert cached(first, "one") == 0
    assert first.stop() == 0
    second = RunningServer("--api-key", "a,one,two", *options).wait()
    assert [cached(second, key) for key in ("a", "two")] == [0, 0]
    assert cached(second, "one") > 100
    assert second.stop() == 0
    assert not any(b"Bearer" in path.read_bytes() for path in tmp_path.rglob("*-*"))


@pytest.mark.slow
def test_a_disk_that_refuses_is_told_of_once(tmp_path: Path) -> None:
    """The largest file has room for none of these."""
    limits = {resource.RLIMIT_FSIZE: 100_000}
    server = RunningServer("--cache-disk", str(tmp_path), *LEFT_OUT, limits=limits).wait()
    contents = [server.post("/completion", BODY)[1]["content"] for _ in range(2)]
    assert contents[0] == contents[1]
    until(lambda: any("--cache-disk: File too large" in line for line in server.lines))
    server.post("/completion", BODY | {"prompt": "A hen " * 150})
    assert server.get("/localkv/cache")[1]["disk"]["n_left_out"]
    assert server.stop() == 0
    assert sum("--cache-disk:" in line for line in server.lines) == 1
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "lock"]


def test_what_makes_no_sense_is_refused(program: Program, tmp_path: Path) -> None:
    model = str(Path(__file__).parent.parent.parent / "models" / "tales-4M-Q8_0.gguf")

    def said(*options: str) -> str:
        result = program("serve", "-m", model, "--port", "0", *options)
        assert result.code
        return result.err

    assert "--cache-disk-size is the size of --cache-disk" in said("--cache-disk-size", "1GiB")
    assert "no room" in said("--cache-disk", str(tmp_path), "--cache-disk-size", "0")
    budget = said("--cache-disk", str(tmp_path), "--kv-budget", "64MiB")
    assert "--kv-budget" in budget
    assert "Traceback" not in budget
    tmp_path.chmod(0o777)
    assert "others may write to this folder" in said("--cache-disk", str(tmp_path))
    (tmp_path / "file").touch()
    os.chmod(tmp_path, 0o700)
    assert "file" in said("--cache-disk", str(tmp_path / "file"))
