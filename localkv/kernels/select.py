"""The backend for a `--device`."""

from __future__ import annotations

from localkv.config import DEVICES
from localkv.errors import UsageError
from localkv.kernels.backend import Backend
from localkv.kernels.cpu_backend import cpu_backend
from localkv.kernels.reference_backend import reference_backend


def select_backend(device: str = "auto") -> Backend:
    """The backend that runs on `device`.

    Raises:
        UsageError: there is no such device.
    """
    if device in ("auto", "cpu"):
        return cpu_backend()
    if device == "reference":
        return reference_backend()
    raise UsageError(f"unknown device {device!r}", hint=f"devices: {', '.join(DEVICES)}")
