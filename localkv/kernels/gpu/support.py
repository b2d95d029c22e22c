"""Whether this machine's GPU can run our kernels."""

from __future__ import annotations

import importlib.util

import torch

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
