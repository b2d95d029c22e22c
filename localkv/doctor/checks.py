"""The checks of `localkv doctor`, each independent of the others, and the list of them.

They look at Python and the packages that localkv names as its needs, at torch, and at Triton with
the C compiler that it needs. They also look at the GPU and its driver, the processor, memory,
caches, sessions and free disk.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import sqlite3
import struct
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from localkv import __version__
from localkv.doctor.probe import ProbeError, Probes
from localkv.errors import byte_size, counted
from localkv.system import gpu_files
from localkv.system.gpu_files import nvidia_driver_is_here
from localkv.system.machine_memory import machine_memory
from localkv.system.processor import processor_name, usable_cores

Status = Literal["ok", "info", "warning", "broken"]
"""info: neither good nor bad. warning: something is slower or missing. broken: no model runs."""


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        name: the thing that was checked.
        status: how it is.
        summary: one line.
        hint: one line with a remedy.
        facts: the same for programs, fit for JSON.
    """

    name: str
    status: Status
    summary: str
    hint: str | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Check:
    """A name, and the function that looks."""

    name: str
    look: Callable[[], Finding]


def examine(checks: Iterable[Check]) -> list[Finding]:
    """The results of all checks; a failing check reports that itself and stops no other."""
    return [_result(check) for check in checks]


def _result(check: Check) -> Finding:
    try:
        return check.look()
    except Exception as error:
        return Finding(
            check.name,
            "warning",
            f"can't be examined: {type(error).__name__}: {error}",
            "a bug: please report it",
        )


LEAST_PYTHON = (3, 11)


def check_python() -> Finding:
    version = platform.python_version()
    facts = {"version": version, "executable": sys.executable, "localkv": __version__}
    summary = f"{version}, {sys.executable}"
    needed = ".".join(map(str, LEAST_PYTHON))
    if sys.version_info < LEAST_PYTHON:
        return Finding("Python", "broken", summary, f"localkv needs {needed} or newer", facts)
    if struct.calcsize("P") < 8:
        return Finding("Python", "broken", f"{summary}, 32 bits", "a Python of 64 bits", facts)
    return Finding("Python", "ok", summary, None, facts)


def unmet_requirement(name: str) -> str | None:
    """A package's requirement, as in "torch>=2.11", if the installed version does not meet it.

    Requirements of GPUs are among them.
    """
    return _unmet(extra="gpu").get(name)


def check_packages() -> Finding:
    try:
        unmet = _unmet()
    except metadata.PackageNotFoundError:
        return Finding(
            "packages",
            "info",
            "localkv itself is not installed, so nothing says which versions it needs",
            "pip install .",
        )
    except ModuleNotFoundError as error:
        return Finding("packages", "broken", str(error), f"pip install {error.name}")
    facts = {"unmet": sorted(unmet.values())}
    if not unmet:
        return Finding("packages", "ok", f"all that localkv {__version__} needs", None, facts)
    shown = ", ".join(f"{name} {_installed(name) or 'is missing'}" for name in sorted(unmet))
    wanted = " ".join(f"'{what}'" for what in sorted(unmet.values()))
    return Finding("packages", "broken", shown, f"pip install {wanted}", facts)


def check_extras() -> Finding:
    """Packages that only some functions need."""
    found = {name: _installed(name) for name in ("matplotlib", "nvidia-ml-py")}
    what_for = {"matplotlib": "pictures of perplexity", "nvidia-ml-py": "the GPU's driver here"}
    shown = [
        f"{name} {version}" if version else f"no {name} ({what_for[name]})"
        for name, version in found.items()
    ]
    return Finding("extras", "ok" if all(found.values()) else "info", ", ".join(shown), None, found)


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _unmet(extra: str = "") -> dict[str, str]:
    """Requirements of this platform, and of an extra, that are not met, by package.

    Raises:
        PackageNotFoundError: localkv is not installed.
    """
    from packaging.requirements import Requirement

    unmet = {}
    for line in metadata.requires("localkv") or ():
        requirement = Requirement(line)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        version = _installed(requirement.name)
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            unmet[requirement.name] = f"{requirement.name}{requirement.specifier}"
    return unmet


