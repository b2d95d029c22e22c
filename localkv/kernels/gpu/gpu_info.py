"""Facts about a GPU for kernels' launchers."""

from __future__ import annotations

from dataclasses import dataclass

import torch


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
    """Of a CUDA device."""
    major, minor = torch.cuda.get_device_capability(device)
    facts = torch.cuda.get_device_properties(device)
    name = f"{facts.name}, compute capability {major}.{minor}"
    return GpuInfo(10 * major + minor, facts.multi_processor_count, name=name)
