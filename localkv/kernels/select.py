"""The backend for a `--device`."""

from __future__ import annotations

import importlib.util

import torch

from localkv.config import DEVICES
from localkv.errors import UsageError
from localkv.kernels.backend import Backend
from localkv.kernels.cpu.cpu_backend import cpu_backend
from localkv.kernels.reference_backend import reference_backend

LEAST_CAPABILITY = (8, 0)
"""Ampere: the first GPUs that our kernels are compiled for."""


def why_no_gpu() -> tuple[str, str]:
    """Why the GPU backend can't run here, and a remedy; empty if it can."""
    if not torch.cuda.is_available():
        if torch.version.cuda is None:
            return (
                "this torch was built without CUDA",
                "install torch's CUDA wheel, or --device cpu",
            )
        return "torch sees no GPU", "check nvidia-smi and CUDA_VISIBLE_DEVICES, or --device cpu"
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


def unused_gpu() -> str:
    """Why "auto" leaves a GPU that is there alone; empty if it doesn't, or there is none."""
    return why_no_gpu()[0] if torch.cuda.is_available() else ""


def select_backend(device: str = "auto") -> Backend:
    """The backend that runs on `device`; "auto" is the GPU if there is one that it supports.

    Raises:
        UsageError: there is no such device, or it can't be used.
        LocalKVError: Triton can't build its driver's module.
    """
    if device not in DEVICES:
        raise UsageError(f"unknown device {device!r}", hint=f"devices: {', '.join(DEVICES)}")
    if device == "reference":
        return reference_backend()
    reason, remedy = ("", "") if device == "cpu" else why_no_gpu()
    if device == "cuda" and reason:
        raise UsageError(f"device cuda can't be used: {reason}", hint=remedy)
    if device == "cpu" or reason:
        return cpu_backend()
    from localkv.kernels.gpu.triton_backend import triton_backend

    return triton_backend("cuda")
