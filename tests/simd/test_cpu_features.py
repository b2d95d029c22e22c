"""The CPU that kernels are compiled for, next to the one that Numba chooses."""

from __future__ import annotations

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
    codegen = JITCPUCodegen.__new__(JITCPUCodegen)
    name = cpu_features._cpu_name()
    assert name == codegen._get_host_cpu_name()
    assert cpu_features._listed_features(name) == codegen._customize_tm_features()
