"""What is looked at on a machine, with each problem that it can have."""

from __future__ import annotations

import os
import sqlite3
import stat
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from localkv.chat.store import SCHEMA_VERSION, Store
from localkv.doctor import checks, probe
from localkv.doctor.checks import Check, Finding, check_memory, examine
from localkv.doctor.probe import ProbeError, Probes
from localkv.system import gpu_files

CPU = {
    "numba": "0.62",
    "x86": True,
    "vectors": "AVX2",
    "byte_dots": "AVX2",
    "avx2": True,
    "avx512": False,
    "vnni": False,
    "avx512_bf16": False,
}
H200 = {"name": "NVIDIA H200", "capability": "9.0", "bytes": 139 << 30}
NO_GPU: dict[str, Any] = {"devices": [], "reason": "torch sees no GPU", "remedy": "nvidia-smi"}


class FakeProbes:
    """Probes that have told `facts`, or failed with a text."""

    def __init__(self, **facts: Any) -> None:
        self.answers = facts

    def facts(self, name: str) -> dict[str, Any]:
        answer = self.answers[name]
        if isinstance(answer, str):
            raise ProbeError(answer)
        return dict(answer)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An NVIDIA driver, without its library."""
    folder = tmp_path / "nvidia"
    folder.mkdir()
    (folder / "version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15\n")
    monkeypatch.setattr(gpu_files, "DRIVER", folder)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    return folder


@pytest.fixture
def no_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpu_files, "DRIVER", tmp_path / "nothing")
    monkeypatch.setattr(gpu_files, "DEVICE", tmp_path / "nothing")
    monkeypatch.setattr(gpu_files, "TOOL", "no-such-program")
    monkeypatch.setitem(sys.modules, "pynvml", None)


@pytest.fixture
def no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment with what `pip install localkv` brings."""
    monkeypatch.setattr(checks, "find_spec", lambda name: None)


def test_a_check_that_fails_stops_no_other() -> None:
    def bad() -> Finding:
        raise ValueError("odd")

    found = examine([Check("one", bad), Check("two", lambda: Finding("two", "ok", "fine"))])
    assert [(f.name, f.status) for f in found] == [("one", "warning"), ("two", "ok")]
    assert found[0].summary == "can't be examined: ValueError: odd"


# -- probes


def test_probes_tell_what_is_really_there() -> None:
    import torch

    child = Probes("torch", "cpu")
    assert child.facts("torch")["version"] == torch.__version__
    assert child.facts("cpu")["avx2"] in (True, False)


