"""The checks of this machine, in the order in which they are shown."""

from __future__ import annotations

from functools import partial

from localkv.doctor.finding import Check
from localkv.doctor.gpu import check_compiler, check_gpu, check_torch, check_triton
from localkv.doctor.memory import check_memory
from localkv.doctor.probe import Probes
from localkv.doctor.processor import check_processor
from localkv.doctor.software import check_extras, check_packages, check_python
from localkv.doctor.storage import (
    check_kernel_cache,
    check_models,
    check_sessions,
    check_triton_cache,
)


def machine_checks() -> list[Check]:
    """All of them. Slow ones begin now, in processes of their own."""
    engine, cpu = Probes("torch", "triton", "gpu"), Probes("cpu")
    return [
        Check("Python", check_python),
        Check("packages", check_packages),
        Check("torch", partial(check_torch, engine)),
        Check("CPU", partial(check_processor, cpu)),
        Check("memory", check_memory),
        Check("GPU", partial(check_gpu, engine)),
        Check("Triton", partial(check_triton, engine)),
        Check("C compiler", check_compiler),
        Check("kernel cache", check_kernel_cache),
        Check("Triton cache", check_triton_cache),
        Check("model cache", check_models),
        Check("sessions", check_sessions),
        Check("extras", check_extras),
    ]
