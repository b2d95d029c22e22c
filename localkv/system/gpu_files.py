"""What files tell of a GPU: whether NVIDIA's driver is here, and what the installed torch can do.

Nothing is run, and torch is not imported, which takes a second.
"""

from __future__ import annotations

import ast
import importlib.util
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


def built_without_cuda() -> bool:
    """Whether torch is there and is known to be a build that can't use NVIDIA's GPUs.

    `torch/version.py` says so; it is read, not run. If that can't be found out, it counts as False.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    try:
        text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
        lines = ast.parse(text).body
    except (OSError, ValueError, SyntaxError):
        return False
    for line in lines:
        if not isinstance(line, ast.Assign | ast.AnnAssign):
            continue
        targets = line.targets if isinstance(line, ast.Assign) else [line.target]
        if any(isinstance(target, ast.Name) and target.id == "cuda" for target in targets):
            return isinstance(line.value, ast.Constant) and line.value.value is None
    return False
