"""The state that the threads of the CPU's pool share: int64, in cache lines by who writes them."""

from __future__ import annotations

ENTRY, SLEEPERS, STOP = 0, 8, 16
WORKER, JOB = 24, 25
FEWER, UNTIL, HELD, BEGAN, LOST = 26, 27, 28, 29, 30
"""How many helpers are not asked; till when, and for how long altogether; since when lost time is
counted, and how much it was. Times are the clock's, in nanoseconds."""
SPINS, WINDOW, LEAST_HELD, MOST_HELD = 32, 33, 34, 35
"""How patient they are (see `thread_pool`): pauses before a helper sleeps, and nanoseconds."""
STATE_WORDS = 40
