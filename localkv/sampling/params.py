"""`SamplingParams`: how a request wants its tokens drawn."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from numbers import Integral, Real

from localkv.errors import UsageError
from localkv.option_names import unknown_name
from localkv.sampling.ranges import (
    LEAST_TEMPERATURE,
    LONGEST_BREAKER,
    MOST_BIAS,
    MOST_BREAKERS,
    RANGES,
)
from localkv.sampling.table import SAMPLER_ORDER


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is drawn. Names, order and defaults are llama.cpp's (`common/common.h`).

    Attributes:
        seed: of the random generator; None or -1 draws one, which `Completion` reports.
        temperature: <= 0 is greedy: the token with the largest logit after the other samplers.
        dynatemp_range, dynatemp_exponent: entropy-dependent temperature in
            [temperature - range, temperature + range]; a range <= 0 turns it off.
        top_k: keep the k most likely; <= 0 keeps all.
        top_p, min_p, typ_p: nucleus, minimum relative probability, locally typical; 1, 0 and 1
            turn them off.
        top_n_sigma: keep logits within n standard deviations of the largest; <= 0 turns it off.
        xtc_probability, xtc_threshold: exclude top choices; a probability of 0 or a threshold above
            0.5 turns it off.
        min_keep: tokens that top_p, typ_p, min_p and xtc leave at least.
        repeat_last_n: tokens the penalties look back on; 0 none, -1 the whole context.
        repeat_penalty, frequency_penalty, presence_penalty: 1, 0 and 0 turn them off.
        dry_multiplier, dry_base, dry_allowed_length, dry_penalty_last_n, dry_sequence_breakers:
            the DRY repetition penalty; multiplier 0 turns it off, and so does a last_n of 0; a
            last_n of -1 is the whole context.
        logit_bias: token id -> added to its logit, before all samplers; -inf bans the token.
        samplers: the chain, in this order; a sampler left out does not run.

    Raises:
        UsageError: a value out of its range, or not a number.
    """

    seed: int | None = None
    temperature: float = 0.8
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    typ_p: float = 1.0
    top_n_sigma: float = -1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    min_keep: int = 0
    repeat_last_n: int = 64
    repeat_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    samplers: tuple[str, ...] = SAMPLER_ORDER

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if f.type == "int" and not isinstance(value, Integral):
                raise UsageError(f"{f.name} must be a whole number, not {value!r:.60}")
            if f.type == "float" and not isinstance(value, Real):
                raise UsageError(f"{f.name} must be a number, not {value!r:.60}")

        if self.seed is not None and not isinstance(self.seed, Integral):
            raise UsageError(f"seed must be a whole number, not {self.seed!r:.60}")
        for name, range in RANGES.items():
            value = getattr(self, name)
            if value is not None and not range.least <= value <= range.most:
                raise UsageError(f"{name} must be {range}, not {shown(value)}")
        if 0 < self.temperature < LEAST_TEMPERATURE:
            raise UsageError(
                f"temperature must be at least {LEAST_TEMPERATURE}, not {self.temperature}",
                hint="0 takes the most likely token",
            )
        self._check_bias()
        self._check_breakers()
        if isinstance(self.samplers, str) or not isinstance(self.samplers, Sequence):
            raise UsageError(f"samplers must be a list of names, not {shown(self.samplers)}")
        unknown = [name for name in self.samplers if name not in SAMPLER_ORDER]
        if unknown:
            raise unknown_name("unknown sampler", unknown[0], SAMPLER_ORDER)
        if len(set(self.samplers)) < len(self.samplers):
            twice = next(name for name in self.samplers if self.samplers.count(name) > 1)
            raise UsageError(f"samplers has {twice} more than once", hint="name each sampler once")

    def _check_bias(self) -> None:
        if not isinstance(self.logit_bias, Mapping):
            raise UsageError(f"logit_bias must be a dict, not {shown(self.logit_bias)}")
        for token, bias in self.logit_bias.items():
            if not (isinstance(token, Integral) and 0 <= token < 2**31):
                raise UsageError(f"logit_bias has {shown(token)} where a token id should be")
            is_number = isinstance(bias, Real) and (abs(bias) <= MOST_BIAS or bias == -math.inf)
            if not is_number:
                raise UsageError(
                    f"logit_bias of token {token} must be from {-MOST_BIAS:g} to {MOST_BIAS:g}, "
                    f"not {shown(bias)}",
                    hint="false in a request, or -inf in Python, bans a token",
                )

    def _check_breakers(self) -> None:
        breakers = self.dry_sequence_breakers
        if isinstance(breakers, str) or not isinstance(breakers, Sequence):
            raise UsageError(
                f"dry_sequence_breakers must be a tuple of strings, not {shown(breakers)}"
            )
        if len(breakers) > MOST_BREAKERS:
            raise UsageError(
                f"dry_sequence_breakers must be up to {MOST_BREAKERS} texts, not {len(breakers)}"
            )
        for breaker in breakers:
            if not isinstance(breaker, str):
                raise UsageError(f"dry_sequence_breakers has {shown(breaker)}, which is no text")
            if len(breaker) > LONGEST_BREAKER:
                raise UsageError(
                    f"dry_sequence_breakers: a text may have {LONGEST_BREAKER} characters, "
                    f"not {len(breaker)}"
                )


def shown(value: object) -> str:
    """A value as an error shows it, however large it is."""
    if isinstance(value, int) and abs(value) >= 2**256:
        return "an integer of so many digits"  # which Python refuses to write
    return f"{value!r:.60}"
