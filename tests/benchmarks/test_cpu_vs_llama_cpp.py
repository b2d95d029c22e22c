"""`benchmarks/cpu_vs_llama_cpp.py`: one program runs at a time, and none is left behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.paths import ROOT

FOLDER = ROOT / "benchmarks"
sys.path[:0] = [str(FOLDER)]

from alone import Worker  # noqa: E402
from llama_cpp_tables import tables  # noqa: E402

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")

SPINS = f"""
import os, subprocess, sys, threading, time
sys.path[:0] = [{str(FOLDER)!r}]
from alone import answer, commands
def spin():
    while True:
        pass
threading.Thread(target=spin, daemon=True).start()
child = subprocess.Popen(["sleep", "60"])
answer([os.getpid(), child.pid])
for line in commands():
    for _ in range(20):  # a child that was only just started stops a little later
        stats = [open(f"/proc/{{pid}}/stat").read() for pid in line.split()]
        states = [stat.rpartition(")")[2].split()[0] for stat in stats]
        if set(states) == {{"T"}} or str(os.getpid()) in line:
            break
        time.sleep(0.1)
    answer(states)
"""
"""A program whose threads spin while it waits, as OpenMP's do; it answers with others' states."""

PARENT = f"""
import sys, time
sys.path[:0] = [{str(FOLDER)!r}]
from alone import Worker, end_on_signals
from contextlib import closing
end_on_signals()
with closing(Worker([sys.executable, "-c", {SPINS!r}])) as worker:
    print(*worker.ready, flush=True)
    time.sleep(60)
"""


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def all_end(pids: list[int]) -> bool:
    """Within a few seconds."""
    ends = time.monotonic() + 10
    while any(map(is_alive, pids)) and time.monotonic() < ends:
        time.sleep(0.02)
    return not any(map(is_alive, pids))


@pytest.fixture
def workers() -> Iterator[list[Worker]]:
    with contextlib.ExitStack() as stack:
        started = [Worker([sys.executable, "-c", SPINS]) for _ in range(2)]
        for worker in started:
            stack.callback(worker.close)
        yield started


def test_only_the_one_that_was_asked_runs(workers: list[Worker]) -> None:
    """The others and their children are stopped."""
    for worker, other in (workers, workers[::-1]):
        pids = " ".join(map(str, other.ready))
        assert worker.ask(pids) == ["T", "T"]
        assert worker.ask(f"{worker.pid}") != ["T"]


def test_a_stopped_worker_can_be_closed(workers: list[Worker]) -> None:
    pids = [pid for worker in workers for pid in worker.ready]
    assert all(map(is_alive, pids))
    for worker in workers:
        worker.close()
    assert all_end(pids)


def test_a_worker_that_ends_is_named() -> None:
    with pytest.raises(SystemExit, match="exit: ended without an answer"):
        Worker(["sh", "-c", "exit"])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_none_is_left_when_the_benchmark_ends(number: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pids = [*map(int, parent.stdout.readline().split())]
        assert all(map(is_alive, pids))
        parent.send_signal(number)
        parent.wait(10)
    assert all_end(pids)


def test_tables() -> None:
    def row(test: str, pair: str, program: str, *values: float, depth: int = 0) -> dict:
        facts = {"test": test, "pair": pair, "program": program, "depth": depth}
        return {"weights": "q4_K", "values": values, **facts}

    rows = [
        row("tg", "f16", "localkv", 20, 30, 40),
        row("tg", "f16", "llama.cpp", 10, 15, 40),
        row("tg", "q8_0/q4_0", "localkv", 40, 30, 20),
        row("tg", "f16", "localkv", 123.4, 123.4, 123.4, depth=4096),
        row("tg", "q8_0/q4_0", "localkv", 1, 1, 1, depth=4096),
        row("load", "f16", "localkv", 0.25, 0.5),
    ]
    assert tables(rows) == (
        "Decoding, tokens per second\n\n"
        "| Weights | K/V | at 0: localkv | llama.cpp | ratio | to our f16 "
        "| at 4,096: localkv | llama.cpp | ratio | to our f16 |\n"
        f"|{' --- |' * 10}\n"
        "| Q4_K | f16/f16 | 30.0 | 15.0 | 2.00 (1.00-2.00) |  | 123 |  |  |  |\n"
        "| Q4_K | q8_0/q4_0 | 30.0 |  |  | 1.00 (0.50-2.00) | 1.00 |  |  | 0.01 (0.01-0.01) |\n"
        "\nLoading, seconds\n\n"
        "| Weights | K/V | localkv |\n| --- | --- | --- |\n| Q4_K | f16/f16 | 0.38 |\n"
    )


FAKE = """
import json, os
from pathlib import Path
from types import SimpleNamespace as Facts
__version__ = "0.0"
LLAMA_FLASH_ATTN_TYPE_AUTO = -1
def states():
    found = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if stat[1] == str(os.getppid()):
            found[pid] = stat[0]
    return found
def llama_decode(context, batch):
    others = [state for pid, state in states().items() if pid != str(os.getpid())]
    facts = [batch.n_tokens, others, {k: v for k, v in os.environ.items() if "OMP" in k}]
    with open(os.environ["RECORD"], "a") as file:
        print(json.dumps([*facts, vars(context)]), file=file)
    return 0
def llama_context_default_params(): return Facts(n_threads=4)
def llama_init_from_model(model, options): return options
def llama_log_callback(function): return function
def llama_batch_init(n, embeddings, sequences):
    cells = lambda: [0] * n
    return Facts(token=cells(), pos=cells(), n_seq_id=cells(), seq_id=[[0] for _ in range(n)],
                 logits=cells())
def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return lambda *args: None
"""
"""Stands in for llama-cpp-python, and writes down what it is given and what runs beside it."""


@pytest.mark.slow
def test_the_peer_runs_alone_with_its_own_defaults(tmp_path: Path) -> None:
    (tmp_path / "llama_cpp.py").write_text(FAKE)
    peer = tmp_path / "python"
    peer.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    peer.chmod(0o755)
    record, figures = tmp_path / "record", tmp_path / "figures.json"
    flags = ["--small", "--pairs", "f16", "q8_0", "--rounds", "1", "--prompt-rounds", "1"]
    env = {k: v for k, v in os.environ.items() if not k.startswith("OMP")}
    done = subprocess.run(
        [sys.executable, FOLDER / "cpu_vs_llama_cpp.py", "--peer", peer, "--json", figures, *flags],
        env={**env, "RECORD": str(record)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "| Q4_0 | q8_0/q8_0 |" in done.stdout
    calls = [json.loads(line) for line in record.read_text().splitlines()]
    assert {n_tokens for n_tokens, *_ in calls} == {1, 64, 512}
    for _, others, omp, context in calls:
        assert set(others) == {"T"}
        assert len(others) == 3
        assert omp == {}
        assert (context["n_batch"], context["n_ubatch"]) == (2048, 512)
        assert context["n_threads"] <= (os.cpu_count() or 1)
    rows = json.loads(figures.read_text())
    assert {row["program"] for row in rows} == {"localkv", "llama.cpp"}
