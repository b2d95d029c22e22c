"""`RANGES`: the least and the most of every number that says how tokens are drawn.

Within them no sampler turns finite logits into infinity or NaN, in any order of the chain: a
float32 times or divided by a few of these stays far below 1e308. `SamplingParams` checks them, and
the server's table of limits shows them. This module imports nothing, so that both can import it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

LEAST_TEMPERATURE = 1e-30
"""The lowest temperature above 0."""
MOST_BIAS = 1e30
"""The most that a bias may add to a logit, or take off."""


class Range(NamedTuple):
    """The least and the most, both included; integers for a whole number."""

    least: Any
    most: Any

    def __str__(self) -> str:
        """As in "from 0 to 1e+09"."""
        ends = (f"{end:g}" if isinstance(end, float) else str(end) for end in self)
        return "from " + " to ".join(ends)


_INT32 = 2**31 - 1
_SCALE = Range(-1e30, 1e30)
_SHARE = Range(0.0, 1.0)
_LAST_N = Range(-1, _INT32)
_COUNT = Range(0, _INT32)

RANGES = {
    "seed": Range(-1, 2**63 - 1),
    "temperature": _SCALE,
    "dynatemp_range": _SCALE,
    "dynatemp_exponent": Range(0.0, 1e30),
    "top_k": Range(-(2**31), _INT32),
    "top_p": _SHARE,
    "min_p": _SHARE,
    "typ_p": _SHARE,
    "top_n_sigma": _SCALE,
    "xtc_probability": _SHARE,
    "xtc_threshold": _SHARE,
    "min_keep": Range(0, 4096),
    "repeat_last_n": _LAST_N,
    "repeat_penalty": Range(1e-6, 1e6),
    "frequency_penalty": _SCALE,
    "presence_penalty": _SCALE,
    "dry_multiplier": _SCALE,
    "dry_base": Range(1.0, 1e30),
    "dry_allowed_length": _COUNT,
    "dry_penalty_last_n": _LAST_N,
}
"""The ranges, by the names of `SamplingParams`."""

MOST_BREAKERS = 32
"""Most sequence breakers of DRY."""
LONGEST_BREAKER = 128
"""Most characters of a breaker; its first 40 bytes count."""
