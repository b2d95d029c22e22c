"""Two kernels to compile, and empty folders of kernels."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from localkv.kernels.cpu.jit import carried_kernels, kernel_folder
from localkv.kernels.cpu.jit.kernel_source import KernelSource
from localkv.kernels.cpu.jit.specialize import specialized

SOURCES = [KernelSource("attention/tiles", {"FORMAT": name}) for name in ("f16", "f32")]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder of compiled kernels; what the package carries would be in "carried" beside
    it."""
    monkeypatch.setattr(kernel_folder, "cache_folder", lambda: tmp_path / "kernels")
    monkeypatch.setattr(carried_kernels, "FOLDER", tmp_path / "carried")
    forget()
    yield tmp_path / "kernels"
    forget()


def forget() -> None:
    """Let the process look again for what is compiled."""
    kernel_folder.usable_folder.cache_clear()
    carried_kernels._archive.cache_clear()
    carried_kernels.carried_names.cache_clear()
    specialized.cache_clear()
