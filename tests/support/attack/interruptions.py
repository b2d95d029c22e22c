"""Exceptions that come between any two instructions of the package, as Ctrl-C does."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import localkv

PACKAGE = str(Path(localkv.__file__).parent)


class Interruption:
    """Counts the package's instructions (or lines) while a call runs, and interrupts one of them.

    Args:
        number: which; None interrupts none.
        event: "opcode" or "line".
    """

    def __init__(self, number: int | None = None, event: str = "opcode") -> None:
        self.number = number
        self.event = event
        self.count = 0
        self.where = ""

    def during(self, call: Callable[[], object]) -> bool:
        """Whether the call was interrupted."""
        before = sys.gettrace()
        sys.settrace(self._enter)
        try:
            call()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(before)
        return False

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        frame.f_trace_opcodes = self.event == "opcode"
        return self._step

    def _step(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == self.event:
            self.count += 1
            if self.count == self.number:
                code = frame.f_code
                self.where = f"{Path(code.co_filename).name}:{frame.f_lineno} {code.co_name}"
                raise KeyboardInterrupt
        return self._step