GPU_EXTRA = "pip install 'localkv[gpu]'"
_COMPILE_SECONDS = 20.0


def check_torch(probes: Probes) -> Finding:
    if find_spec("torch") is None:
        return _not_installed("torch", "--device cuda and --device reference need it")
    try:
        facts = probes.facts("torch")
    except ProbeError as error:
        hint = "pip install torch; https://pytorch.org/get-started names the wheel for this machine"
        return Finding("torch", _gpu_problem(), f"can't be imported: {error}", hint)
    built_for = "for the CPU"
    if facts["cuda"] is not None:
        built_for = f"with CUDA {facts['cuda']}"
    elif facts["hip"] is not None:
        built_for = f"with ROCm {facts['hip']}"
    summary = f"{facts['version']}, built {built_for}"
    if needed := _needed("torch"):
        return Finding("torch", _gpu_problem(), summary, f"pip install '{needed}'", facts)
    return Finding("torch", "ok", summary, None, facts)


def check_triton(probes: Probes) -> Finding:
    if find_spec("triton") is None:
        return _not_installed("Triton", "--device cuda needs it")
    needed = _needed("triton")
    hint = f"pip install '{needed or 'triton'}'; only GPUs need it"
    try:
        facts = probes.facts("triton")
    except ProbeError as error:
        return Finding("Triton", _gpu_problem(), f"can't be imported: {error}", hint)
    if needed:
        return Finding("Triton", _gpu_problem(), facts["version"], hint, facts)
    return Finding("Triton", "ok", facts["version"], None, facts)


def _gpu_problem() -> Status:
    """How bad it is that a requirement of GPUs is not met: no problem on a machine without one."""
    return "warning" if nvidia_driver_is_here() else "info"


def _not_installed(name: str, need: str) -> Finding:
    if nvidia_driver_is_here():
        return Finding(name, "warning", f"not installed; {need}", GPU_EXTRA)
    return Finding(name, "info", f"not installed; only {need}")


def _needed(package: str) -> str | None:
    try:
        return unmet_requirement(package)
    except ModuleNotFoundError:  # `check_packages` says so
        return None