@pytest.fixture
def broken_packages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder of packages that children import before all others."""
    monkeypatch.setattr(
        probe, "child_environment", lambda: {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    )
    return tmp_path


ROOT = Path(probe.__file__).parents[2]


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("raise ImportError('libcudart.so.13: no such file')", "ImportError: libcudart.so.13: no"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("import os; os.abort()", "it ended by SIGABRT"),
        ("import os; os.write(2, b'bad luck\\n'); os._exit(7)", "it ended with code 7: bad luck"),
    ],
)
def test_a_package_that_is_broken(
    broken_packages: Path, source: str, error: str, driver: Path
) -> None:
    (broken_packages / "torch.py").write_text(source)
    finding = checks.check_torch(Probes("torch"))
    assert finding.status == "warning"
    assert error in finding.summary
    assert "pip install torch" in str(finding.hint)


def test_one_broken_package_leaves_the_other_probes(broken_packages: Path) -> None:
    (broken_packages / "torch.py").write_text("print('noise on stdout'); raise ImportError('gone')")
    (broken_packages / "triton.py").write_text("__version__ = '9.9'")
    child = Probes("torch", "triton")
    assert child.facts("triton") == {"version": "9.9"}
    with pytest.raises(ProbeError, match="ImportError: gone"):
        child.facts("torch")


def test_a_package_that_hangs(broken_packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "TIMEOUT_SECONDS", 1.0)
    (broken_packages / "triton.py").write_text("import time; time.sleep(60)")
    with pytest.raises(ProbeError, match="no answer within 1 s"):
        Probes("triton").facts("triton")


def test_files_of_the_working_directory_are_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "json.py").write_text("raise ImportError")
    (tmp_path / "numba.py").write_text("raise ImportError")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    assert Probes("cpu").facts("cpu")["numba"]


# -- Python and packages


def test_python(monkeypatch: pytest.MonkeyPatch) -> None:
    assert checks.check_python().status == "ok"
    monkeypatch.setattr(checks.sys, "version_info", (3, 10, 4))
    finding = checks.check_python()
    assert (finding.status, finding.hint) == ("broken", "localkv needs 3.11 or newer")


def needs(monkeypatch: pytest.MonkeyPatch, *lines: str, **installed: str) -> None:
    def version(name: str) -> str:
        if name not in installed:
            raise metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(checks.metadata, "requires", lambda _: list(lines))
    monkeypatch.setattr(checks.metadata, "version", version)


def test_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ("numpy>=2.0", "numba>=0.62", "gone; sys_platform == 'dos'", "x>1")
    lines += ("torch>=2.11; extra == 'gpu'", "pytest>=8; extra == 'dev'")
    needs(monkeypatch, *lines, numpy="2.4", numba="0.61", torch="2.0")
    finding = checks.check_packages()
    assert finding.status == "broken"
    assert finding.summary == "numba 0.61, x is missing"
    assert finding.hint == "pip install 'numba>=0.62' 'x>1'"
    assert checks.unmet_requirement("torch") == "torch>=2.11"
    needs(monkeypatch, "numpy>=2.0", numpy="2.4")
    assert checks.check_packages().status == "ok"


def test_an_own_version_of_torch_is_recognised(
    monkeypatch: pytest.MonkeyPatch, driver: Path
) -> None:
    line = "torch>=2.11; extra == 'gpu'"
    needs(monkeypatch, line, torch="2.13.0+cpu")
    assert checks.unmet_requirement("torch") is None
    facts = {"version": "2.0", "cuda": None, "hip": None}
    needs(monkeypatch, line, torch="2.0")
    finding = checks.check_torch(FakeProbes(torch=facts))
    assert (finding.status, finding.hint) == ("warning", "pip install 'torch>=2.11'")


def test_without_being_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(checks.metadata, "requires", missing)
    assert checks.check_packages().status == "info"
    facts = {"version": "2.13", "cuda": "13.0", "hip": None}
    finding = checks.check_torch(FakeProbes(torch=facts))
    assert (finding.status, finding.summary) == ("ok", "2.13, built with CUDA 13.0")


def test_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    needs(monkeypatch, matplotlib="3.9")
    finding = checks.check_extras()
    assert finding.status == "info"
    assert finding.facts == {"matplotlib": "3.9", "nvidia-ml-py": None}


# -- CPU


def test_instructions_of_the_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor : 0\nmodel name\t: Some  CPU\nmodel name\t: Some  CPU\n")
    monkeypatch.setattr("localkv.system.processor.CPUINFO", cpuinfo)
    monkeypatch.setattr(checks, "usable_cores", lambda: 1)

    def check(**facts: object) -> Finding:
        return checks.check_processor(FakeProbes(cpu={**CPU, **facts}))

    assert check().summary == "Some CPU, 1 core, AVX2; no AVX-512, no VNNI, no bf16"
    assert check().status == "ok"
    everything = check(avx512=True, vnni=True, avx512_bf16=True)
    assert everything.summary == "Some CPU, 1 core, AVX2, AVX-512, VNNI, bf16"
    old = check(avx2=False, vectors="128-bit vectors")
    assert old.status == "warning"
    assert "128-bit vectors; no AVX2" in old.summary
    arm = check(avx2=False, x86=False, vectors="NEON", byte_dots="NEON i8mm")
    assert (arm.status, arm.summary) == ("ok", "Some CPU, 1 core, NEON i8mm")
    arm = check(avx2=False, x86=False, vectors="NEON", byte_dots="")
    assert (arm.status, arm.summary) == ("ok", "Some CPU, 1 core, NEON")


def test_numba_is_necessary() -> None:
    broken = FakeProbes(cpu="ImportError: Numba needs NumPy 2.4 or less")
    finding = checks.check_processor(broken)
    assert finding.status == "broken"
    assert "Numba needs NumPy 2.4 or less" in finding.summary
    assert "numba" in str(finding.hint)


# -- memory


def machine(root: Path, available: int, limit: int | None = None) -> Path:
    """A machine with that many bytes free, in a control group with a limit or without."""
    folder = root / "sys/fs/cgroup"
    folder.mkdir(parents=True)
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemAvailable: {available >> 10} kB\n")
    (root / "proc/self/cgroup").write_text("0::/\n")
    (folder / "memory.max").write_text("max" if limit is None else str(limit))
    (folder / "memory.current").write_text("0")
    (folder / "memory.stat").write_text("")
    return root


def test_memory(tmp_path: Path) -> None:
    finding = check_memory(machine(tmp_path, 8 << 30))
    assert finding.status == "ok"
    assert finding.summary.endswith(", 8.00 GiB available on this machine")
    assert finding.facts["total"] > 1 << 28


def test_little_memory(tmp_path: Path) -> None:
    finding = check_memory(machine(tmp_path, 8 << 30, limit=512 << 20))
    assert (finding.status, finding.facts["usable"]) == ("warning", 512 << 20)
    assert finding.summary.endswith(", 512.00 MiB left of this container's memory")
    assert finding.hint is not None


def test_a_system_that_does_not_tell(tmp_path: Path) -> None:
    assert check_memory(tmp_path).status == "info"


# -- GPU


def test_no_gpu(no_driver: None) -> None:
    finding = checks.check_gpu(FakeProbes(gpu=NO_GPU))
    assert (finding.status, finding.summary) == (
        "info",
        "none (torch sees no GPU); the CPU is used",
    )


def test_neither_torch_nor_a_gpu(no_torch: None, no_driver: None) -> None:
    """The usual machine without a GPU: nothing is amiss."""
    nothing = FakeProbes()
    found = [
        check(nothing) for check in (checks.check_torch, checks.check_triton, checks.check_gpu)
    ]
    assert [(finding.status, finding.summary, finding.hint) for finding in found] == [
        ("info", "not installed; only --device cuda and --device reference need it", None),
        ("info", "not installed; only --device cuda needs it", None),
        ("info", "none; the CPU is used", None),
    ]


def test_a_gpu_and_no_torch(no_torch: None, driver: Path) -> None:
    nothing = FakeProbes()
    found = [
        check(nothing) for check in (checks.check_torch, checks.check_triton, checks.check_gpu)
    ]
    assert [finding.status for finding in found] == ["warning"] * 3
    assert {finding.hint for finding in found} == {"pip install 'localkv[gpu]'"}
    assert found[-1].summary == "NVIDIA, driver 570.86.15, not used: torch is not installed"


def test_a_gpu_that_works(driver: Path) -> None:
    facts = {"devices": [H200], "reason": "", "remedy": ""}
    finding = checks.check_gpu(FakeProbes(gpu=facts))
    assert finding.status == "ok"
    assert finding.summary == (
        "NVIDIA H200, compute capability 9.0, 139.00 GiB, driver 570.86.15; Triton starts"
    )
    assert finding.facts["driver"] == "570.86.15"


def test_a_gpu_that_torch_does_not_see(driver: Path) -> None:
    finding = checks.check_gpu(FakeProbes(gpu=NO_GPU))
    assert (finding.status, finding.hint) == ("warning", "nvidia-smi")
    assert finding.summary == "NVIDIA, driver 570.86.15, not used: torch sees no GPU"


def test_a_gpu_that_is_too_old(driver: Path) -> None:
    facts = {"devices": [H200 | {"capability": "7.5"}], "reason": "8.0 is needed", "remedy": "cpu"}
    finding = checks.check_gpu(FakeProbes(gpu=facts))
    assert finding.status == "warning"
    assert finding.summary.endswith("not used: 8.0 is needed")


def test_a_supported_gpu_that_can_not_start_is_a_failure(driver: Path) -> None:
    facts = {"devices": [H200], "reason": "", "remedy": ""}
    facts |= {"failure": "no C compiler", "failure_hint": "apt install gcc"}
    finding = checks.check_gpu(FakeProbes(gpu=facts))
    assert (finding.status, finding.hint) == ("broken", "apt install gcc")


def test_the_driver_by_its_library(driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class NVMLError(Exception):
        pass

    library = SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlSystemGetDriverVersion=lambda: "580.1",
    )
    monkeypatch.setitem(sys.modules, "pynvml", library)
    assert checks.driver_version() == "580.1"

    def fails() -> None:
        raise NVMLError

    library.nvmlInit = fails
    assert checks.driver_version() == "570.86.15"
    (driver / "version").unlink()
    assert checks.driver_version() is None


def test_a_gpu_without_torch(driver: Path) -> None:
    finding = checks.check_gpu(FakeProbes(gpu="No module named 'torch'"))
    assert finding.status == "warning"


@pytest.mark.parametrize(("fixture", "status"), [("driver", "warning"), ("no_driver", "info")])
def test_triton_matters_to_gpus_only(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, fixture: str, status: str
) -> None:
    request.getfixturevalue(fixture)
    needs(monkeypatch, "triton>=3.6")
    missing = FakeProbes(triton="No module named 'triton'")
    finding = checks.check_triton(missing)
    assert (finding.status, finding.hint) == (
        status,
        "pip install 'triton>=3.6'; only GPUs need it",
    )
    needs(monkeypatch, "triton>=3.6", triton="3.5")
    finding = checks.check_triton(FakeProbes(triton={"version": "3.5"}))
    assert (finding.status, finding.summary) == (status, "3.5")
    needs(monkeypatch, "triton>=3.6", triton="3.6")
    finding = checks.check_triton(FakeProbes(triton={"version": "3.6"}))
    assert finding.status == "ok"


# -- the C compiler


def compiler(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    path = folder / "cc"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CC", str(path))


def with_headers(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr(checks.sysconfig, "get_paths", lambda: {"include": str(folder)})


def test_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, driver: Path) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    finding = checks.check_compiler()
    assert finding.status == "warning"
    assert "apt install gcc" in str(finding.hint)


def test_a_compiler_that_does_not_run(monkeypatch: pytest.MonkeyPatch, no_driver: None) -> None:
    monkeypatch.setenv("CC", "/nonexistent/cc")
    finding = checks.check_compiler()
    assert finding.status == "info"
    assert "does not run" in finding.summary


def test_no_headers_of_python(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, driver: Path
) -> None:
    compiler(tmp_path, monkeypatch, "exit 1")
    with_headers(monkeypatch, tmp_path)
    finding = checks.check_compiler()
    assert finding.status == "warning"
    assert f"no Python.h in {tmp_path}" in finding.summary
    assert "python3-dev" in str(finding.hint)


def test_no_headers_of_c(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, driver: Path) -> None:
    compiler(tmp_path, monkeypatch, "echo 'x:1: fatal error: stdio.h: no such file' >&2; exit 1")
    with_headers(monkeypatch, tmp_path)
    (tmp_path / "Python.h").write_text("")
    finding = checks.check_compiler()
    assert finding.summary.endswith("fails: x:1: fatal error: stdio.h: no such file")
    assert "libc6-dev" in str(finding.hint)


def test_a_compiler_that_works(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, driver: Path
) -> None:
    compiler(tmp_path, monkeypatch, "grep -q '#include <Python.h>'")
    assert checks.check_compiler().status == "ok"


# -- folders


@pytest.fixture
def read_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing can be written (to root everything can, whatever a folder's mode is)."""
    monkeypatch.setattr(checks.os, "access", lambda path, mode: not mode & os.W_OK)


