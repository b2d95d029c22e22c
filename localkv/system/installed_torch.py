"""Abilities of the installed torch, as far as its files show: importing it takes a second."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path


def built_without_cuda() -> bool:
    """Whether torch is there and is known to be a build that can't use NVIDIA's GPUs.

    `torch/version.py` says so; it is read, not run. If that can't be found out, it counts as False.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    try:
        text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
        lines = ast.parse(text).body
    except (OSError, ValueError, SyntaxError):
        return False
    for line in lines:
        if not isinstance(line, ast.Assign | ast.AnnAssign):
            continue
        targets = line.targets if isinstance(line, ast.Assign) else [line.target]
        if any(isinstance(target, ast.Name) and target.id == "cuda" for target in targets):
            return isinstance(line.value, ast.Constant) and line.value.value is None
    return False
