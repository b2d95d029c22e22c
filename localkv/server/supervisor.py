"""Keeps an engine's process running: starts it, and another one when it has died."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from localkv.chat.engine import EngineOptions
from localkv.server.engine_client import EngineClient, EngineFailedError
from localkv.server.wire import Facts, Progress, Status

MOST_DEATHS, WITHIN_SECONDS = 3, 60.0
"""The server ends once `MOST_DEATHS` engines die within `WITHIN_SECONDS`."""
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 10.0
"""Seconds before the next one is started, which double from death to death."""


class Supervisor:
    """Runs an engine.

    Args:
        options: the model to load, and how.
        say: tells whoever started the server what happens, a line each.
        command: the engine's program, if it is another; for tests.

    Attributes:
        say: as above.
        client: the process that runs, or ran last.
        n_restarts: how often there was a new one.
    """

    def __init__(
        self,
        options: EngineOptions,
        say: Callable[[str], None] = lambda line: None,
        command: Sequence[str] = (),
    ) -> None:
        self.n_restarts = 0
        self.say = say
        self._options, self._command = options, command
        self._progress = Progress("header")
        self._deaths = deque[float](maxlen=MOST_DEATHS)
        self._is_stopping = False
        self._before = Status()
        self.client = self._new_client()

    @property
    def total(self) -> Status:
        """Counts of all engines so far; all else is the status of the engine that runs."""
        now, before = self.client.status, self._before
        counts = {
            name: getattr(now, name) + getattr(before, name)
            for name in ("n_steps", "n_generated", "n_prompt", "n_reused", "n_preempted")
        }
        return msgspec.structs.replace(now, **counts)

    def _new_client(self) -> EngineClient:
        return EngineClient(self._options, self._note, self._command)

    def _note(self, progress: Progress) -> None:
        self._progress = progress

    @property
    def facts(self) -> Facts | None:
        """Facts of the model; None while no engine has it."""
        return self.client.facts if self.client.is_running else None

    @property
    def progress(self) -> dict[str, Any]:
        """How far loading is."""
        now = self._progress
        return {"stage": now.stage, "done": now.done, "total": now.total}

    async def run(self, on_ready: Callable[[Facts], None]) -> None:
        """Keep an engine running until `stop`.

        Args:
            on_ready: is told when the first one is.

        Raises:
            EngineFailedError: the model can't be loaded.
            EngineStoppedError: engines die again and again.
        """
        pause, is_first = FIRST_PAUSE, True
        while not self._is_stopping:
            await self.client.start()
            try:
                facts = await self.client.loaded()
                if is_first:
                    on_ready(facts)
                is_first, pause = False, FIRST_PAUSE
            except EngineFailedError:
                raise
            except Exception as error:
                if not self._is_stopping:
                    self.say(str(error))
            problem = await self.client.ended()
            if self._is_stopping:
                return
            self._deaths.append(time.monotonic())
            is_often = len(self._deaths) == MOST_DEATHS
            if is_first or (is_often and self._deaths[-1] - self._deaths[0] < WITHIN_SECONDS):
                raise problem
            self.say(f"{problem}; another one is started")
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
            self.n_restarts += 1
            self._before = self.total
            on_status, self.client = self.client.on_status, self._new_client()
            self.client.on_status = on_status

    async def stop(self) -> None:
        """End the engine."""
        self._is_stopping = True
        await self.client.stop()
