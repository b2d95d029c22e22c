"""torch, Triton with the C compiler it needs, and the GPU with its driver.

Neither is a GPU necessary, nor torch without one. But `--device auto` takes a GPU that is
supported, so one that is supported and can't run kernels is a failure.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from localkv.doctor.finding import Finding, Status
from localkv.doctor.probe import ProbeError, Probes
from localkv.doctor.software import unmet_requirement
from localkv.errors import byte_size
from localkv.system import nvidia_driver
from localkv.system.nvidia_driver import nvidia_driver_is_here

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
        text = (nvidia_driver.DRIVER / "version").read_text()
    except OSError:
        return None
    found = re.search(r"\b(\d+\.\d+(?:\.\d+)?)\b", text)
    return found[1] if found else None