def check_compiler() -> Finding:
    """The C compiler as Triton looks for it, and Python's headers, by compiling with them."""
    problem = _gpu_problem()
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    headers = sysconfig.get_paths()["include"]
    facts: dict[str, Any] = {"compiler": compiler, "headers": headers, "works": False}
    only = "only GPUs need it"
    if compiler is None:
        hint = f"install gcc (Debian: apt install gcc python3-dev) or set CC; {only}"
        return Finding("C compiler", problem, "none (no CC, gcc or clang)", hint, facts)
    try:
        done = subprocess.run(
            [compiler, "-fsyntax-only", "-I", headers, "-x", "c", "-"],
            input=b"#include <Python.h>\n",
            capture_output=True,
            timeout=_COMPILE_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        hint = f"set CC to a C compiler (now {os.environ.get('CC', compiler)}); {only}"
        return Finding("C compiler", problem, f"{compiler} does not run: {error}", hint, facts)
    if done.returncode != 0 and not (Path(headers) / "Python.h").exists():
        hint = f"install Python's headers (Debian: apt install python3-dev); {only}"
        return Finding("C compiler", problem, f"{compiler}; no Python.h in {headers}", hint, facts)
    if done.returncode != 0:
        hint = f"install the C library's headers (Debian: apt install libc6-dev); {only}"
        reason = _first_error(done.stderr.decode(errors="replace"))
        return Finding("C compiler", problem, f"{compiler} fails: {reason}", hint, facts)
    facts["works"] = True
    return Finding("C compiler", "ok", f"{compiler}, Python.h in {headers}", None, facts)


def _first_error(text: str) -> str:
    lines = text.strip().splitlines() or ["without a word"]
    return next((line for line in lines if "error" in line), lines[0])


def check_gpu(probes: Probes) -> Finding:
    driver = driver_version()
    if find_spec("torch") is None:
        return _gpu_without_torch(driver)
    try:
        facts: dict[str, Any] = {"driver": driver, **probes.facts("gpu")}
    except ProbeError as error:
        summary = f"can't be examined: {error}"
        return Finding("GPU", _gpu_problem(), summary, None, {"driver": driver})
    with_driver = _with(driver)
    shown = "; ".join(
        f"{device['name']}, compute capability {device['capability']}, {byte_size(device['bytes'])}"
        for device in facts["devices"]
    )
    reason, remedy = facts["reason"], facts["remedy"]
    if not reason and "failure" in facts:
        summary = f"{shown}{with_driver}: {facts['failure']}"
        return Finding("GPU", "broken", summary, facts["failure_hint"], facts)
    if not reason:
        return Finding("GPU", "ok", f"{shown}{with_driver}; Triton starts", None, facts)
    if shown or nvidia_driver_is_here():
        what = f"{shown or 'NVIDIA'}{with_driver}, not used: {reason}"
        return Finding("GPU", "warning", what, remedy, facts)
    return Finding("GPU", "info", f"none ({reason}); the CPU is used", None, facts)


def _gpu_without_torch(driver: str | None) -> Finding:
    facts = {"driver": driver}
    if not nvidia_driver_is_here():
        return Finding("GPU", "info", "none; the CPU is used", None, facts)
    summary = f"NVIDIA{_with(driver)}, not used: torch is not installed"
    return Finding("GPU", "warning", summary, GPU_EXTRA, facts)


def _with(driver: str | None) -> str:
    return f", driver {driver}" if driver else ""


def driver_version() -> str | None:
    """The version of NVIDIA's driver, from its library or from the kernel; None without one."""
    try:
        import pynvml
    except ImportError:
        return _kernel_driver_version()
    try:
        pynvml.nvmlInit()
        version = pynvml.nvmlSystemGetDriverVersion()
        pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return _kernel_driver_version()
    return str(version)


def _kernel_driver_version() -> str | None:
    try:
        text = (gpu_files.DRIVER / "version").read_text()
    except OSError:
        return None
    found = re.search(r"\b(\d+\.\d+(?:\.\d+)?)\b", text)
    return found[1] if found else None


_INSTRUCTIONS = {"avx2": "AVX2", "avx512": "AVX-512", "vnni": "VNNI", "avx512_bf16": "bf16"}


def check_processor(probes: Probes) -> Finding:
    n_cores = usable_cores()
    what = f"{processor_name()}, {n_cores} core{'s' if n_cores != 1 else ''}"
    try:
        facts = {"cores": n_cores, **probes.facts("cpu")}
    except ProbeError as error:
        return Finding(
            "CPU",
            "broken",
            f"{what}; kernels can't be compiled: {error}",
            "pip install --force-reinstall numba llvmlite",
            {"cores": n_cores},
        )
    has = [name for key, name in _INSTRUCTIONS.items() if facts[key]]
    lacks = [name for key, name in _INSTRUCTIONS.items() if not facts[key]]
    if not facts["x86"]:
        vectors = facts["byte_dots"] or facts["vectors"]
        return Finding("CPU", "ok", f"{what}, {vectors}", None, facts)
    summary = f"{what}, {', '.join(has) or facts['vectors']}"
    if lacks:
        summary += f"; no {', no '.join(lacks)}"
    if facts["avx2"]:
        return Finding("CPU", "ok", summary, None, facts)
    hint = "kernels are several times slower without AVX2; a virtual machine may hide it"
    return Finding("CPU", "warning", summary, hint, facts)


LITTLE_BYTES = 1 << 30


def check_memory(root: Path = Path("/")) -> Finding:
    """Check the memory of the machine, or of the control group where that leaves less.

    Args:
        root: where /proc and /sys are.
    """
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    budget = machine_memory(root)
    if budget is None:
        return Finding("memory", "info", f"{byte_size(total)} in all", None, {"total": total})
    facts = {"total": total, "usable": budget.n_bytes, "source": budget.source}
    summary = f"{byte_size(total)}, {byte_size(budget.n_bytes)} {budget.source}"
    if budget.n_bytes < LITTLE_BYTES:
        hint = "close programs, raise the container's limit, or take a smaller model and context"
        return Finding("memory", "warning", summary, hint, facts)
    return Finding("memory", "ok", summary, None, facts)


LITTLE_DISK = 5 << 30


def check_kernel_cache() -> Finding:
    """Kernels that Numba compiled."""
    from localkv.kernels.cpu.jit.kernel_folder import cache_folder, is_ours_alone

    folder = cache_folder()
    hint = "kernels are compiled at every start; XDG_CACHE_HOME=FOLDER takes another folder"
    finding = _compiled("kernel cache", folder, hint)
    if finding.status == "ok" and folder.exists() and not is_ours_alone(folder.stat()):
        summary = f"{folder} is not used: others may write to it"
        hint = f"kernels are compiled at every start; chmod go-w {folder}, if it is yours"
        return Finding("kernel cache", "warning", summary, hint, finding.facts)
    return finding


def check_carried_kernels() -> Finding:
    """Kernels that the package carries for this CPU."""
    from localkv.kernels.cpu.jit.carried_kernels import archive_path, carried_names
    from localkv.simd.cpu_features import CPU_LEVEL

    n = len(carried_names())
    facts = {"level": CPU_LEVEL, "kernels": n, "path": str(archive_path())}
    if n:
        return Finding("kernels", "ok", f"{counted(n, 'kernel')} for {CPU_LEVEL}", None, facts)
    summary = f"none for {CPU_LEVEL} come with this copy: a first start compiles what it needs"
    hint = "python -m localkv.kernels.cpu.build_kernels compiles the usual ones"
    return Finding("kernels", "info", summary, hint, facts)


def check_triton_cache() -> Finding:
    """Kernels that Triton compiled."""
    home = Path(os.environ.get("TRITON_HOME") or Path.home())
    folder = Path(os.environ.get("TRITON_CACHE_DIR") or home / ".triton" / "cache")
    hint = "the GPU's kernels can't be kept; TRITON_CACHE_DIR=FOLDER takes another folder"
    return _compiled("Triton cache", folder, hint)


def _compiled(name: str, folder: Path, hint: str) -> Finding:
    n_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    facts = {"path": str(folder), "bytes": n_bytes, "writable": _writable(folder)}
    if not facts["writable"]:
        return Finding(name, "warning", f"{folder} can't be written", hint, facts)
    return Finding(name, "ok", f"{folder}, {_size(n_bytes)}", None, facts)


def check_models() -> Finding:
    """Hugging Face's cache, and room for more."""
    from localkv.loader.hub.cache import cache_folder, cached_models, partial_bytes
    from localkv.loader.hub.client import is_offline

    folder = cache_folder()
    models = cached_models()
    partial = partial_bytes()
    n_bytes = sum(item.model.n_bytes for item in models)
    free = shutil.disk_usage(_existing(folder)).free
    facts: dict[str, Any] = {
        "path": str(folder),
        "models": len(models),
        "bytes": n_bytes,
        "interrupted_bytes": partial,
        "free": free,
        "writable": _writable(folder),
        "offline": is_offline(),
    }
    summary = f"{folder}, {counted(len(models), 'model')}, {_size(n_bytes)}; "
    summary += f"{byte_size(free)} free on disk"
    if partial:
        summary += f"; {byte_size(partial)} of interrupted downloads"
    if facts["offline"]:
        summary += "; HF_HUB_OFFLINE is set"
    if not facts["writable"]:
        hint = "no model can be fetched; HF_HOME=FOLDER takes another folder"
        return Finding("model cache", "warning", f"{summary}; can't be written", hint, facts)
    if free < LITTLE_DISK:
        hint = "localkv rm makes room; HF_HOME=FOLDER takes another disk"
        return Finding("model cache", "warning", summary, hint, facts)
    return Finding("model cache", "ok", summary, None, facts)


def check_sessions() -> Finding:
    """The file of chat's sessions, which is only read."""
    from localkv.chat.database import SCHEMA_VERSION, SQLITE_ERRORS, damage_of, version_of
    from localkv.chat.store import default_path

    path = default_path()
    facts: dict[str, Any] = {"path": str(path), "sessions": None}
    hint = "chat needs it; localkv chat --sessions FILE names another"
    if not _writable(path.parent) or (path.exists() and not os.access(path, os.W_OK)):
        return Finding("sessions", "warning", f"{path} can't be written", hint, facts)
    if not path.exists():
        return Finding("sessions", "info", f"none yet, {path}", None, facts)
    if not path.is_file():
        return Finding("sessions", "warning", f"{path} is not a file", hint, facts)
    repair = "localkv chat --repair saves everything that can be read, and keeps the damaged file"
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as db:
            version = version_of(db)
            if version > SCHEMA_VERSION:
                return Finding(
                    "sessions", "warning", f"{path}: made by a newer localkv", hint, facts
                )
            damage = damage_of(db)
            (n_sessions,) = db.execute("SELECT COUNT(*) FROM sessions").fetchone()
    except SQLITE_ERRORS as error:
        return Finding("sessions", "warning", f"{path}: {error}", repair, facts)
    if damage:
        return Finding("sessions", "warning", f"{path} is damaged: {damage}", repair, facts)
    facts |= {"sessions": n_sessions, "bytes": path.stat().st_size, "private": _private(path)}
    summary = f"{path}, {counted(n_sessions, 'session')}, {byte_size(facts['bytes'])}"
    if not facts["private"]:
        hint = f"the next localkv chat closes it to them, if it is yours; or chmod go= {path}"
        return Finding("sessions", "warning", f"{summary}; others may read it", hint, facts)
    return Finding("sessions", "ok", summary, None, facts)


def _private(path: Path) -> bool:
    from localkv.chat.database import SIDECARS, is_private

    files = (Path(f"{path}{suffix}") for suffix in SIDECARS)
    return all(is_private(file) for file in (path, path.parent, *files) if file.exists())


def _size(n_bytes: int) -> str:
    return byte_size(n_bytes) if n_bytes else "empty"


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    return next(path for path in (folder, *folder.absolute().parents) if path.exists())


def _writable(folder: Path) -> bool:
    """Whether files can be made there, or the folder itself where it does not exist."""
    nearest = _existing(folder)
    return nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)


def machine_checks() -> list[Check]:
    """All of them. Slow ones begin now, in processes of their own."""
    engine, cpu = Probes("torch", "triton", "gpu"), Probes("cpu")
    return [
        Check("Python", check_python),
        Check("packages", check_packages),
        Check("torch", partial(check_torch, engine)),
        Check("CPU", partial(check_processor, cpu)),
        Check("memory", check_memory),
        Check("GPU", partial(check_gpu, engine)),
        Check("Triton", partial(check_triton, engine)),
        Check("C compiler", check_compiler),
        Check("kernels", check_carried_kernels),
        Check("kernel cache", check_kernel_cache),
        Check("Triton cache", check_triton_cache),
        Check("model cache", check_models),
        Check("sessions", check_sessions),
        Check("extras", check_extras),
    ]
