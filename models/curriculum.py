"""The order in which the model sees rows in training, and how fast it learns.

Lengths grow, and exercises give way to stories and chats.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Stage:
    """Lasts until `until` tokens have been seen; lengths and genres are drawn by weight."""

    until: float
    tokens_per_step: int
    lengths: Mapping[int, float]
    genres: Mapping[str, float]

    def draw_length(self, rng: random.Random) -> int:
        return rng.choices(list(self.lengths), list(self.lengths.values()))[0]


@dataclass(frozen=True)
class Cycle:
    """Until `until` tokens the rate is at `peak`, and it falls to zero over its last `decay`."""

    until: float
    peak: float
    decay: float


_EXERCISES = {
    "repeat": 0.10,
    "list": 0.22,
    "notebook": 0.18,
    "memory chat": 0.12,
    "story": 0.09,
    "short story": 0.09,
    "story chat": 0.20,
}
_MIXED = {
    "repeat": 0.05,
    "list": 0.10,
    "list and stories": 0.07,
    "notebook": 0.20,
    "memory chat": 0.20,
    "story": 0.14,
    "story chat": 0.24,
}
_FINAL = {
    "repeat": 0.03,
    "list": 0.04,
    "list and stories": 0.08,
    "notebook": 0.20,
    "memory chat": 0.19,
    "personal chat": 0.06,
    "story": 0.14,
    "story chat": 0.18,
    "rare story chat": 0.08,
}
_POLISH = {
    "repeat": 0.02,
    "list": 0.03,
    "list and stories": 0.05,
    "notebook": 0.16,
    "memory chat": 0.17,
    "personal chat": 0.07,
    "careful story": 0.18,
    "careful story chat": 0.20,
    "careful rare story chat": 0.12,
}
STAGES = (
    Stage(1.5e6, 4096, {256: 1.0}, _EXERCISES),
    Stage(4e6, 8192, {256: 0.3, 512: 0.7}, _MIXED),
    Stage(9e6, 8192, {512: 0.35, 1024: 0.40, 2048: 0.25}, _FINAL),
    Stage(float("inf"), 8192, {512: 0.45, 1024: 0.35, 2048: 0.20}, _POLISH),
)
CYCLES = (Cycle(9e6, peak=1.0, decay=0.35), Cycle(12.5e6, peak=0.5, decay=1.0))
TOTAL_TOKENS = int(CYCLES[-1].until)
_WARM_STEPS = 30


def stage_at(tokens: float) -> Stage:
    return next(stage for stage in STAGES if tokens < stage.until)


def rate_factor(step: int, tokens: float) -> float:
    """What the learning rates are multiplied with: warm-up, then the cycles."""
    begin = 0.0
    for cycle in CYCLES:
        if tokens < cycle.until:
            left = (cycle.until - tokens) / ((cycle.until - begin) * cycle.decay)
            return min(1.0, (step + 1) / _WARM_STEPS) * cycle.peak * min(1.0, left)
        begin = cycle.until
    return 0.0
