"""The CPU that kernels are compiled for, and what else they assume, found without Numba.

The CPU is what Numba would choose, so NUMBA_CPU_NAME, NUMBA_CPU_FEATURES and NUMBA_ENABLE_AVX may
change it; on ARM with more features than LLVM looks for. Numba is given this choice
(`kernels/cpu/jit/compiler.py`), so that constants here and machine code are always of the same CPU.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys

from llvmlite import binding as llvm

_MACHINE = platform.machine().lower()
IS_X86 = _MACHINE in ("x86_64", "amd64", "i686", "i386")
IS_ARM64 = _MACHINE in ("aarch64", "arm64")

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
    if IS_ARM64:
        features.update(_arm_features(cpu_name))
    if not _has_avx(cpu_name):
        features.update({name: False for name in features if name.startswith("avx")})
    listed: str = features.flatten()
    return listed


_AT_HWCAP, _AT_HWCAP2 = 16, 26
_ARM_BITS = {
    "lse": (_AT_HWCAP, 8),
    "fullfp16": (_AT_HWCAP, 10),
    "dotprod": (_AT_HWCAP, 20),
    "i8mm": (_AT_HWCAP2, 13),
}
"""Where Linux's auxiliary vector has them (arch/arm64/include/uapi/asm/hwcap.h)."""


def _arm_features(cpu_name: str) -> dict[str, bool]:
    """Features that LLVM does not look for on Linux, where only some have it from the CPU's name.

    Apple's CPUs have dot products from the first one for computers on, i8mm from the second on.
    """
    if sys.platform == "darwin":
        return {"dotprod": True, "fullfp16": True, "lse": True} | (
            {} if cpu_name in ("generic", "apple-m1") else {"i8mm": True}
        )
    try:
        getauxval = ctypes.CDLL(None).getauxval
    except (AttributeError, OSError, TypeError):  # another system
        return {}
    getauxval.argtypes, getauxval.restype = [ctypes.c_ulong], ctypes.c_ulong
    return {name: bool(getauxval(kind) >> bit & 1) for name, (kind, bit) in _ARM_BITS.items()}


def _has_avx(cpu_name: str) -> bool:
    given = os.environ.get("NUMBA_ENABLE_AVX", "")
    return given != "0" if given.isdigit() else cpu_name not in _WITHOUT_AVX


CPU_NAME = _cpu_name()
CPU_FEATURES = _listed_features(CPU_NAME)

FEATURES = frozenset(name[1:] for name in CPU_FEATURES.split(",") if name.startswith("+"))
"""Features that are on, by LLVM's names; those a CPU's name implies count only if listed."""

HAS_AVX512 = {"avx512f", "avx512bw", "avx512vl", "avx512dq"} <= FEATURES
"""Vectors of 16 floats take one register, and there are 32 of them; else two of 16."""

HAS_AVX2 = IS_X86 and (HAS_AVX512 or "avx2" in FEATURES)

REGISTER_BYTES = 64 if HAS_AVX512 else 32 if HAS_AVX2 else 16
"""Bytes of a vector register; LLVM splits what is wider, but not the instructions of one CPU."""

HAS_VNNI = "avx512vnni" in FEATURES if HAS_AVX512 else HAS_AVX2 and "avxvnni" in FEATURES
"""Unsigned times signed bytes, four to a word, are multiplied and added by one instruction."""

HAS_DOTPROD = IS_ARM64 and "dotprod" in FEATURES
"""One instruction does so with signed bytes."""

HAS_I8MM = HAS_DOTPROD and "i8mm" in FEATURES
"""And of unsigned with signed ones."""

HAS_BYTE_DOTS = HAS_AVX2 or HAS_DOTPROD
"""Dot products of bytes take fewer instructions than floats' (`integer.dot_of_bytes`)."""

HAS_SIGNED_BYTE_DOTS = HAS_BYTE_DOTS and not HAS_VNNI
"""So do dot products of signed bytes (`integer.dot_of_signed_bytes`)."""

HAS_BFLOAT_DOTS = HAS_AVX512 and "avx512bf16" in FEATURES
"""Two products of bfloats are added to a float by one instruction (`simd/integer.py`)."""

HAS_BYTE_SHUFFLE = HAS_AVX512 and "avx512vbmi" in FEATURES
"""Any order of the 64 bytes of a register is one instruction."""

CONVERTS_HALF = not IS_X86 or "f16c" in FEATURES or HAS_AVX512
"""There is an instruction from half to single precision."""


def vector_width() -> str:
    """The width of vector registers, for people."""
    if HAS_AVX512:
        return "AVX-512"
    if IS_ARM64:
        return "NEON"
    return "AVX2" if HAS_AVX2 else "128-bit vectors"


def byte_dots() -> str:
    """With which instructions bytes are multiplied, for people; "" without."""
    if HAS_VNNI:
        return "AVX512-VNNI" if HAS_AVX512 else "AVX-VNNI"
    if HAS_DOTPROD:
        return "NEON i8mm" if HAS_I8MM else "NEON dotprod"
    return vector_width() if HAS_AVX2 else ""


_NUMBERS = {"x86_64": 202, "aarch64": 98}
FUTEX = _NUMBERS.get(platform.machine(), -1) if sys.platform == "linux" else -1
"""The number of the system call, or -1."""

HAS_FUTEX = FUTEX != -1
