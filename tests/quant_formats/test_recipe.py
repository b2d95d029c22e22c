"""CONTRIBUTING's recipe for a cache type, followed in a copy of the package."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.paths import ROOT

OLD, NEW = "q6_0", "q6_9"
"""A type of caches alone, and a new one whose bytes are the same, so that texts are, too."""


def texts(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes() for path in folder.glob("localkv/**/*.py")
    }


def text_with(folder: Path, cache_type: str) -> str:
    """What the model that is part of the package says with a type of K and V."""
    command = ["complete", "-m", str(ROOT / "models" / "tales-4M-Q8_0.gguf"), "-p", "The fox"]
    options = ["-n", "8", "--temp", "0", "-c", "256", "-ctk", cache_type, "-ctv", cache_type]
    env = os.environ | {"PYTHONPATH": str(folder), "XDG_CACHE_HOME": str(folder / "cache")}
    program = [sys.executable, "-m", "localkv", *command, *options]
    done = subprocess.run(program, cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.long
@pytest.mark.slow
def test_a_cache_type_is_a_folder_and_a_line(tmp_path: Path) -> None:
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "localkv", tmp_path / "localkv", ignore=ignored)
    before = texts(tmp_path)

    formats = tmp_path / "localkv" / "quant_formats"
    registry = (formats / "__init__.py").read_text()
    (line,) = re.findall(rf'^    _format\("{OLD}".*\n', registry, re.MULTILINE)
    new_line = line.replace(OLD, NEW)
    (formats / "__init__.py").write_text(registry.replace(line, line + new_line))
    (formats / NEW).mkdir()
    for path in (formats / OLD).glob("*.py"):
        (formats / NEW / path.name).write_text(path.read_text().replace(OLD, NEW))

    after = texts(tmp_path)
    touched = {name for name in after if after[name] != before.get(name)}
    page = (ROOT / "CONTRIBUTING.md").read_text().partition("\n### Add a cache type\n")[2]
    recipe = re.findall(r"^\| `(localkv/[^`]+)` \|", page.partition("\n### ")[0], re.MULTILINE)
    assert touched == {name.replace("<type>", NEW) for name in recipe}
    assert len(touched) == 4
    assert text_with(tmp_path, NEW) == text_with(tmp_path, OLD)
