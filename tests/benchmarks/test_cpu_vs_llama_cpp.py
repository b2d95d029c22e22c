"""`benchmarks/cpu_vs_llama_cpp.py`: one program runs at a time, and none is left behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import struct
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
from random_model import shape_of, write_model  # noqa: E402
from speed_programs import repeated_state  # noqa: E402
from speed_report import Figure, Report  # noqa: E402

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


def figure(
    test: str, pair: str, program: str, *values: float, depth: int = 0, n_bytes: float = 0
) -> Figure:
    reads = [1e9, 1e9, 4e9][: len(values)] if n_bytes else ()
    return Figure("", "llama", "q4_K", pair, depth, test, program, values, n_bytes, reads)


def test_tables() -> None:
    report = Report("A processor", 2)
    report.figures = [
        figure("tg", "f16", "localkv", 20, 30, 40),
        figure("tg", "f16", "llama.cpp", 10, 15, 40),
        figure("tg", "q8_0/q4_0", "localkv", 40, 30, 20),
        figure("tg", "f16", "localkv", 123.4, depth=4096),
        figure("tg", "q8_0/q4_0", "localkv", 1, depth=4096),
        figure("load", "f16", "localkv", 0.25, 0.5),
    ]
    assert report.tables("") == (
        "Decoding, tokens per second:\n\n"
        "| K/V | at 0: localkv | llama.cpp | ratio | to our f16 "
        "| at 4,096: localkv | llama.cpp | ratio | to our f16 |\n"
        f"|{' --- |' * 9}\n"
        "| f16/f16 | 30.0 | 15.0 | 2.00 (1.00-2.00) |  | 123 |  |  |  |\n"
        "| q8_0/q4_0 | 30.0 |  |  | 1.00 (0.50-2.00) | 1.00 |  |  | 0.01 |\n"
        "\nLoading, seconds:\n\n"
        "| Weights | localkv |\n| --- | --- |\n| Q4_K | 0.38 |\n"
    )


def test_tables_with_two_peers() -> None:
    """A peer's column has the better of its programs, and ratios are to the best peer."""
    report = Report("A processor", 2)
    report.figures = [
        figure("pp", "f16", "localkv", 30, 36),
        figure("pp", "f16", "llama.cpp", 10, 12),
        figure("pp", "f16", "ik_llama.cpp", 15, 18),
        figure("pp", "f16", "ik_llama.cpp -rtr 1", 20, 30),
        figure("pp", "q8_0", "localkv", 30, 36),
        figure("pp", "q8_0", "ik_llama.cpp", 11),
    ]
    *_, table = report.tables("").split("\n\n")
    assert table == (
        "| K/V | localkv | llama.cpp | ik_llama.cpp | to the best | to our f16 |\n"
        f"|{' --- |' * 6}\n"
        "| f16/f16 | 33.0 | 11.0 | 25.0 | 1.35 (1.20-1.50) |  |\n"
        "| q8_0/q8_0 | 33.0 |  | 11.0 | 3.00 | 1.00 (1.00-1.00) |\n"
    )


def test_cost_of_depth() -> None:
    """Per 1,000 tokens, as a part of what it costs with f16, and as bytes that were read."""
    report = Report("A processor", 2)
    report.figures = [
        figure("tg", "f16", "localkv", 50, n_bytes=1e7),
        figure("tg", "q4_0", "localkv", 50, n_bytes=1e7),
        figure("tg", "q4_0", "llama.cpp", 100),
        figure("tg", "f16", "localkv", 25, depth=10_000, n_bytes=2e7),
        figure("tg", "q4_0", "localkv", 40, depth=10_000, n_bytes=1.25e7),
        figure("tg", "q4_0", "llama.cpp", 10, depth=10_000),
    ]
    *_, last = report.tables("").split("\n\n")
    assert last == (
        "| K/V | to 10,000: localkv | of our f16 | of the memory | llama.cpp |\n"
        f"|{' --- |' * 5}\n"
        "| f16/f16 | 2.00 | 1.00 | 50% |  |\n"
        "| q4_0/q4_0 | 0.50 | 0.25 | 50% | 9.00 |\n"
    )


