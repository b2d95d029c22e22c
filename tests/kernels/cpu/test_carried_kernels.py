"""The kernels that the package carries: what they are, and how they are found."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from localkv.cache.ladder import DEFAULT_LADDER
from localkv.config import USUAL_PAIRS, CacheConfig, preset_pairs
from localkv.kernels.cpu.build_kernels import build, carried_sources
from localkv.kernels.cpu.cpu_backend import needed_kernels
from localkv.kernels.cpu.jit import carried_kernels
from localkv.kernels.cpu.jit.carried_kernels import archive_path, carried_names, write_archive
from localkv.kernels.cpu.jit.kernel_source import KernelSource, is_stored, stored
from localkv.kernels.cpu.jit.machine_code import pack
from localkv.kernels.cpu.jit.specialize import compiling_ahead, specialized
from localkv.loader.synthetic import KNOWN_MODELS
from localkv.simd import cpu_features
from localkv.simd.cpu_features import CPU_LEVEL, LEVELS
from support.kernel_folder import SOURCES, folder, forget
from support.paths import ROOT
from support.quick import quick

__all__ = ["folder"]

MIXTURES = {
    "F16": ("f16", ["f16"]),
    "BF16": ("bf16", ["bf16", "f32"]),
    "Q8_0": ("q8_0", ["q8_0", "f32"]),
    "Q4_0": ("q6_K", ["q4_0", "q4_1", "q6_K"]),
    "Q4_K_M": ("q6_K", ["q4_K", "q5_0", "q6_K", "q8_0", "f32"]),
    "Q5_K_M": ("q6_K", ["q5_K", "q5_1", "q6_K", "q8_0"]),
    "Q6_K": ("q6_K", ["q6_K", "q8_0"]),
    "IQ4_XS": ("q6_K", ["iq4_xs", "iq4_nl", "q5_K", "q6_K"]),
    "MXFP4": ("q8_0", ["mxfp4", "q8_0", "bf16"]),
}
"""Weight types of the embedding and of matrices, as published files mix them."""


@pytest.mark.parametrize("name", MIXTURES)
def test_they_are_all_that_known_models_take(name: str) -> None:
    """The prompt's and generated tokens', with every preset, and with every rung of the ladder."""
    embedding, matrices = MIXTURES[name]
    known = set(carried_sources())
    pairs = dict.fromkeys([*USUAL_PAIRS, *preset_pairs(), *DEFAULT_LADDER])
    is_latent = lambda spec: any(group.is_latent for group in spec.groups)  # noqa: E731
    for model in KNOWN_MODELS.values():
        if is_latent(model.spec) and name not in ("F16", "BF16", "Q8_0", "Q4_K_M"):
            continue
        for type_k, type_v in pairs:
            cache = CacheConfig(type_k=type_k, type_v=type_v, n_ctx=4096)
            prompt, generated = needed_kernels(embedding, matrices, model.spec, cache)
            assert {*prompt, *generated} - known == set(), (model.spec.name, type_k, type_v)


def write(*sources: KernelSource, damage: bool = False) -> None:
    kernels = {
        source.carried_name: pack(source.carried_name, source.compile()) for source in sources
    }
    if damage:
        kernels = {name: data[:-1] + b"?" for name, data in kernels.items()}
    write_archive(archive_path(), kernels)
    forget()


def no_compiler(source: KernelSource) -> None:
    raise AssertionError(f"{source.template} is compiled")


def test_what_is_carried_is_not_compiled(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(*SOURCES)
    monkeypatch.setattr(KernelSource, "compile", no_compiler)
    assert all(is_stored(source) for source in SOURCES)
    with compiling_ahead(SOURCES) as all_compiled:
        assert all_compiled
        assert all(specialized(source)["decode_tile"] for source in SOURCES)
    assert not folder.exists()


def test_what_is_missing_is_compiled(folder: Path) -> None:
    first, second = SOURCES
    write(first)
    assert is_stored(first)
    assert not is_stored(second)
    assert specialized(second)["decode_tile"] != 0
    assert [path.name for path in folder.iterdir() if path.name != "looked"] == [second.name]


def test_a_damaged_kernel_is_compiled(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(SOURCES[0], damage=True)
    with caplog.at_level(logging.WARNING):
        assert stored(SOURCES[0]) is None
    assert "a kernel that the package carries is damaged" in caplog.text
    assert specialized(SOURCES[0])["decode_tile"] != 0
    assert (folder / SOURCES[0].name).exists()


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("data", [b"", b"PK nonsense"])
def test_a_damaged_archive_holds_nothing(data: bytes, caplog: pytest.LogCaptureFixture) -> None:
    archive_path().parent.mkdir()
    archive_path().write_bytes(data)
    with caplog.at_level(logging.WARNING):
        assert carried_names() == frozenset()
    assert "can't be read" in caplog.text


def test_names_follow_the_level_and_not_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    from localkv.kernels.cpu.jit import kernel_source

    def names() -> tuple[str, str]:
        source = KernelSource("attention/tiles", {"FORMAT": "f16"})
        return source.carried_name, source.name

    carried_name, name = names()
    monkeypatch.setattr(kernel_source, "toolchain", lambda: "another")
    assert names()[0] == carried_name
    assert names()[1] != name
    monkeypatch.setattr(kernel_source, "CPU_FEATURES", "+sse2")
    assert names()[0] != carried_name


@pytest.mark.usefixtures("folder")
@pytest.mark.skipif(CPU_LEVEL not in LEVELS, reason="this CPU is below all levels")
def test_a_build_keeps_what_is_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from localkv.kernels.cpu import build_kernels

    monkeypatch.setattr(build_kernels, "carried_sources", lambda: SOURCES[:1])
    assert build(1) == 1
    first = archive_path().read_bytes()
    forget()
    monkeypatch.setattr(build_kernels, "carried_sources", lambda: SOURCES)
    assert build(1) == 1
    forget()
    assert carried_names() == {source.carried_name for source in SOURCES}
    monkeypatch.setattr(build_kernels, "carried_sources", lambda: SOURCES[:1])
    assert build(1) == 0
    assert archive_path().read_bytes() == first
    assert capsys.readouterr().out.startswith(f"{CPU_LEVEL}: 1 kernel, 1 compiled now")


def run_in(level: str, program: str) -> str:
    env = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA_")}
    env |= {"LOCALKV_CPU": level, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", program]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout


@pytest.mark.skipif(not LEVELS, reason="another architecture")
@pytest.mark.parametrize("level", quick(LEVELS, (), (*LEVELS,)[::3]))
def test_every_level_is_compiled_on_any_cpu(level: str) -> None:
    """Kernels of products and of attention; instructions of higher levels are in none of them."""
    program = """
