"""Guesses in steps of many requests: which of them are evaluated, and what they turn out to cost.

A step has guesses if all that it evaluates was generated: beside a prompt's piece, which fills the
step's time, they have no place. What guesses cost is a matter of how many texts share a step, since
all of them wait for the rows of one; so prices are known for each number of texts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from localkv.engine.generation import Generation
from localkv.engine.requests.request import Request
from localkv.engine.requests.scheduler import Part, SchedulerConfig
from localkv.engine.speculation.prices import Prices
from localkv.engine.speculation.speculator import Speculator


class DraftRows(Protocol):
    """The rows of requests in the cache."""

    def reserve_drafts(self, request: Request, n_tokens: int, n_drafts: int) -> bool:
        """Take the pages of guesses, too, that follow its next tokens and may be taken back; False
        if there is no room."""
        ...


class BatchDrafts:
    """Adds guesses to steps.

    Args:
        rows: of the requests.
        prices: of batches of one text.
        config: has the milliseconds that a step of several texts may take with guesses.
    """

    def __init__(self, rows: DraftRows, prices: Prices, config: SchedulerConfig) -> None:
        self.rows = rows
        self.config = config
        self._prices = {1: prices}

    def added(self, parts: Sequence[Part], generations: Mapping[int, Generation]) -> list[Part]:
        """The parts of a step, with the guesses that are worth their rows.

        Args:
            generations: by their requests' numbers.
        """
        if not all(part.request.is_decoding for part in parts):
            return [*parts]
        if len(parts) == 1:
            return [self._of_one(parts[0], generations[parts[0].request.number])]
        prices, made = self._prices_of(len(parts)), list[Part]()
        missing = sum(part.n_tokens for part in parts) - len(parts)
        for part in parts:
            generation = generations[part.request.number]
            room = self._room(part, generation)
            drafts: Sequence[int] = ()
            if generation.speculator is not None and room > 0:
                speculator = generation.speculator
                speculator.pace.prices = prices
                drafts = speculator.draft(room, missing=missing, others=len(parts) - 1)
                drafts = generation.valid(drafts)
            if drafts and self._fits(part, drafts, prices, missing, len(parts)):
                part = Part(part.request, part.n_tokens, tuple(drafts))
                missing += len(drafts)
            made.append(part)
        return made

    def _of_one(self, part: Part, generation: Generation) -> Part:
        """The only part of a step, with the guesses that are worth their rows."""
        request, n_tokens, _ = part
        speculator = generation.speculator
        room = self._room(part, generation)
        if speculator is None or room < 1:
            return part
        speculator.pace.prices = self._prices[1]
        drafts = generation.valid(speculator.draft(room, missing=n_tokens - 1))
        if not drafts or not self.rows.reserve_drafts(request, n_tokens, len(drafts)):
            return part
        return Part(request, n_tokens, tuple(drafts))

    def _room(self, part: Part, generation: Generation) -> int:
        """The most guesses that fit into a batch and that any text may want."""
        config, request = self.config, part.request
        ahead = config.ahead - 1 - request.n_unread
        return min(generation.room, ahead, config.n_batch - part.n_tokens)

    def _fits(
        self, part: Part, drafts: Sequence[int], prices: Prices, missing: int, n_texts: int
    ) -> bool:
        """Whether there is room for guesses in the cache, and in the time of a step."""
        n_rows = 1 + missing + len(drafts)
        if n_texts > 1 and 1e3 * prices.one * prices.steps(n_rows) > self.config.step_ms:
            return False
        return self.rows.reserve_drafts(part.request, part.n_tokens, len(drafts))

    def measured(
        self,
        parts: Sequence[Part],
        generations: Mapping[int, Generation],
        seconds: float,
    ) -> None:
        """Note what a step took, all of whose requests generate."""
        n_texts, prices = len(parts), self._prices_of(len(parts))
        if n_texts == 1:
            alone = generations[parts[0].request.number].speculator
            if alone is not None:
                alone.pace.measured(parts[0].n_rows, seconds)
            return
        n_rows = 1 + sum(part.n_rows for part in parts) - n_texts
        n_drafted = sum(bool(part.drafts) for part in parts)
        prices.measured(n_rows, seconds)
        for part, speculator in _speculators(parts, generations):
            pace = speculator.pace
            if part.drafts:
                pace.spent(n_rows, seconds, n_texts=n_texts, n_drafted=n_drafted)
            else:  # the guesses of others are not its loss
                pace.spent(1, min(seconds, prices.one or seconds), n_texts=n_texts)

    def _prices_of(self, n_texts: int) -> Prices:
        """Prices of 1, 2, ... rows besides those of the other texts."""
        if n_texts not in self._prices:
            one = self._prices[1]

            def guess(n_rows: int) -> float:
                return one.steps(n_texts - 1 + n_rows) / one.steps(n_texts)

            self._prices[n_texts] = Prices(guess)
        return self._prices[n_texts]


def _speculators(
    parts: Sequence[Part], generations: Mapping[int, Generation]
) -> Iterator[tuple[Part, Speculator]]:
    for part in parts:
        speculator = generations[part.request.number].speculator
        if speculator is not None:
            yield part, speculator
