"""Who may import Triton: only what a machine without a GPU never imports."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import localkv

PACKAGE = Path(localkv.__file__).parent
WRITTEN_IN_TRITON = re.compile(r"triton_primitives|kernels.gpu|quant_formats.([a-z0-9_]+.)?gpu")
"""Paths below the package, and dotted names."""
WITHOUT_TRITON = "localkv.kernels.gpu.footprint"
"""Counts bytes on machines without a GPU, too."""


def imported_at_module_scope(source: str) -> Iterator[str]:
    def visit(node: ast.AST) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from (alias.name for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                yield from (f"{child.module}.{alias.name}" for alias in child.names)
            elif not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                yield from visit(child)

    yield from visit(ast.parse(source))


def test_only_gpu_code_imports_triton() -> None:
    importing = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        for name in imported_at_module_scope(path.read_text())
        if name.startswith("triton") or WRITTEN_IN_TRITON.match(name.removeprefix("localkv."))
        if not name.startswith(WITHOUT_TRITON)
    }
    assert importing  # the search finds what there is
    assert [path for path in importing if not WRITTEN_IN_TRITON.match(path)] == []
