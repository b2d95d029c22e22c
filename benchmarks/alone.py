"""Child processes that never run at the same time: one works, all others are stopped.

Threads that spin while they wait, as OpenMP's do, take no core from the process that is measured
when their process is stopped (SIGSTOP). So no program needs a setting that it lacks by itself.

No worker is left stopped, however the parent ends. An exception closes them. If the parent is
killed, the system ends their process groups, which then are stopped and have no parent in their
session (SIGHUP and SIGCONT, as POSIX has it).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any


class Worker:
    """A process that answers each command, a line, with a line of JSON, and is stopped in between.

    It first answers once without having been asked, when it is ready.

    Args:
        command: what to run; it reads `commands` and calls `answer`.

    Attributes:
        ready: the first answer.
        start_seconds: from the start of the process to there.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        started = time.perf_counter()
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            process_group=0,  # its own children are stopped with it
        )
        try:
            self.ready = self._answer()
            self.start_seconds = time.perf_counter() - started
            self._stop()
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, command: str) -> Any:
        """The answer to a command; until it is there, this worker runs."""
        self._signal(signal.SIGCONT)
        try:
            print(command, file=self._process.stdin, flush=True)
            return self._answer()
        finally:
            self._stop()

    def close(self) -> None:
        """End it; a stopped process can be killed, too."""
        self._signal(signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                pipe.close()

    def _answer(self) -> Any:
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{' '.join(self._command)}: ended without an answer")
        return json.loads(line)

    def _stop(self) -> None:
        """Stop it, and wait until it has stopped, which takes its threads a moment."""
        self._signal(signal.SIGSTOP)
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


def end_on_signals() -> None:
    """SIGTERM and SIGHUP become a SystemExit, so that workers are closed as they are on Ctrl-C."""

    def end(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, end)


def answer(value: Any) -> None:
    """Send one line from a worker to the parent."""
    print(json.dumps(value), flush=True)


def commands() -> Iterator[str]:
    """The lines that a worker gets from the parent."""
    for line in sys.stdin:
        yield line.rstrip("\n")
