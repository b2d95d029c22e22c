"""Signs that a generated text has degenerated: a loop, or a long run without any doubt.

The thresholds are from 160 texts of the model that ships, of up to 700 tokens, with five pairs of
cache types (docs/quality.md, "Loops").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from localkv.config import MIXED, CacheConfig
from localkv.quant_formats import FORMATS

LONGEST_PERIOD = 128
"""Tokens of the longest piece that is looked for."""
LEAST_REPEATS = 8
"""Times that a piece comes one after the other in a loop: of texts that came to their own end none
had a piece more than 3 times."""
LEAST_TOKENS = 32
"""Tokens of a loop at least: a row of digits or dashes is none."""
RUN_TOKENS = 256
"""Tokens of a run without doubt: whole stories of the model that ships have shorter ones."""
LEAST_ENTROPY = 0.01
"""Mean entropy of its predictions, in nats, below which a run is one."""
ROOMY_BITS = 16
"""Bits of a value of K from which on a larger type changes nothing."""


@dataclass(frozen=True)
class Loop:
    """A piece that comes again and again.

    Attributes:
        at: the number of its first token in the answer, counted from 1.
        period: tokens of the piece.
        n_tokens: of all of it; the last piece may be cut.
    """

    at: int
    period: int
    n_tokens: int

    @property
    def n_repeats(self) -> int:
        """Times that the whole piece came."""
        return self.n_tokens // self.period


@dataclass(frozen=True)
class Degeneration:
    """What is wrong with an answer.

    Attributes:
        loop: the longest, or None.
        certain_from: the number of the first token of a run of `RUN_TOKENS` tokens that were
            predicted without doubt; None for no such run, or if entropies are not known.
    """

    loop: Loop | None
    certain_from: int | None

    def line(self, cache: CacheConfig, rungs: Sequence[int] = ()) -> str:
        """What is wrong and what would help, in one line; empty if nothing is.

        Args:
            cache: the one that it was generated with.
            rungs: pages on each rung of its ladder, if it has one.
        """
        if self.loop is not None:
            tokens = "token" if self.loop.period == 1 else "tokens"
            said = (
                f"the same {self.loop.period} {tokens} {self.loop.n_repeats} times "
                f"from token {self.loop.at} on"
            )
        elif self.certain_from is not None:
            said = f"{RUN_TOKENS} tokens without any doubt from token {self.certain_from} on"
        else:
            return ""
        return f"{said}; {_remedy(cache, any(rungs[1:]))}"


def _remedy(cache: CacheConfig, has_changed: bool) -> str:
    """What to try: first a larger type of K, whose error moves attention's weights.

    Args:
        has_changed: pages are not in a ladder's first types any more.
    """
    if has_changed:
        return "try a larger --kv-budget first, then --dry-multiplier 0.8"
    type_k = cache.kv_ladder[0][0] if cache.kv_ladder else cache.shown_types[0]
    bits = 0.0 if type_k == MIXED else FORMATS[type_k].bits_per_value(256)
    if bits >= ROOMY_BITS:
        return "K is not packed: try --dry-multiplier 0.8, or a higher --temp"
    if cache.kv_ladder:
        return "try a --kv-ladder that begins with f16 first, then --dry-multiplier 0.8"
    larger = "q8_0" if bits < FORMATS["q8_0"].bits_per_value(256) else "f16"
    return f"try a larger type of K first (-ctk {larger}), then --dry-multiplier 0.8"


def degeneration(ids: Sequence[int], entropies: Sequence[float] = ()) -> Degeneration:
    """Look for signs in the tokens of an answer, and in the entropies of its predictions."""
    return Degeneration(find_loop(ids), find_certain_run(entropies))


def find_loop(ids: Sequence[int]) -> Loop | None:
    """Find the longest loop. If several are equally long, take the one with the shortest piece."""
    tokens = np.asarray(ids)
    best: Loop | None = None
    for period in range(1, min(LONGEST_PERIOD, len(tokens) // LEAST_REPEATS) + 1):
        differs = np.flatnonzero(tokens[period:] != tokens[:-period])
        ends = np.concatenate([[-1], differs, [len(tokens) - period]])
        lengths = np.diff(ends) - 1
        longest = int(lengths.argmax())
        n_tokens = int(lengths[longest]) + period
        if n_tokens >= max(LEAST_TOKENS, LEAST_REPEATS * period) and (
            best is None or n_tokens > best.n_tokens
        ):
            best = Loop(int(ends[longest]) + 2, period, n_tokens)
    return best


def find_certain_run(entropies: Sequence[float]) -> int | None:
    """The number of the first token of a run without doubt, counted from 1."""
    if len(entropies) < RUN_TOKENS:
        return None
    sums = np.concatenate([[0.0], np.cumsum(entropies)])
    means = (sums[RUN_TOKENS:] - sums[:-RUN_TOKENS]) / RUN_TOKENS
    certain = np.flatnonzero(means < LEAST_ENTROPY)
    return int(certain[0]) + 1 if len(certain) else None
