"""How much memory there is, as /proc, control groups and NVIDIA's library tell it."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from localkv.system.machine_memory import gpu_memory, machine_memory, without_runtime

MIB = 1 << 20


def machine(root: Path, available_mib: int, cgroup: str) -> Path:
    (root / "proc/self").mkdir(parents=True)
    lines = ("MemTotal: 9999999 kB", f"MemAvailable: {available_mib * 1024} kB", "HugePages: 0")
    (root / "proc/meminfo").write_text("\n".join(lines) + "\n")
    (root / "proc/self/cgroup").write_text(cgroup)
    return root


def group(root: Path, path: str, limit: str, used_mib: int, files_mib: int) -> None:
    folder = root / "sys/fs/cgroup" / path
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used_mib * MIB}\n")
    half = files_mib * MIB // 2
    (folder / "memory.stat").write_text(f"anon 7\ninactive_file {half}\nactive_file {half}\n")


def group_v1(root: Path, path: str, limit: int, used_mib: int, files_mib: int) -> None:
    folder = root / "sys/fs/cgroup/memory" / path
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{used_mib * MIB}\n")
    stat = f"inactive_file 1\ntotal_inactive_file {files_mib * MIB}\n"
    (folder / "memory.stat").write_text(stat)


def test_without_groups_it_is_the_machine(tmp_path: Path) -> None:
    found = machine_memory(machine(tmp_path, 100, "0::/\n"))
    assert found is not None
    assert found.n_bytes == 100 * MIB
    assert found.source == "available on this machine"


def test_the_tightest_group_on_the_way_up(tmp_path: Path) -> None:
    """Files that the group has cached can be dropped, so they count as free."""
    root = machine(tmp_path, 1000, "0::/a/b\n")
    group(root, "a/b", "max", 1, 0)
    group(root, "a", str(500 * MIB), 300, 200)
    found = machine_memory(root)
    assert found is not None
    assert found.n_bytes == 400 * MIB
    assert "container" in found.source
    group(root, "a/b", str(50 * MIB), 60, 0)
    assert machine_memory(root).n_bytes == 0


def test_a_group_with_more_than_the_machine_has(tmp_path: Path) -> None:
    root = machine(tmp_path, 100, "0::/a\n")
    group(root, "a", str(500 * MIB), 0, 0)
    assert machine_memory(root).n_bytes == 100 * MIB


def test_version_1(tmp_path: Path) -> None:
    root = machine(tmp_path, 1000, "5:cpu:/x\n4:memory:/x\n0::/\n")
    group_v1(root, "x", (1 << 63) - 4096, 5, 0)  # what no limit is there
    assert machine_memory(root).n_bytes == 1000 * MIB
    group_v1(root, "x", 200 * MIB, 150, 30)
    assert machine_memory(root).n_bytes == 80 * MIB


def test_a_container_sees_its_own_group_at_the_root(tmp_path: Path) -> None:
    root = machine(tmp_path, 1000, "4:memory:/docker/0123\n")
    group_v1(root, "", 200 * MIB, 150, 0)
    assert machine_memory(root).n_bytes == 50 * MIB


def test_a_system_that_does_not_tell(tmp_path: Path) -> None:
    assert machine_memory(tmp_path) is None


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_this_machine() -> None:
    found = machine_memory()
    assert found is not None
    assert 16 * MIB < found.n_bytes < 1 << 50


class FakeNvml:
    """NVIDIA's library, with two GPUs."""

    NVMLError = RuntimeError
    open = 0

    def __init__(self, works: bool = True) -> None:
        self.works = works

    def nvmlInit(self) -> None:  # noqa: N802
        if not self.works:
            raise self.NVMLError("no driver")
        self.open += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.open -= 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        if index > 1:
            raise self.NVMLError("no such GPU")
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:  # noqa: N802
        return {"GPU-b": 1}[uuid]

    def nvmlDeviceGetName(self, handle: int) -> str:  # noqa: N802
        return f"GPU {handle}"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:  # noqa: N802
        return SimpleNamespace(free=(handle + 1) * 1000 * MIB)


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, 1000),
        ("0,1", 1000),
        ("1", 2000),
        ("GPU-b", 2000),
        ("", None),
        ("-1", None),
        ("7", None),
    ],
)
def test_the_gpu_that_cuda_would_take(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, expected: int | None
) -> None:
    library = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", library)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = gpu_memory()
    assert (None if found is None else found.n_bytes // MIB) == expected
    assert library.open == 0


def test_no_driver_and_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(works=False))
    assert gpu_memory() is None
    monkeypatch.setitem(sys.modules, "pynvml", None)  # as if it weren't installed
    assert gpu_memory() is None


def test_what_the_program_itself_takes(tmp_path: Path) -> None:
    found = machine_memory(machine(tmp_path, 1000, ""))
    less = without_runtime(found, "cpu")
    assert less.n_bytes == (1000 - 128) * MIB
    assert less.source == "available on this machine less 128 MiB for the program itself"
