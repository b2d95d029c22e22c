"""The CPU that kernels are compiled for, and what else they assume, found without Numba.

Kernels are compiled for a level: the features that CPUs of one kind have in common. So one
machine's kernels run on another, and the package can carry them. LOCALKV_CPU names another level,
or "native": then the CPU is what Numba would choose, as it is on CPUs below all levels and where
NUMBA_CPU_NAME, NUMBA_CPU_FEATURES or NUMBA_ENABLE_AVX say something. Numba is given the choice
(`kernels/cpu/jit/compiler.py`), so that constants here and machine code are always of the same CPU.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys

from llvmlite import binding as llvm

from localkv.errors import UsageError

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


_AVX2 = "+avx,+avx2,+bmi,+bmi2,+f16c,+fma,+lzcnt,+movbe,+popcnt"
_AVX512 = _AVX2 + ",+avx512bw,+avx512cd,+avx512dq,+avx512f,+avx512vl,-prefer-256-bit"
_AVX512_VNNI = _AVX512 + ",+avx512vnni"
_AVX512_VBMI = _AVX512_VNNI + (
    ",+avx512bitalg,+avx512ifma,+avx512vbmi,+avx512vbmi2,+avx512vpopcntdq,+gfni"
)
_NEON = "+fp-armv8,+neon"
_NEON_DOT = _NEON + ",+dotprod,+fullfp16,+lse"

X86_LEVELS = {
    "zen5": ("x86-64-v4", _AVX512_VBMI + ",+avx512bf16,+avx512vp2intersect,+avxvnni"),
    "avx512-bf16": ("x86-64-v4", _AVX512_VBMI + ",+avx512bf16"),  # Zen 4, Sapphire Rapids
    "avx512-vbmi": ("x86-64-v4", _AVX512_VBMI),  # Ice Lake, Tiger Lake
    "avx512-vnni": ("x86-64-v4", _AVX512_VNNI),  # Cascade Lake
    "avx512": ("x86-64-v4", _AVX512),  # Skylake-X
    "avx2-vnni": ("x86-64-v3", _AVX2 + ",+avxvnni,+gfni"),  # Alder Lake
    "avx2": ("x86-64-v3", _AVX2),  # Haswell, Zen
}
ARM_LEVELS = {
    "neon-i8mm": ("generic", _NEON_DOT + ",+i8mm"),  # Neoverse V1
    "neon-dotprod": ("generic", _NEON_DOT),  # Neoverse N1
    "neon": ("generic", _NEON),
}
LEVELS = X86_LEVELS if IS_X86 else ARM_LEVELS if IS_ARM64 else {}
"""Levels of this machine's architecture, highest first: LLVM's name and features of the CPU. The
name only chooses the order of instructions and adds what is older than the features."""

NATIVE = "native"
CPU_VARIABLE = "LOCALKV_CPU"


def _chosen_level() -> str:
    """The level that is asked for, or the highest that this CPU has; "native" without one."""
    if any(name in os.environ for name in _OF_NUMBA):
        return NATIVE
    if asked := os.environ.get(CPU_VARIABLE):
        return asked if asked in LEVELS else NATIVE
    listed = _listed_features(_cpu_name()).split(",")
    for level, (_, features) in LEVELS.items():
        if all(name in listed for name in features.split(",") if name.startswith("+")):
            return level
    return NATIVE


_OF_NUMBA = ("NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES", "NUMBA_ENABLE_AVX")

CPU_LEVEL = _chosen_level()
"""The level that kernels are compiled for, or "native"."""


def _compiled_for() -> tuple[str, str]:
    """LLVM's name of the CPU that kernels are compiled for, and its features."""
    if CPU_LEVEL in LEVELS:
        return LEVELS[CPU_LEVEL]
    name = _cpu_name()
    return name, _listed_features(name)


CPU_NAME, CPU_FEATURES = _compiled_for()


def check_cpu() -> None:
    """Check that this CPU runs what is compiled for the level that LOCALKV_CPU names.

    Raises:
        UsageError: the variable names no level, or one with instructions that this CPU lacks.
    """
    asked = os.environ.get(CPU_VARIABLE)
    if not asked or asked == NATIVE:
        return
    hint = f"leave it unset, or set {NATIVE} or one of {', '.join(LEVELS) or 'none'}"
    if asked not in LEVELS:
        raise UsageError(f"{CPU_VARIABLE}={asked} is no level of this machine", hint=hint)
    listed = _listed_features(_cpu_name()).split(",")
    lacks = [name for name in LEVELS[asked][1].split(",") if name[0] == "+" and name not in listed]
    if lacks and asked == CPU_LEVEL:
        names = ", ".join(name[1:] for name in lacks)
        raise UsageError(f"{CPU_VARIABLE}={asked}: this CPU has no {names}", hint=hint)


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

IS_ZEN5 = HAS_BFLOAT_DOTS and "avx512vp2intersect" in FEATURES
"""No other processors have both."""

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
