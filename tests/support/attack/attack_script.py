"""Runs a script of this folder as a process of its own: what crashes or hangs fails by name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from support.paths import ROOT, TESTS

FOLDER = Path(__file__).parent
SOURCES = (ROOT, TESTS)


def run_script(
    name: str, *arguments: object, seconds: float, env: Mapping[str, str] | None = None
) -> dict[str, int]:
    """The JSON that a script prints, under Python's own checks.

    Args:
        name: of the script.
        arguments: as it takes them.
        seconds: that it works; it may take some more.
        env: more variables.
    """
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "ignore", FOLDER / name, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, SOURCES)), **(env or {})},
        capture_output=True,
        text=True,
        timeout=120 + 3 * seconds,
        check=False,
    )
    assert done.returncode == 0, f"{done.returncode}: {done.stderr[-3000:]}"
    result: dict[str, int] = json.loads(done.stdout)
    return result
