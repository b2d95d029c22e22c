"""Signs of NVIDIA's driver."""

from __future__ import annotations

from pathlib import Path

import pytest

from localkv.system import gpu_files
from localkv.system.gpu_files import gpus_are_hidden, nvidia_driver_is_here


@pytest.fixture(autouse=True)
def without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without the driver, into which a test puts one sign of it."""
    monkeypatch.setattr(gpu_files, "DRIVER", tmp_path / "proc")
    monkeypatch.setattr(gpu_files, "DEVICE", tmp_path / "nvidiactl")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    (tmp_path / "proc").mkdir()
    (tmp_path / "bin").mkdir()
    assert not nvidia_driver_is_here()


@pytest.mark.parametrize("sign", ["proc/version", "nvidiactl", "bin/nvidia-smi"])
def test_each_sign_is_enough(tmp_path: Path, sign: str) -> None:
    (tmp_path / sign).touch(mode=0o755)
    assert nvidia_driver_is_here()


@pytest.mark.parametrize(
    ("value", "hidden"), [(None, False), ("0", False), ("1,0", False), ("", True), ("-1", True)]
)
def test_hidden_gpus(monkeypatch: pytest.MonkeyPatch, value: str | None, hidden: bool) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if value is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert gpus_are_hidden() is hidden
