"""How many threads kernels run on."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from localkv.system import processor, threads


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    threads.default_threads.cache_clear()
    yield
    threads.default_threads.cache_clear()


def _cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, siblings: dict[int, str]) -> None:
    for cpu, text in siblings.items():
        (tmp_path / str(cpu)).write_text(text)
    monkeypatch.setattr(processor, "SIBLINGS", f"{tmp_path}/{{}}")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(siblings), raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


@pytest.mark.parametrize(
    ("siblings", "n"),
    [
        ({0: "0\n", 1: "1\n"}, 2),
        ({0: "0,4\n", 1: "1,5\n", 4: "0,4\n", 5: "1,5\n"}, 2),
        ({1: "1,5\n", 5: "1,5\n"}, 1),
        ({3: "2-3\n"}, 1),
    ],
)
def test_one_for_each_core(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, siblings: dict[int, str], n: int
) -> None:
    _cores(tmp_path, monkeypatch, siblings)
    assert threads.default_threads() == n


def test_fast_cores_count_where_there_are_slow_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _cores(tmp_path, monkeypatch, {0: "0-1\n", 1: "0-1\n", 2: "2\n", 3: "3\n", 4: "4\n"})
    monkeypatch.setattr(processor, "PERFORMANCE", tmp_path / "cpus")
    (tmp_path / "cpus").write_text("0-2\n")
    assert processor.physical_cores() == 2
    assert processor.physical_cores({3, 4}) == 2  # slow ones only
    assert processor.physical_cores({2, 3, 4}) == 1


def test_the_share_of_a_container_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _cores(tmp_path, monkeypatch, {0: "0\n", 1: "1\n", 2: "2\n"})
    for quota, n in ((None, 3), (5.0, 3), (2.0, 2), (1.5, 2), (0.3, 1)):
        monkeypatch.setattr(processor, "cpu_quota", lambda quota=quota: quota)
        assert (processor.physical_cores(), processor.usable_cores()) == (n, n)


def test_cores_of_an_unknown_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _cores(tmp_path, monkeypatch, {0: "0\n", 1: "1\n", 2: "2\n"})
    monkeypatch.setattr(processor, "SIBLINGS", f"{tmp_path}/none/{{}}")
    assert threads.default_threads() == 3


@pytest.mark.parametrize(
    ("asked", "n"), [("2", 2), ("3", 3), ("1000000000", 3), ("0", 3), ("-1", 3), ("abc", 3)]
)
def test_the_environment_has_a_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str, n: int
) -> None:
    _cores(tmp_path, monkeypatch, {0: "0\n", 1: "1\n", 2: "2\n"})
    monkeypatch.setenv("OMP_NUM_THREADS", asked)
    assert threads.default_threads() == n


def test_each_thread_has_its_own_number() -> None:
    before = threads.n_threads()
    seen = []

    def other() -> None:
        seen.append(threads.n_threads())
        threads.use_threads(7)
        seen.append(threads.n_threads())

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert seen == [threads.default_threads(), 7]
    assert threads.n_threads() == before
