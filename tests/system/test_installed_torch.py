"""What torch's files tell about it, without importing it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from localkv.system.gpu_files import built_without_cuda


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("from typing import Optional\ncuda: Optional[str] = None\nhip = None\n", True),
        ("__version__ = '2.11.0+cpu'\ncuda = None\n", True),
        ("cuda: Optional[str] = '13.0'\n", False),
        ("cuda = '12.8'\n", False),
        ("cuda = find_out()\n", False),
        ("__version__ = '3'\n", False),
        ("this is not Python", False),
        (None, False),
    ],
)
def test_version_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, expected: bool
) -> None:
    """The version is read of a torch that would raise if it were imported."""
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError")
    if text is not None:
        (package / "version.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch")
    assert built_without_cuda() is expected


def test_the_torch_that_is_installed() -> None:
    assert built_without_cuda() is (torch.version.cuda is None)
