"""torch, Triton with the C compiler it needs, and the GPU with its driver.

A GPU is not necessary. But `--device auto` takes one that is supported, so one that is supported
and can't run kernels is a failure.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

from localkv.doctor.finding import Finding
from localkv.doctor.probe import ProbeError, Probes
from localkv.doctor.software import unmet_requirement
from localkv.errors import byte_size
from localkv.system import nvidia_driver
from localkv.system.nvidia_driver import nvidia_driver_is_here

_COMPILE_SECONDS = 20.0


def check_torch(probes: Probes) -> Finding:
    try:
        facts = probes.facts("torch")
    except ProbeError as error:
        hint = "pip install torch; https://pytorch.org/get-started names the wheel for this machine"
        return Finding("torch", "broken", f"can't be imported: {error}", hint)
    built_for = "for the CPU"
    if facts["cuda"] is not None:
        built_for = f"with CUDA {facts['cuda']}"
    elif facts["hip"] is not None:
        built_for = f"with ROCm {facts['hip']}"
    summary = f"{facts['version']}, built {built_for}"
    if needed := _needed("torch"):
        return Finding("torch", "broken", summary, f"pip install '{needed}'", facts)
    return Finding("torch", "ok", summary, None, facts)


def check_triton(probes: Probes) -> Finding:
    # a requirement of GPUs is no problem on a machine without one
    problem: Any = "warning" if nvidia_driver_is_here() else "info"
    needed = _needed("triton")
    hint = f"pip install '{needed or 'triton'}'; only GPUs need it"
    try:
        facts = probes.facts("triton")
    except ProbeError as error:
        return Finding("Triton", problem, f"can't be imported: {error}", hint)
    if needed:
        return Finding("Triton", problem, facts["version"], hint, facts)
    return Finding("Triton", "ok", facts["version"], None, facts)


def _needed(package: str) -> str | None:
    try:
        return unmet_requirement(package)
    except ModuleNotFoundError:  # `check_packages` says so
        return None


def check_compiler() -> Finding:
    """The C compiler as Triton looks for it, and Python's headers, by compiling with them."""
    problem: Any = "warning" if nvidia_driver_is_here() else "info"
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
    try:
        facts: dict[str, Any] = {"driver": driver, **probes.facts("gpu")}
    except ProbeError as error:
        status: Any = "warning" if nvidia_driver_is_here() else "info"
        return Finding("GPU", status, f"can't be examined: {error}", None, {"driver": driver})
    with_driver = f", driver {driver}" if driver else ""
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
