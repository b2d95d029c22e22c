"""Ctrl-C while a command runs: the exception that Python makes of it, except where that would harm.

Where nobody can catch it, or a library does and goes on, the process ends at once instead.
"""

from __future__ import annotations

import os
import sys
from types import FrameType
from typing import TYPE_CHECKING

from localkv.cli.process.failure import INTERRUPTED

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

_IMPORTS = "<frozen importlib._bootstrap>"


def interrupt(number: int, frame: FrameType | None) -> None:
    """The effect of SIGINT.

    An exception in the middle of an import is taken for a part that is missing by NumPy and others,
    which go on without it or blame something else.
    """
    while frame is not None:
        if frame.f_code.co_filename == _IMPORTS:
            os._exit(INTERRUPTED)
        frame = frame.f_back
    raise KeyboardInterrupt


def end_unseen() -> None:
    """Let an interrupt end the process that comes in a finaliser or a callback of Python's own.

    Python would show a traceback and go on as if nothing had been pressed.
    """
    show = sys.unraisablehook

    def hook(ignored: UnraisableHookArgs) -> None:
        if issubclass(ignored.exc_type, KeyboardInterrupt):
            os._exit(INTERRUPTED)
        show(ignored)

    sys.unraisablehook = hook
