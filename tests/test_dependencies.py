"""What pyproject.toml declares is what the package imports, and the other way round."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

from support.paths import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OWN_NAMES = {"nvidia-ml-py": "pynvml"}
"""Modules of packages that need not be installed."""
BROUGHT_ALONG = {"llvmlite", "pillow"}
"""Numba asks for one version of the first, whose types are part of Numba's interface. Matplotlib
writes its PNGs with the second, and asks for no version of its own."""


CHOSEN_BY_NAME = {"httptools"}
"""What uvicorn imports in the protocol that the server is built on."""


def canonical(requirement: str) -> str:
    """The name in a requirement, in lower case with dashes."""
    name = re.match(r"[\w.-]+", requirement)
    assert name
    return re.sub(r"[-_.]+", "-", name[0]).lower()


def imported_modules(folder: Path) -> Iterator[str]:
    """The top-level names of every import in a folder's files, also of those in functions."""
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                yield from (alias.name.partition(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                yield node.module.partition(".")[0]


def test_a_dependency_is_imported_and_an_import_is_a_dependency() -> None:
    runtime = {canonical(line) for line in PROJECT["dependencies"]}
    extras = PROJECT["optional-dependencies"]
    optional = {canonical(line) for name in ("gpu", "plot", "ray") for line in extras[name]}
    packages = packages_distributions()
    of_module = {module: names[0] for module, names in packages.items()}
    of_module |= {module: name for name, module in OWN_NAMES.items()}
    modules = set(imported_modules(ROOT / "localkv")) - sys.stdlib_module_names
    imported = {canonical(of_module.get(module, module)) for module in modules - {"localkv"}}
    assert runtime - imported == CHOSEN_BY_NAME, "declared, and imported nowhere"
    assert imported - runtime - optional == BROUGHT_ALONG, "imported, and declared nowhere"
