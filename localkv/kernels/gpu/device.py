"""The GPU that kernels run on: whether it can, facts, memory, and what Triton needs to start."""

from __future__ import annotations

import importlib.util
import subprocess
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from localkv.errors import LocalKVError
from localkv.kernels.device_memory import Room

LEAST_CAPABILITY = (8, 0)
"""Ampere: the first GPUs that our kernels are compiled for."""

NOT_SEEN = "torch sees no GPU"


def why_unsupported() -> tuple[str, str]:
    """Why not, and a remedy; empty if it can."""
    if not torch.cuda.is_available():
        return NOT_SEEN, "check nvidia-smi and CUDA_VISIBLE_DEVICES, or --device cpu"
    if torch.version.hip is not None:
        return "AMD GPUs are not supported", "use --device cpu"
    capability = torch.cuda.get_device_capability()
    if capability < LEAST_CAPABILITY:
        have, need = (f"{a}.{b}" for a, b in (capability, LEAST_CAPABILITY))
        name = torch.cuda.get_device_name()
        return f"{name} has compute capability {have}; {need} is needed", "use --device cpu"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed", "pip install triton, or --device cpu"
    return "", ""


def n_gpus() -> int:
    """The GPUs that torch sees."""
    return torch.cuda.device_count()


@dataclass(frozen=True)
class GpuInfo:
    """Facts about a device.

    Attributes:
        arch: compute capability, 86 for 8.6.
        n_processors: streaming multiprocessors.
        ptx: whether inline PTX works: not in Triton's interpreter.
        name: for people.
    """

    arch: int
    n_processors: int
    ptx: bool = True
    name: str = ""


def gpu_info(device: torch.device) -> GpuInfo:
    """The facts about a CUDA device."""
    major, minor = torch.cuda.get_device_capability(device)
    facts = torch.cuda.get_device_properties(device)
    name = f"{facts.name}, compute capability {major}.{minor}"
    return GpuInfo(10 * major + minor, facts.multi_processor_count, name=name)


def _touch() -> object:
    """Make Triton build the module that calls the driver, unless it is in its cache."""
    import triton

    return triton.runtime.driver.active.get_current_device()


def what_is_missing(error: Exception) -> LocalKVError | None:
    """The tool of the machine that Triton lacked, or None.

    It builds a part in C when it starts, and up to 3.6 one for each kernel when that is launched
    first.
    """
    if "C compiler" in str(error):
        return LocalKVError(
            "Triton needs a C compiler to start kernels, and found none",
            hint="install gcc (Debian: apt install gcc python3-dev) or set CC; or --device cpu",
        )
    headers = Path(sysconfig.get_paths()["include"])
    if isinstance(error, subprocess.CalledProcessError) and not (headers / "Python.h").exists():
        return LocalKVError(
            f"Triton needs Python's headers to start kernels: no Python.h in {headers}",
            hint="install them (Debian: apt install python3-dev); or --device cpu",
        )
    return None


def start_triton(touch: Callable[[], object] = _touch) -> None:
    """Start Triton, which needs a C compiler and Python's headers the first time.

    Raises:
        LocalKVError: one of them is missing, or the driver can't be used.
    """
    try:
        touch()
    except (RuntimeError, OSError, subprocess.CalledProcessError) as error:
        if problem := what_is_missing(error):
            raise problem from error
        reason = (str(error) or repr(error)).splitlines()[0]
        raise LocalKVError(
            f"Triton can't start kernels: {reason}",
            hint="check the GPU's driver (nvidia-smi); or --device cpu",
        ) from error


ROUNDS = 6
"""Times that a copy is timed; the best counts, as other programs only take bandwidth away."""


@dataclass(frozen=True)
class CudaMemory:
    """See `DeviceMemory`."""

    device: torch.device

    def room(self) -> Room:
        free, total = torch.cuda.mem_get_info(self.device)
        taken = torch.cuda.memory_allocated(self.device)
        return Room(free + torch.cuda.memory_reserved(self.device) - taken, taken, total)

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self.device)

    def copy_seconds(self, n_bytes: int) -> float:
        source = torch.ones(n_bytes // 8, dtype=torch.int64, device=self.device)
        target = torch.empty_like(source)
        seconds = []
        for _ in range(ROUNDS):
            started = time.perf_counter()
            target.copy_(source)
            torch.cuda.synchronize(self.device)
            seconds.append(time.perf_counter() - started)
        return min(seconds)