from localkv.kernels.cpu.jit.kernel_source import KernelSource
for source in (
    KernelSource("linear/product", {"FORMAT": "q8_0"}),
    KernelSource("attention/score", {"FORMAT": "q8_0", "ROWS": 4}),
):
    print(len(source.compile()) > 0)
from localkv.simd.cpu_features import CPU_LEVEL
print(CPU_LEVEL)
"""
    assert run_in(level, program).split() == ["True", "True", level]


def test_a_level_that_does_not_exist_is_refused() -> None:
    env = {**os.environ, "LOCALKV_CPU": "mmx", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "localkv", "complete", "-p", "x", "-n", "1"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode != 0
    assert "error: LOCALKV_CPU=mmx is no level of this machine" in done.stderr
    assert done.stdout == ""


def test_a_level_above_the_cpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    highest = next(iter(LEVELS), None)
    if highest is None:
        pytest.skip("another architecture")
    monkeypatch.setenv("LOCALKV_CPU", highest)
    monkeypatch.setattr(cpu_features, "CPU_LEVEL", highest)
    monkeypatch.setattr(cpu_features, "_listed_features", lambda name: "+sse2")
    with pytest.raises(cpu_features.UsageError, match="this CPU has no "):
        cpu_features.check_cpu()


@pytest.mark.slow
def test_a_first_start_compiles_nothing(tmp_path: Path) -> None:
    """With what `make run` has built."""
    sources = carried_sources()
    if not {source.carried_name for source in sources} <= carried_names():
        pytest.skip("python -m localkv.kernels.cpu.build_kernels has not been run for this source")
    env = os.environ | {"XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    for model in ("tales-4M-Q8_0.gguf", "tales-4M-F16.gguf"):
        command = [sys.executable, "-m", "localkv", "complete", "-m", str(ROOT / "models" / model)]
        command += ["-p", "Once upon a time", "-n", "40", "--temp", "0", "-q"]
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")
        assert list(tmp_path.rglob("localkv_*")) == []
    assert carried_kernels.carried("none of this name") is None
