"""Other CPUs than the one at hand, which a process believes to be on with these variables."""

from __future__ import annotations

from llvmlite import binding as llvm

from localkv.simd.cpu_features import IS_X86

_AVX2 = "+avx2,+fma,+f16c,+bmi,+bmi2"
_AVX512 = f"{_AVX2},+avx512f,+avx512bw,+avx512vl,+avx512dq"


def _cpu(name: str, features: str) -> dict[str, str]:
    return {"NUMBA_CPU_NAME": name, "NUMBA_CPU_FEATURES": features}


NEHALEM = _cpu("nehalem", "+ssse3,+sse4.1,+sse4.2,+popcnt")
HASWELL = _cpu("haswell", _AVX2)
ALDERLAKE = _cpu("alderlake", f"{_AVX2},+avxvnni")
SKYLAKE = _cpu("skylake-avx512", _AVX512)
"""AVX-512 without VNNI."""


def runs_here(cpu: dict[str, str]) -> bool:
    """Whether the CPU at hand has all of its instructions."""
    has = llvm.get_host_cpu_features()
    needed = cpu["NUMBA_CPU_FEATURES"].split(",")
    return IS_X86 and all(has.get(name.lstrip("+")) for name in needed)
