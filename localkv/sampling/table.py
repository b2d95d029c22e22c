"""`SAMPLERS`: every sampler of the chain, by name, letter and function.

The command line, the chat and `SamplingParams` read this table before anything is computed, so it
imports nothing: a sampler's function is found when it runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from localkv.sampling.candidates import Candidates
    from localkv.sampling.params import SamplingParams
    from localkv.sampling.state import SamplerState

    SamplerFunction = Callable[[Candidates, SamplingParams, SamplerState], Candidates]


def _never(params: SamplingParams) -> int:
    return 0


@dataclass(frozen=True)
class SamplerEntry:
    """One sampler.

    Attributes:
        name: what a chain calls it; its function has the same name.
        letter: in a chain written by letters.
        acts: whether it can change anything with these parameters; one that cannot does not run.
        aliases: other names that the command line takes.
        keeps_largest: it neither drops the largest logit nor lets another one overtake it, so that
            a greedy draw can do without it.
        last_n: how many of the latest tokens it reads, -1 for the whole context.
        module: where in this package its function is.
    """

    name: str
    letter: str
    acts: Callable[[SamplingParams], bool]
    aliases: tuple[str, ...] = ()
    keeps_largest: bool = False
    last_n: Callable[[SamplingParams], int] = _never
    module: str = "samplers"

    @property
    def function(self) -> SamplerFunction:
        """Computes it; imports NumPy."""
        function: SamplerFunction = getattr(
            import_module(f"localkv.sampling.{self.module}"), self.name
        )
        return function


def _penalties_act(p: SamplingParams) -> bool:
    neutral = (p.repeat_penalty, p.frequency_penalty, p.presence_penalty) == (1, 0, 0)
    return p.repeat_last_n != 0 and not neutral


SAMPLERS = (
    SamplerEntry("penalties", "e", _penalties_act, last_n=lambda p: p.repeat_last_n),
    SamplerEntry(
        "dry",
        "d",
        lambda p: p.dry_multiplier != 0 and p.dry_penalty_last_n != 0,
        last_n=lambda p: p.dry_penalty_last_n,
        module="dry",
    ),
    SamplerEntry(
        "top_n_sigma", "s", lambda p: p.top_n_sigma > 0, ("top-n-sigma",), keeps_largest=True
    ),
    SamplerEntry("top_k", "k", lambda p: p.top_k > 0, ("top-k",), keeps_largest=True),
    SamplerEntry("typ_p", "y", lambda p: p.typ_p < 1, ("typical-p", "typical", "typ-p", "typ")),
    SamplerEntry("top_p", "p", lambda p: p.top_p < 1, ("top-p", "nucleus"), keeps_largest=True),
    SamplerEntry("min_p", "m", lambda p: p.min_p > 0, ("min-p",), keeps_largest=True),
    SamplerEntry("xtc", "x", lambda p: p.xtc_probability > 0 and p.xtc_threshold <= 0.5),
    SamplerEntry(
        "temperature",
        "t",
        lambda p: p.temperature != 1 or p.dynatemp_range > 0,
        ("temp",),
        keeps_largest=True,
    ),
)
"""In the order of llama.cpp's default chain (`common_params_sampling::samplers`)."""

SAMPLER_ORDER = tuple(entry.name for entry in SAMPLERS)
SAMPLER_LETTERS = "".join(entry.letter for entry in SAMPLERS)


def active_samplers(params: SamplingParams) -> tuple[SamplerEntry, ...]:
    """The samplers that can change anything, in the order of the chain."""
    by_name = {entry.name: entry for entry in SAMPLERS}
    chain = (by_name[name] for name in params.samplers)
    return tuple(entry for entry in chain if entry.acts(params))
