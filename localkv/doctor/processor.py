"""The CPU: the cores this process may use, and the features its kernels are compiled for."""

from __future__ import annotations

from localkv.doctor.finding import Finding
from localkv.doctor.probe import ProbeError, Probes
from localkv.system.processor import processor_name, usable_cores

_INSTRUCTIONS = {
    "avx2": "AVX2",
    "avx512": "AVX-512",
    "vnni": "VNNI",
    "avx512_bf16": "bf16",
}


def check_processor(probes: Probes) -> Finding:
    n_cores = usable_cores()
    what = f"{processor_name()}, {n_cores} core{'s' if n_cores != 1 else ''}"
    try:
        facts = {"cores": n_cores, **probes.facts("cpu")}
    except ProbeError as error:
        return Finding(
            "CPU",
            "broken",
            f"{what}; kernels can't be compiled: {error}",
            "pip install --force-reinstall numba llvmlite",
            {"cores": n_cores},
        )
    has = [name for key, name in _INSTRUCTIONS.items() if facts[key]]
    lacks = [name for key, name in _INSTRUCTIONS.items() if not facts[key]]
    if not facts["x86"]:
        vectors = facts["byte_dots"] or facts["vectors"]
        return Finding("CPU", "ok", f"{what}, {vectors}", None, facts)
    summary = f"{what}, {', '.join(has) or facts['vectors']}"
    if lacks:
        summary += f"; no {', no '.join(lacks)}"
    if facts["avx2"]:
        return Finding("CPU", "ok", summary, None, facts)
    hint = "kernels are several times slower without AVX2; a virtual machine may hide it"
    return Finding("CPU", "warning", summary, hint, facts)
