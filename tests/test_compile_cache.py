"""Compiled code that can't be kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from localkv.simd import compile_cache


def test_a_folder_that_can_not_be_written(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Kernels are compiled anyway, and one line says that they are not kept."""
    assert compile_cache.CAN_CACHE
    monkeypatch.setattr(compile_cache, "_is_writable", lambda folder: False)
    assert not compile_cache._can_cache()
    assert len(caplog.messages) == 1
    assert "can't be kept" in caplog.messages[0]


def test_what_can_be_written(tmp_path: Path) -> None:
    assert compile_cache._is_writable(tmp_path / "new" / "folder")
    (tmp_path / "file").write_text("")
    assert not compile_cache._is_writable(tmp_path / "file")
    assert not compile_cache._is_writable(tmp_path / "file" / "below")