@pytest.fixture
def folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    from huggingface_hub import constants

    for name in ("XDG_CACHE_HOME", "XDG_DATA_HOME", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(checks, "LITTLE_DISK", 0)
    return tmp_path


def test_nothing_is_made(folders: Path) -> None:
    assert checks.check_kernel_cache().summary.endswith("kernels, empty")
    assert checks.check_triton_cache().status == "ok"
    assert checks.check_models().facts["models"] == 0
    assert checks.check_sessions().status == "info"
    assert list(folders.iterdir()) == []


def test_caches_with_something_in_them(folders: Path) -> None:
    kernels = folders / "XDG_CACHE_HOME" / "localkv" / "kernels" / "__pycache__"
    kernels.mkdir(parents=True)
    (kernels / "x.nbi").write_bytes(bytes(2048))
    assert checks.check_kernel_cache().facts["bytes"] == 2048
    blobs = folders / "hub" / "models--a--b" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / "123.incomplete").write_bytes(bytes(1024))
    finding = checks.check_models()
    assert finding.status == "ok"
    assert finding.summary.endswith("; 1.00 KiB of interrupted downloads")


@pytest.mark.skipif(os.name != "posix", reason="modes are POSIX's")
def test_machine_code_that_others_may_write(folders: Path) -> None:
    kernels = folders / "XDG_CACHE_HOME" / "localkv" / "kernels"
    kernels.mkdir(parents=True)
    kernels.chmod(0o777)
    finding = checks.check_kernel_cache()
    assert finding.status == "warning"
    assert "others may write" in finding.summary
    assert "chmod go-w" in str(finding.hint)
    kernels.chmod(0o755)
    assert checks.check_kernel_cache().status == "ok"


