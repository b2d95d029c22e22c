"""Starting Triton: its needs of the machine, and a plain message if one is missing."""

from __future__ import annotations

import subprocess
import sysconfig
from collections.abc import Callable
from pathlib import Path

from localkv.errors import LocalKVError


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