def test_share_of_the_memory() -> None:
    """Each round is compared with the memory's bandwidth of its own minute."""
    report = Report("A processor", 2)
    report.figures = [figure("tg", "f16", "localkv", 20, 40, 80, n_bytes=1e7)]
    assert report.figures[0].share == pytest.approx(0.2)  # of 0.2, 0.4 and 0.2
    assert "| Q4_K | 40.0 | 20% |" in report.tables("")
    assert report.about().startswith("A processor, 2 processors, memory read at 1 to 4 GB/s")


def test_several_sequences() -> None:
    """A line for each number; the last column compares with our one."""
    report = Report("A processor", 2)
    report.figures = [
        figure("tg x1", "f16", "localkv", 40),
        figure("tg x1", "f16", "llama.cpp", 50),
        figure("tg x8", "f16", "localkv", 160),
        figure("tg x8", "f16", "llama.cpp", 80),
    ]
    *_, last = report.tables("").split("\n\n")
    assert last == (
        "| K/V | sequences | localkv | llama.cpp | ratio | to our one |\n"
        f"|{' --- |' * 6}\n"
        "| f16/f16 | 1 | 40.0 | 50.0 | 0.80 |  |\n"
        "| f16/f16 | 8 | 160 | 80.0 | 2.00 | 4.00 |\n"
    )


