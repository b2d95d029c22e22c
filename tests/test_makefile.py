"""The environment that a target of the Makefile sets up, and that they follow each other well."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from support.paths import ROOT

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout whose Python and localkv do nothing but note what is asked of them."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    programs = tmp_path / ".venv/bin"
    programs.mkdir(parents=True)
    for name in ("python", "localkv"):
        (programs / name).write_text('#!/bin/sh\necho "$@" >>asked\n')
        (programs / name).chmod(0o755)
    return tmp_path


def installed(checkout: Path, *arguments: str) -> list[str]:
    """What a run of make has pip install."""
    asked = checkout / "asked"
    asked.unlink(missing_ok=True)
    environment = {name: value for name, value in os.environ.items() if name != "NVIDIA"}
    subprocess.run(
        ["make", "-s", *arguments], cwd=checkout, env=environment, check=True, capture_output=True
    )
    lines = asked.read_text().splitlines() if asked.exists() else []
    return [line.rpartition("--editable ")[2] for line in lines if "pip install" in line]


def test_an_nvidia_driver_gets_torch(checkout: Path) -> None:
    assert installed(checkout, "chat", "NVIDIA=yes") == [".[gpu]"]
    assert installed(checkout, "chat", "NVIDIA=yes") == []


def test_without_one_there_is_no_torch(checkout: Path) -> None:
    assert installed(checkout, "chat", "NVIDIA=") == ["."]
    assert installed(checkout, "chat", "NVIDIA=") == []


def test_environments_grow_in_any_order(checkout: Path) -> None:
    assert installed(checkout, "chat", "NVIDIA=") == ["."]
    assert installed(checkout, "test", "NVIDIA=") == [".[dev]"]
    assert installed(checkout, "chat", "NVIDIA=") == []
    assert installed(checkout, "chat", "NVIDIA=yes") == [".[gpu]"]
    assert installed(checkout, "test", "NVIDIA=yes") == []
    assert installed(checkout, "chat", "NVIDIA=") == []


@pytest.mark.parametrize("first", ["chat", "test"])
def test_changed_requirements_are_installed_again(checkout: Path, first: str) -> None:
    before = installed(checkout, first, "NVIDIA=")
    stamp = (checkout / ".venv/.run").stat().st_mtime
    os.utime(checkout / "constraints.txt", (stamp + 5, stamp + 5))
    assert installed(checkout, first, "NVIDIA=") == before
