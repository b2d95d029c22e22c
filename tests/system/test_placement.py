"""On which processors threads run, where the user names some."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from localkv.errors import UsageError
from localkv.system import threads
from localkv.system.processor import (
    cpu_quota,
    cpus_of_list,
    cpus_of_mask,
    cpus_of_range,
    list_of_cpus,
)
from support.paths import MODELS
from support.program import localkv_process

linux = pytest.mark.skipif(sys.platform != "linux", reason="has no affinity")


@pytest.mark.parametrize(
    ("text", "cpus"),
    [("1", {0}), ("0xF", {0, 1, 2, 3}), ("a0", {5, 7}), ("10000000000000000", {64}), ("0", set())],
)
def test_masks(text: str, cpus: set[int]) -> None:
    assert cpus_of_mask(text) == cpus


@pytest.mark.parametrize("text", ["", "g", "0x", "1-2", "-1", "f" * 300, "1_0"])
def test_no_masks(text: str) -> None:
    with pytest.raises(UsageError, match="no hexadecimal mask"):
        cpus_of_mask(text)


@pytest.mark.parametrize(
    ("text", "cpus"), [("0-3", {0, 1, 2, 3}), ("2-", {2, 3}), ("-1", {0, 1}), ("5-5", {5})]
)
def test_ranges(text: str, cpus: set[int]) -> None:
    assert cpus_of_range(text, 3) == cpus


@pytest.mark.parametrize("text", ["", "-", "3", "3-1", "a-b", "0-1-2", "0-999999", "1,2"])
def test_no_ranges(text: str) -> None:
    with pytest.raises(UsageError, match="range of CPUs"):
        cpus_of_range(text, 3)


@pytest.mark.parametrize("text", ["0", "0-3", "0-1,8-11", "1,3,5"])
def test_lists(text: str) -> None:
    assert list_of_cpus(cpus_of_list(f"{text}\n")) == text


def test_processors_that_may_not_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_allowed", [frozenset({0, 1, 5})])
    threads.check_cpus({0, 5})
    with pytest.raises(UsageError) as raised:
        threads.check_cpus({0, 2, 3, 9})
    assert raised.value.message == "this process can't run on CPU 2-3,9"
    assert raised.value.hint == "it may use 0-1,5"
    with pytest.raises(UsageError, match="no CPU is named"):
        threads.check_cpus(())


def test_systems_that_can_not_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    with pytest.raises(UsageError, match="on Linux only"):
        threads.place_process({0})
    threads.place_process(None)


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (("-C", "zz"), "-C zz: 'zz' is no hexadecimal mask of CPUs"),
        (("-C", "0"), "-C 0: no CPU is named"),
        (("-Cr", "0-99999"), "-Cr 0-99999: this process can't run on CPU"),
    ],
)
@linux
def test_a_wrong_one_is_named(program, flags: tuple[str, ...], line: str) -> None:
    result = program("complete", "-m", MODELS / "tales-4M-F16.gguf", "-p", "x", *flags)
    assert result.code == 2
    assert result.err_lines[0].startswith(f"error: {line}")


LOOK = """
import os, sys
from localkv import LLM
from localkv.kernels.cpu.runtime.thread_pool import _POOL
cpu = min(os.sched_getaffinity(0))
llm = LLM(sys.argv[1], n_ctx=64, n_threads=3)
text = llm.complete("The fox", max_tokens=5, temperature=0).text
assert all(os.sched_getaffinity(t.native_id) == os.sched_getaffinity(0) for t in _POOL.threads)
llm = LLM(sys.argv[1], n_ctx=64, n_threads=4, cpus=[cpu], cpu_strict=True)
assert llm.complete("The fox", max_tokens=5, temperature=0).text == text
assert "4 threads share 1 CPU" in llm.warnings, llm.warnings
assert os.sched_getaffinity(0) == {cpu}
assert [os.sched_getaffinity(t.native_id) for t in _POOL.threads] == [{cpu}] * 3
assert LLM(sys.argv[1], n_ctx=64, cpus=[cpu]).engine.slot.threads.one == 1
print("done")
"""


@linux
@pytest.mark.slow
def test_threads_are_where_they_are_placed() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOOK, MODELS / "tales-4M-F16.gguf"], capture_output=True, text=True
    )
    assert done.stdout == "done\n", done.stderr


@linux
@pytest.mark.slow
def test_the_bench_says_where() -> None:
    cpu = min(os.sched_getaffinity(0))
    flags = ("-m", MODELS / "tales-4M-F16.gguf", "-p", "4", "-n", "0", "-r", "1", "-o", "jsonl")
    process = localkv_process("bench", *flags, "-Cr", f"{cpu}-{cpu}", "--cpu-strict", "1")
    shown, errors = process.communicate(timeout=120)
    row = json.loads(shown)
    assert (row["cpu_mask"], row["cpu_strict"]) == (hex(1 << cpu), True), errors


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "150000 100000\n"}, 1.5),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, None),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/cpu.max": "200000 100000\n",
                "sys/fs/cgroup/a/b/cpu.max": "400000 100000\n",
            },
            2.0,
        ),
        (
            {
                "proc/self/cgroup": "4:cpu,cpuacct:/docker/x\n2:memory:/\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "50000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            0.5,
        ),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "what\n"}, None),
        ({}, None),
    ],
)
def test_quotas_of_containers(tmp_path: Path, files: dict[str, str], quota: float | None) -> None:
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert cpu_quota(tmp_path) == quota