@pytest.mark.slow
def test_several_sequences_of_a_small_model(tmp_path: Path) -> None:
    flags = ["--small", "--pairs", "f16", "--parallel", "1", "3", "--depths", "32"]
    flags += ["--rounds", "1", "--decode", "2", "--json", str(tmp_path / "figures.json")]
    done = subprocess.run(
        [sys.executable, FOLDER / "cpu_vs_llama_cpp.py", *flags], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "| f16/f16 | 3 |" in done.stdout
    tests = [one.test for one in Report.read(tmp_path / "figures.json").figures]
    assert tests == ["tg x1", "tg x3"]


def test_newer_figures_take_the_place_of_older_ones(tmp_path: Path) -> None:
    report = Report("A processor", 2, {"localkv": "localkv 1"})
    report.add([figure("tg", "f16", "localkv", 1), figure("pp", "f16", "localkv", 2)])
    report.add([figure("tg", "f16", "localkv", 3)])
    report.write(tmp_path / "figures.json")
    kept = Report.read(tmp_path / "figures.json")
    assert [(one.test, list(one.values)) for one in kept.figures] == [("pp", [2]), ("tg", [3])]
    assert (kept.cpu, kept.programs) == (report.cpu, report.programs)


def test_a_state_of_llama_cpp_is_repeated() -> None:
    """Two cells of two layers become five; types and sizes of rows stay."""

    def state(cells: list[int]) -> bytes:
        parts = [b"mark", struct.pack("<iII", 0, 1, len(cells))]
        parts += [struct.pack("<iIi", i, 1, 0) for i in range(len(cells))]
        parts.append(struct.pack("<II", 0, 2))
        for kind, size in ((8, 34), (8, 34), (2, 18), (2, 18)):
            parts.append(struct.pack("<iQ", kind, size))
            parts += [bytes([kind + cell] * size) for cell in cells]
        return b"".join(parts)

    assert repeated_state(state([0, 1]), 5) == state([0, 1, 0, 1, 0])
    with pytest.raises(RuntimeError, match="unknown form"):
        repeated_state(state([0, 1]) + b"more", 5)


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
def llama_model_load_from_file(path, options): return 1
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
    assert "| q8_0/q8_0 |" in done.stdout
    assert {one.program for one in Report.read(figures).figures} == {"localkv", "llama.cpp"}
    calls = [json.loads(line) for line in record.read_text().splitlines()]
    assert {n_tokens for n_tokens, *_ in calls} == {1, 64, 512}
    for _, others, omp, context in calls:
        assert set(others) == {"T"}
        assert len(others) == 3
        assert omp == {}
        assert (context["n_batch"], context["n_ubatch"]) == (2048, 512)
        assert context["n_threads"] <= (os.cpu_count() or 1)


BENCH = """#!{python}
import json, os, sys
from pathlib import Path
def state(pid):
    try:
        return Path(f"/proc/{{pid}}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # it has ended
        return [None, None]
pids = filter(str.isdigit, os.listdir("/proc"))
mine = os.getppid()
others = [pid for pid in pids if state(pid)[1] == state(mine)[1] and int(pid) != mine]
with open("{record}", "a") as file:
    print(json.dumps([sys.argv[1:], [state(pid)[0] for pid in others]]), file=file)
types = (sys.argv[sys.argv.index(option) + 1] for option in ("-ctk", "-ctv"))
k, v = (one if one in ("f16", "q8_0", "q4_0") else "f16" for one in types)
facts = {{"build_commit": "0a1b2c3", "n_threads": 2, "avg_ts": 8.0, "type_k": k, "type_v": v}}
print(json.dumps([facts]))
"""
"""Stands in for llama-bench, and writes down its options and what runs beside it."""


@pytest.mark.slow
def test_the_second_peer_is_a_bench(tmp_path: Path) -> None:
    """It is asked for each round, but once at a depth, and not for prompts there. What it measures
    with f16 in place of a type that it doesn't know does not count."""
    model = tmp_path / "a-model.Q4_0.gguf"
    write_model(model, shape_of("llama-tiny"), "q4_0")
    record, bench, figures = (tmp_path / name for name in ("record", "bench", "figures.json"))
    bench.write_text(BENCH.format(python=sys.executable, record=record))
    bench.chmod(0o755)
    flags = ["--second-peer", bench, "--files", model, "--json", figures]
    flags += ["--pairs", "q8_0/q4_0", "q4_1c/q4_0"]
    flags += ["--depths", "0", "64", "--rounds", "2", "--prompt-rounds", "1", "--decode", "8"]
    done = subprocess.run(
        [sys.executable, FOLDER / "cpu_vs_llama_cpp.py", *flags], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "ik_llama.cpp 0a1b2c3 with 2 threads" in done.stdout
    assert f"{bench}: no q4_1c/q4_0 cache" in done.stderr
    of_pairs = {(one.program, one.pair) for one in Report.read(figures).figures}
    assert of_pairs - {("localkv", "q4_1c/q4_0")} == {
        (name, "q8_0/q4_0") for name in ("localkv", "ik_llama.cpp", "ik_llama.cpp -rtr 1")
    }
    known = [one for one in Report.read(figures).figures if one.pair == "q8_0/q4_0"]
    found = {(one.program, one.test, one.depth): one for one in known}
    for program in ("ik_llama.cpp", "ik_llama.cpp -rtr 1"):
        tests = {(test, depth) for name, test, depth in found if name == program}
        assert tests == {("tg", 0), ("pp", 0), ("tg", 64)}
        assert list(found[program, "tg", 0].values) == [8.0, 8.0]
        assert list(found[program, "tg", 64].values) == [8.0]
    calls = [json.loads(line) for line in record.read_text().splitlines()]
    common = ["-m", str(model), "-ctk", "q8_0", "-ctv", "q4_0"]
    refused = [options for options, _ in calls if "q4_1c" in options]
    assert len(refused) == 2
    calls = [call for call in calls if "q4_1c" not in call[0]]
    for options, others in calls:
        assert set(others) <= {"T"}
        assert options[2:8] == common if options[0] == "-rtr" else options[:6] == common
    assert sum("-gp" in options for options, _ in calls) == 2
    assert all("64,16" in options for options, _ in calls if "-gp" in options)
