"""The CPU that kernels are compiled for, found without Numba.

It is what Numba would choose, so NUMBA_CPU_NAME, NUMBA_CPU_FEATURES and NUMBA_ENABLE_AVX may change
it. Numba is given this choice (`kernels/cpu/jit/compiler.py`), so that constants here and machine
code are always of the same CPU.
"""

from __future__ import annotations

import os
import platform

from llvmlite import binding as llvm

IS_X86 = platform.machine().lower() in ("x86_64", "amd64", "i686", "i386")

_WITHOUT_AVX = {"corei7-avx", "core-avx-i", "sandybridge", "ivybridge", "nocona"}
"""Where Numba uses no AVX unless it is told to: it is slow there, or not there at all."""


def _cpu_name() -> str:
    return os.environ.get("NUMBA_CPU_NAME") or llvm.get_host_cpu_name()


def _listed_features(cpu_name: str) -> str:
    """Features that are on or off, as LLVM takes them: "+avx2,-avx512f"."""
    given = os.environ.get("NUMBA_CPU_FEATURES")
    if given is not None:
        return given
    if os.environ.get("NUMBA_CPU_NAME", "").lower() == "generic":
        return ""
    try:
        features = llvm.get_host_cpu_features()
    except RuntimeError:  # LLVM does not know the system
        return ""
    if not _has_avx(cpu_name):
        features.update({name: False for name in features if name.startswith("avx")})
    listed: str = features.flatten()
    return listed


def _has_avx(cpu_name: str) -> bool:
    given = os.environ.get("NUMBA_ENABLE_AVX", "")
    return given != "0" if given.isdigit() else cpu_name not in _WITHOUT_AVX


CPU_NAME = _cpu_name()
CPU_FEATURES = _listed_features(CPU_NAME)

FEATURES = frozenset(name[1:] for name in CPU_FEATURES.split(",") if name.startswith("+"))
"""Features that are on, by LLVM's names; those a CPU's name implies count only if listed."""

HAS_AVX512 = {"avx512f", "avx512bw", "avx512vl", "avx512dq"} <= FEATURES
"""Vectors of 16 floats take one register, and there are 32 of them; else two of 16."""

HAS_VNNI = HAS_AVX512 and "avx512vnni" in FEATURES
"""`integer.dot_u8_i8` is one instruction."""

HAS_BYTE_SHUFFLE = HAS_AVX512 and "avx512vbmi" in FEATURES
"""Any order of the 64 bytes of a register is one instruction."""

CONVERTS_HALF = not IS_X86 or "f16c" in FEATURES or HAS_AVX512
"""There is an instruction from half to single precision."""


def vector_width() -> str:
    """The width of vector registers, for people."""
    if HAS_AVX512:
        return "AVX-512"
    return "AVX2" if "avx2" in FEATURES else "128-bit vectors"
