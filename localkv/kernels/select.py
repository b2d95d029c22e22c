"""The backend for a `--device`. Only those that need torch import it."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence

from localkv.arch.placement import Placement
from localkv.arch.spec import ModelSpec
from localkv.config import DEVICES, device_name
from localkv.errors import UsageError, counted, quoted
from localkv.kernels.backend import Backend
from localkv.kernels.layer_kinds import check_places
from localkv.kernels.places import Places
from localkv.option_checks import unknown_name
from localkv.system.gpu_files import built_without_cuda, gpus_are_hidden, nvidia_driver_is_here
from localkv.system.this_process import uncollected

_GPU = re.compile(r"cuda(\d{1,3})")

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
    gpu = _GPU.fullmatch(device)
    if device not in DEVICES and gpu is None:
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
    if device not in ("auto", "cpu") and reason:
        raise UsageError(f"device {device} can't be used: {reason}", hint=remedy)
    if device == "cpu" or reason:
        with uncollected():
            from localkv.kernels.cpu.cpu_backend import cpu_backend

        return cpu_backend()
    from localkv.kernels.gpu.triton_backend import triton_backend

    if gpu is None:
        return triton_backend("cuda")
    from localkv.kernels.gpu.device import n_gpus

    if int(gpu[1]) >= n_gpus():
        raise UsageError(
            f"device {device} can't be used: torch sees {counted(n_gpus(), 'GPU')}",
            hint="they are counted from cuda0; CUDA_VISIBLE_DEVICES may hide some",
        )
    return triton_backend(f"cuda:{gpu[1]}")


def places_of(
    placement: Placement | None, gpus: Sequence[str], backend: Backend, config: ModelSpec
) -> Places:
    """The backends of a placement, each an instance of its own.

    Args:
        placement: None for all in one place, the backend's.
        gpus: names of GPUs; `backend` is of the first.
    """
    if placement is None:
        places = Places.one(backend, config.n_layers)
    else:
        made = {gpus[0]: backend}
        for device in placement.devices:
            if device not in made:
                made[device] = select_backend(device)
        places = Places(tuple(made[device] for device in placement.devices), placement)
    check_places(places, config)
    return places


def first_device(device: str, main_gpu: int = 0) -> str:
    """The device that `select_backend` takes for a `--device`: the first of several, or the main
    GPU, unless "auto" finds none that can be used.

    Raises:
        UsageError: see `gpu_names`.
    """
    gpus = gpu_names(device, main_gpu)
    if len(gpus) > 1:
        return gpus[0]
    if main_gpu and (device == "cuda" or (device == "auto" and not why_no_gpu()[0])):
        return gpus[0]
    return device_name(device)


def gpu_names(device: str, main_gpu: int = 0) -> list[str]:
    """The GPUs, or what takes their place, that a `--device` names: "cuda0,cuda1", or one.

    Args:
        main_gpu: the one that "auto" and "cuda" stand for.

    Raises:
        UsageError: one is no GPU, or is named twice.
    """
    if main_gpu < 0:
        raise UsageError(f"main_gpu is {main_gpu}", hint="GPUs are counted from 0")
    names = [device_name(part) for part in device.split(",")]
    if len(names) == 1:
        if names[0] in ("auto", "cuda"):
            return [f"cuda{main_gpu}"]
        return [] if names[0] == "cpu" else names
    for name in names:
        if _GPU.fullmatch(name) is None:
            raise UsageError(
                f"--device {device}: {quoted(name)} is no GPU", hint="name them cuda0,cuda1"
            )
    if len({*names}) < len(names):
        raise UsageError(f"--device {device} names a GPU twice")
    return names
