"""The backend for a `--device`. Only those that need torch import it."""

from __future__ import annotations

import importlib.util

from localkv.config import DEVICES
from localkv.errors import UsageError
from localkv.kernels.backend import Backend
from localkv.option_checks import unknown_name
from localkv.system.gpu_files import built_without_cuda, gpus_are_hidden, nvidia_driver_is_here
from localkv.system.this_process import uncollected

INSTALL = "pip install 'localkv[gpu]'"


def why_no_gpu() -> tuple[str, str]:
    """Why the GPU backend can't run here, and a remedy; empty if it can."""
    if not nvidia_driver_is_here():
        return "there is no NVIDIA driver", "use --device cpu"
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed", f"{INSTALL}, or --device cpu"
    if built_without_cuda():  # torch takes two seconds to say so itself
        return "this torch was built without CUDA", "install torch's CUDA wheel, or --device cpu"
    try:
        from localkv.kernels.gpu.device import why_unsupported
    except (ImportError, OSError) as error:  # one of its libraries is missing or does not fit
        reason = (str(error).splitlines() or ["without a word"])[0]
        return f"torch can't be imported: {reason}", f"{INSTALL}, or --device cpu"
    return why_unsupported()


def unused_gpu(device: str = "auto") -> str:
    """A line for the user if "auto" leaves a GPU alone, with a remedy; empty if it doesn't."""
    seen = device == "auto" and nvidia_driver_is_here() and not gpus_are_hidden()
    reason, remedy = why_no_gpu() if seen else ("", "")
    if not reason or reason == "torch sees no GPU":
        return ""
    return f"the GPU is not used: {reason} ({remedy})"


def select_backend(device: str = "auto", *, k_before_rope: bool = False) -> Backend:
    """The backend that runs on `device`; "auto" is the GPU if there is one that it supports.

    Args:
        k_before_rope: K is in the cache as it is before RoPE; of the reference only.

    Raises:
        UsageError: there is no such device, or it can't be used, or not with these options.
        LocalKVError: Triton can't build its driver's module.
    """
    if device not in DEVICES:
        raise unknown_name("unknown device", device, DEVICES)
    if k_before_rope and device != "reference":
        raise UsageError(
            f"k_before_rope: kernels read K as it is after RoPE, and device {device} has no others",
            hint="leave it out, or use device reference, which is slow",
        )
    if device == "reference":
        if importlib.util.find_spec("torch") is None:
            raise UsageError(
                "device reference can't be used: torch is not installed", hint="pip install torch"
            )
        from localkv.kernels.reference.backend import reference_backend

        return reference_backend(k_before_rope=k_before_rope)
    reason, remedy = ("", "") if device == "cpu" else why_no_gpu()
    if device == "cuda" and reason:
        raise UsageError(f"device cuda can't be used: {reason}", hint=remedy)
    if device == "cpu" or reason:
        with uncollected():
            from localkv.kernels.cpu.cpu_backend import cpu_backend

        return cpu_backend()
    from localkv.kernels.gpu.triton_backend import triton_backend

    return triton_backend("cuda")
