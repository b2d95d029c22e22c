"""The CPU that kernels are compiled for, next to the one that Numba chooses."""

from __future__ import annotations

import runpy
from collections.abc import Iterator

import pytest
from numba.core import config
from numba.core.codegen import JITCPUCodegen

from localkv.simd import cpu_features


@pytest.fixture
def reloaded(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    for name in ("NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES", "NUMBA_ENABLE_AVX"):
        monkeypatch.delenv(name, raising=False)
    yield monkeypatch
    monkeypatch.undo()
    config.reload_config()


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx2,+fma"},
        {"NUMBA_CPU_NAME": "haswell"},
        {"NUMBA_CPU_NAME": "generic"},
        {"NUMBA_CPU_NAME": "sandybridge"},
        {"NUMBA_CPU_FEATURES": ""},
        {"NUMBA_ENABLE_AVX": "0"},
    ],
    ids=str,
)
def test_numba_chooses_the_same(reloaded: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name, value in variables.items():
        reloaded.setenv(name, value)
    config.reload_config()
    if not variables:  # a level was chosen for this process
        reloaded.setattr(config, "CPU_NAME", None)
        reloaded.setattr(config, "CPU_FEATURES", None)
    codegen = JITCPUCodegen.__new__(JITCPUCodegen)
    name = cpu_features._cpu_name()
    assert name == codegen._get_host_cpu_name()
    reloaded.setattr(cpu_features, "_arm_features", lambda name: {})
    assert cpu_features._listed_features(name) == codegen._customize_tm_features()


@pytest.mark.parametrize(
    ("features", "level"),
    [
        ("+avx2,+bmi,+bmi2,+f16c,+fma", "native"),
        (cpu_features._AVX2, "avx2"),
        (cpu_features._AVX2 + ",-avx512f,+avxvnni,+gfni", "avx2-vnni"),
        (cpu_features._AVX512 + ",+gfni", "avx512"),
        (cpu_features._AVX512_VNNI, "avx512-vnni"),
        (cpu_features._AVX512_VBMI + ",+avx512bf16,+amx-tile,+avxvnni", "avx512-bf16"),
        (cpu_features._AVX512_VBMI + ",+avx512vp2intersect", "avx512-vbmi"),
        (cpu_features._AVX512_VBMI + ",+avx512vp2intersect,+avx512bf16,+avxvnni", "zen5"),
    ],
)
def test_a_cpu_takes_the_highest_level_that_it_has(
    reloaded: pytest.MonkeyPatch, features: str, level: str
) -> None:
    reloaded.delenv("LOCALKV_CPU", raising=False)
    reloaded.setattr(cpu_features, "LEVELS", cpu_features.X86_LEVELS)
    listed = ",".join(name for name in features.split(",") if name != "-prefer-256-bit")
    reloaded.setattr(cpu_features, "_listed_features", lambda name: listed)
    assert cpu_features._chosen_level() == level
    reloaded.setenv("LOCALKV_CPU", "native")
    assert cpu_features._chosen_level() == "native"
    reloaded.delenv("LOCALKV_CPU")
    reloaded.setenv("NUMBA_CPU_NAME", "haswell")
    assert cpu_features._chosen_level() == "native"


@pytest.mark.parametrize(
    ("name", "features", "dots", "signed"),
    [
        ("neoverse-n1", "+neon,+dotprod", "NEON dotprod", True),
        ("neoverse-v1", "+neon,+dotprod,+i8mm", "NEON i8mm", True),
        ("cortex-a72", "+neon", "", False),
    ],
)
def test_features_of_arm(
    reloaded: pytest.MonkeyPatch, name: str, features: str, dots: str, signed: bool
) -> None:
    reloaded.setattr("platform.machine", lambda: "aarch64")
    reloaded.setenv("NUMBA_CPU_NAME", name)
    reloaded.setenv("NUMBA_CPU_FEATURES", features)
    arm = runpy.run_path(cpu_features.__file__)
    assert arm["byte_dots"]() == dots
    assert arm["vector_width"]() == "NEON"
    assert arm["HAS_SIGNED_BYTE_DOTS"] == signed
    assert arm["HAS_BYTE_DOTS"] == bool(dots)
    assert not arm["HAS_AVX2"]
    assert not arm["HAS_VNNI"]
    assert arm["CONVERTS_HALF"]
