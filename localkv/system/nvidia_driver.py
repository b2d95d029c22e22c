"""Whether NVIDIA's driver is on this machine, as far as its files show: nothing is run."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

DRIVER = Path("/proc/driver/nvidia")
DEVICE = Path("/dev/nvidiactl")
TOOL = "nvidia-smi"
"""On PATH where the driver is another system's, as under WSL."""


def nvidia_driver_is_here() -> bool:
    """Whether there is one, whatever torch can do with it."""
    return (DRIVER / "version").exists() or DEVICE.exists() or shutil.which(TOOL) is not None


def gpus_are_hidden() -> bool:
    """Whether `CUDA_VISIBLE_DEVICES` hides every GPU from this process, as its user wants."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1")
