"""How a process of our own is started: this Python, and a module of this package."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO


def child_command(module: str) -> list[str]:
    """The command that runs `module`; -P keeps out a queue.py of the working directory."""
    return [sys.executable, "-P", "-m", module]


def child_environment() -> dict[str, str]:
    """This process's environment, and where the package is that runs here."""
    here = str(Path(__file__).parents[2])
    others = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path != here]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [here, *others]))}


def start_child(command: Sequence[str], *, stderr: int | IO[bytes]) -> subprocess.Popen[bytes]:
    """Starts a command with a pipe to its input and one from its output.

    Raises:
        OSError: the system refuses.
    """
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        env=child_environment(),
        start_new_session=True,  # Ctrl+C on the terminal is not meant for it
    )
