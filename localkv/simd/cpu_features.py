"""The CPU that Numba compiles for, which NUMBA_CPU_NAME and NUMBA_CPU_FEATURES may change."""

from __future__ import annotations

import platform

from numba.core.registry import cpu_target

IS_X86 = platform.machine().lower() in ("x86_64", "amd64", "i686", "i386")


def compiled_features() -> frozenset[str]:
    """Features that are on, by LLVM's names; those a CPU's name implies count only if listed."""
    listed: str = cpu_target.target_context.codegen().magic_tuple()[2]
    return frozenset(name[1:] for name in listed.split(",") if name.startswith("+"))


FEATURES = compiled_features()

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