@pytest.mark.usefixtures("read_only")
def test_folders_that_can_not_be_written(folders: Path) -> None:
    for check in (
        checks.check_kernel_cache,
        checks.check_triton_cache,
        checks.check_models,
        checks.check_sessions,
    ):
        finding = check()
        assert finding.status == "warning"
        assert "can't be written" in finding.summary
        assert finding.hint is not None


def test_a_disk_that_is_nearly_full(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "LITTLE_DISK", 1 << 60)
    finding = checks.check_models()
    assert finding.status == "warning"
    assert "localkv rm" in str(finding.hint)


def test_sessions(folders: Path) -> None:
    path = folders / "XDG_DATA_HOME" / "localkv" / "chats.sqlite3"
    store = Store(path)
    store.add_session("one", "model", "", {})
    finding = checks.check_sessions()  # while a chat has it open
    assert (finding.status, finding.facts["sessions"]) == ("ok", 1)
    store.close()
    with sqlite3.connect(path) as db:
        db.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    db.close()
    assert checks.check_sessions().summary.endswith("made by a newer localkv")
    path.write_bytes(b"no database" * 100)
    finding = checks.check_sessions()
    assert finding.status == "warning"
    assert "not a database" in finding.summary
    assert "localkv chat --repair" in str(finding.hint)
    path.unlink()
    path.mkdir()
    assert checks.check_sessions().summary == f"{path} is not a file"


def test_sessions_that_are_damaged_are_said_to_be(folders: Path) -> None:
    path = folders / "XDG_DATA_HOME" / "localkv" / "chats.sqlite3"
    store = Store(path)
    for number in range(200):
        store.add_session(f"{number} " * 50, "model", "", {})
    store.close()
    data = bytearray(path.read_bytes())
    data[8 * 4096 : 9 * 4096] = bytes(4096)
    path.write_bytes(data)
    finding = checks.check_sessions()
    assert finding.status == "warning"
    assert "is damaged" in finding.summary or "malformed" in finding.summary
    assert "localkv chat --repair" in str(finding.hint)
    assert path.read_bytes() == data


@pytest.mark.skipif(os.name != "posix", reason="modes are POSIX's")
def test_sessions_that_others_may_read(folders: Path) -> None:
    path = folders / "XDG_DATA_HOME" / "localkv" / "chats.sqlite3"
    Store(path).close()
    assert checks.check_sessions().status == "ok"
    for loose in (path, path.parent):
        loose.chmod(0o755)
        finding = checks.check_sessions()
        assert finding.status == "warning"
        assert "others may read it" in finding.summary
        loose.chmod(0o700)
