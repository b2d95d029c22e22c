"""Where tests are: each package's in a folder of its name, and what they share in `support`."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.paths import ROOT, TESTS

OTHER_FOLDERS = {"aot", "attack", "benchmarks", "data", "interpreter", "models", "real", "support"}
"""Folders of tests that need a process or a compiler of their own, or of what is no package."""
MODULES = [path for path in TESTS.rglob("test_*.py") if path.is_relative_to(TESTS)]


def imported(path: Path) -> Iterator[str]:
    """The modules that a file imports, also in functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or "")


@pytest.mark.slow
def test_no_test_module_is_imported() -> None:
    tests = {path.stem for path in MODULES} | {"conftest"}
    importing = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in TESTS.rglob("*.py")
        for name in imported(path)
        if name.startswith(".") or name.rpartition(".")[2] in tests
    }
    assert importing == set(), "what tests share belongs in tests/support"


def test_folders_mirror_the_packages() -> None:
    folders = {path.parent.relative_to(TESTS) for path in MODULES} - {Path()}
    packages = {path.parent.relative_to(ROOT / "localkv") for path in ROOT.glob("localkv/**/*.py")}
    assert {folder for folder in folders if folder.parts[0] not in OTHER_FOLDERS} <= packages


def test_helpers_hold_no_tests() -> None:
    assert [path for path in MODULES if (TESTS / "support") in path.parents] == []


@pytest.mark.slow
@pytest.mark.parametrize(("folder", "left_out"), [("tests", 3), ("tests/interpreter", 1)])
def test_a_run_says_what_it_leaves_out(folder: str, left_out: int) -> None:
    nothing = ["--collect-only", "--quiet", "--ignore-glob=*/test_*.py", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *nothing, folder], cwd=ROOT, capture_output=True, text=True
    )
    assert done.stdout.count("not run here: ") == left_out, done.stdout + done.stderr


@pytest.mark.slow
def test_the_house_stays_as_small_as_it_is() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / ".ci" / "house"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
