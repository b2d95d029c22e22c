"""Counts and seconds of a generation."""

from __future__ import annotations

from dataclasses import dataclass, field

from localkv.cache.ladder_pool import Requantised


@dataclass
class GenerationStats:
    """Counts and seconds of one generation, filled in while it runs.

    `n_prompt` counts the whole prompt, of which `n_reused` tokens were still in the cache. As many
    more as `n_lost` would have been, if layers with a window kept all rows and recurrent ones all
    states.
    Of `n_drafted` tokens that were guessed and evaluated `n_accepted` were right, in `n_verified`
    batches. `requantised` are pages of the cache whose types changed meanwhile.
    `decode_seconds` covers the tokens after the first: the first comes with the prompt. Waiting for
    other threads is not counted; evaluating rows again because of them is.
    """

    n_prompt: int = 0
    n_reused: int = 0
    n_lost: int = 0
    n_generated: int = 0
    prompt_seconds: float = 0.0
    decode_seconds: float = 0.0
    n_drafted: int = 0
    n_accepted: int = 0
    n_verified: int = 0
    requantised: Requantised = field(default_factory=Requantised)

    @property
    def prompt_per_second(self) -> float:
        """Prompt tokens evaluated (not reused) per second."""
        return _rate(self.n_prompt - self.n_reused, self.prompt_seconds)

    @property
    def decode_per_second(self) -> float:
        """Tokens decoded per second."""
        return _rate(self.n_generated - 1, self.decode_seconds)


def _rate(count: int, seconds: float) -> float:
    return count / seconds if count > 0 and seconds > 0 else 0.0
