"""How a process of our own is started: this Python, and a module of this package."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def child_command(module: str) -> list[str]:
    """What runs `module`. With -P no file of the working directory, as a queue.py, is imported."""
    return [sys.executable, "-P", "-m", module]


def child_environment() -> dict[str, str]:
    """This process's environment, and where the package is that runs here."""
    here = str(Path(__file__).parents[1])
    others = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path != here]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [here, *others]))}
