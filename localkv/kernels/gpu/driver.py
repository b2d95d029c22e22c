"""Starting Triton: what it needs of the machine, and in plain words what is missing."""

from __future__ import annotations

import subprocess
import sysconfig
from collections.abc import Callable
from pathlib import Path

from localkv.errors import LocalKVError


def _touch() -> object:
    """Make Triton build what it calls the driver with, unless it is in its cache."""
    import triton

    return triton.runtime.driver.active.get_current_device()


def start_triton(touch: Callable[[], object] = _touch) -> None:
    """Start Triton, which needs a C compiler and Python's headers the first time.

    Raises:
        LocalKVError: one of them is missing, or the driver can't be used.
    """
    try:
        touch()
    except (RuntimeError, OSError, subprocess.CalledProcessError) as error:
        if "C compiler" in str(error):
            raise LocalKVError(
                "Triton needs a C compiler to start kernels, and found none",
                hint="install gcc (Debian: apt install gcc python3-dev) or set CC; or --device cpu",
            ) from error
        headers = Path(sysconfig.get_paths()["include"])
        if isinstance(error, subprocess.CalledProcessError) and not (headers / "Python.h").exists():
            raise LocalKVError(
                f"Triton needs Python's headers to start kernels: no Python.h in {headers}",
                hint="install them (Debian: apt install python3-dev); or --device cpu",
            ) from error
        reason = (str(error) or repr(error)).splitlines()[0]
        raise LocalKVError(
            f"Triton can't start kernels: {reason}",
            hint="check the GPU's driver (nvidia-smi); or --device cpu",
        ) from error
