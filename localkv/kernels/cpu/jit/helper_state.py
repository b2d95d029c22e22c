"""The state that the threads of the CPU's pool share: int64, each in a cache line of its own."""

from __future__ import annotations

ENTRY, SLEEPERS, STOP, WORKER, JOB, LIMIT = 0, 8, 16, 24, 32, 40
STATE_WORDS = 48
