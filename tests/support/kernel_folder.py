"""Two kernels to compile, and an empty folder to keep them in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from localkv.kernels.cpu.jit import kernel_folder
from localkv.kernels.cpu.jit.kernel_source import KernelSource
from localkv.kernels.cpu.jit.specialize import specialized

SOURCES = [KernelSource("attention/tiles", {"FORMAT": name}) for name in ("f16", "f32")]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder of compiled kernels."""
    monkeypatch.setattr(kernel_folder, "cache_folder", lambda: tmp_path / "kernels")
    kernel_folder.usable_folder.cache_clear()
    specialized.cache_clear()
    yield tmp_path / "kernels"
    kernel_folder.usable_folder.cache_clear()
    specialized.cache_clear()
