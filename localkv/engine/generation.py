"""One generation: a text of its own, a sampler, and where it ends."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from threading import Event
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from localkv.cache.arrays import NO_TOKEN
from localkv.cache.ladder_pool import Requantised
from localkv.engine.audit.predictions import Predictions
from localkv.engine.cache_slot import CacheSlot
from localkv.engine.logprobs import RankedToken, ranked
from localkv.engine.speculation.speculator import Speculator
from localkv.engine.token_text import Text
from localkv.errors import LocalKVError
from localkv.sampling.sampler import Sampler
from localkv.system.turns import CancelledWaitError

if TYPE_CHECKING:
    from localkv.structured.constraint import Constraint

LEAST_SHARE = 0.05
"""Seconds of tokens that a generation draws, at least, in a turn that others wait for."""

FinishReason = Literal["stop", "length", "cancelled"]


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


class Forcing(Protocol):
    """Says which tokens of a generation are not drawn, but must come."""

    def forced(self) -> int | None:
        """The next token, or None if it is drawn."""
        ...

    def accept(self, token: int) -> None:
        """Take note of the next token, drawn or forced."""
        ...


class TokenStream(Protocol):
    """What a text is made of: `Generation`, alone or beside others."""

    stats: GenerationStats
    finish_reason: FinishReason | None
    context_full: bool
    predictions: Predictions | None

    @property
    def ids(self) -> list[int]:
        """The prompt, and the tokens so far."""
        ...

    @property
    def logprobs(self) -> Sequence[RankedToken]:
        """Of the tokens so far, if they were asked for."""
        ...

    def __iter__(self) -> Iterator[int]: ...

    def __next__(self) -> int: ...

    def close(self) -> None:
        """End it, with "cancelled"."""
        ...


class Generation(Iterator[int]):
    """The token ids of one generation, as they are drawn.

    Nothing is held between two tokens: the engine may do other work, for other generations, too,
    and this one goes on as if it had been alone. An exception ends it ("cancelled"). One thread at
    a time may ask for tokens.

    Args:
        slot: whose turns it takes.
        prompt_ids: the whole prompt, at most `n_ctx`.
        sampler: draws the tokens; it accepts those of the prompt first.
        n_ctx: tokens of context.
        max_tokens: most tokens to draw; None goes on to the end of the context.
        stop_ids: tokens that end the generation.
        cancel: looked at before every chunk of the prompt and before every token.
        forcing: may put tokens in place of drawn ones; they count like any other.
        constraint: allows the tokens; the host draws them. Where it is over the generation ends,
            with "stop".
        logprobs: alternatives that are noted for each token; None notes nothing. With a number the
            host draws the tokens.
        predictions: keeps what an audit needs of each token's distribution. The host draws the
            tokens.
        speculator: guesses tokens, which are evaluated together; the text stays the same. The host
            draws the tokens.

    Attributes:
        stats: counts and seconds so far.
        finish_reason: None while it runs, then "stop" (a stop token, which is not part of the
            ids), "length" (`max_tokens` or the end of the context) or "cancelled".
        context_full: it ended because the context did.
        predictions: what was kept.
    """

    def __init__(
        self,
        slot: CacheSlot,
        prompt_ids: Sequence[int],
        sampler: Sampler,
        *,
        n_ctx: int,
        max_tokens: int | None,
        stop_ids: frozenset[int],
        cancel: Event,
        forcing: Forcing | None = None,
        constraint: Constraint | None = None,
        logprobs: int | None = None,
        predictions: Predictions | None = None,
        speculator: Speculator | None = None,
    ) -> None:
        self.stats = GenerationStats(n_prompt=len(prompt_ids))
        self.finish_reason: FinishReason | None = None
        self.context_full = False
        self._slot = slot
        self._text = Text(list(prompt_ids), len(prompt_ids))
        self._sampler = sampler
        self._n_logprobs = logprobs
        self.predictions = predictions
        self._ranked: list[RankedToken] = []
        self._speculator = speculator
        self._ahead = deque[tuple[int, NDArray[np.float32]]]()
        self._constraint = constraint
        on_host = any(one is not None for one in (logprobs, predictions, speculator, constraint))
        self._draw = None if on_host else slot.model.draw(sampler.params)
        self._tokens: Iterator[int] | None = None
        room = n_ctx - len(prompt_ids)
        self._budget = room if max_tokens is None else min(max_tokens, room)
        self._fills_context = max_tokens is None or room < max_tokens
        self._stop_ids = stop_ids
        self._cancel = cancel
        self._forcing = forcing
        self._ready = deque[tuple[int, float]]()
        self._end: FinishReason | None = None
        self._error: Exception | None = None

    @property
    def ids(self) -> list[int]:
        """The prompt, and the tokens so far."""
        return self._text.ids[: self.stats.n_prompt + self.stats.n_generated]

    @property
    def logprobs(self) -> Sequence[RankedToken]:
        """Of the tokens so far, if they were asked for."""
        return self._ranked[: self.stats.n_generated]

    def __next__(self) -> int:
        if self.finish_reason is not None:
            raise StopIteration
        if self._ready:
            if self._cancel.is_set():
                self._finish("cancelled")
        elif self.stats.n_generated < self._budget and self._end is None:
            self._take_turn()
        if self.finish_reason is not None or not self._ready:
            self._finish(self.finish_reason or self._end or "length")
            raise StopIteration
        token, seconds = self._ready.popleft()
        stats = self.stats
        if stats.n_generated:
            stats.decode_seconds += seconds
        stats.n_generated += 1
        if stats.n_generated == self._budget:
            self._finish(self._end or "length")
        return token

    def _take_turn(self) -> None:
        try:
            if self._error is not None:
                raise self._error
            self._slot.turn(self._fetch, self._cancel)
        except CancelledWaitError:
            self._finish("cancelled")
        except BaseException as error:
            if not self._ready or not isinstance(error, Exception):
                self._finish("cancelled")
                raise
            self._error = error  # raised once the tokens drawn before are used up

    def close(self) -> None:
        """End it, as `cancel` does."""
        if self.finish_reason is None:
            self._finish("cancelled")

    def _finish(self, reason: FinishReason) -> None:
        self.finish_reason = reason
        self.context_full = reason == "length" and self._fills_context
        self._tokens = None
        self._ready.clear()

    def _fetch(self) -> None:
        """Draw a token; and more, while others wait, as every change has its price.

        The others then have the rows evaluated that they lack. So at least half of the time goes
        into new tokens, however many take turns.
        """
        started = time.perf_counter()
        self._fetch_some()
        if not self._slot.is_wanted:
            return
        fetched = time.perf_counter()
        until = fetched + max(LEAST_SHARE, fetched - started)
        while self._slot.is_wanted and time.perf_counter() < until and not self._has_all:
            self._fetch_some()

    @property
    def _has_all(self) -> bool:
        n_drawn = len(self._text.ids) - self._text.n_prompt
        return self._end is not None or n_drawn >= self._budget

    def _fetch_some(self) -> None:
        """Draw a token, and those behind it whose logits are there because they were guessed."""
        self._fetch_one()
        while self._ahead and self._end is None:
            self._fetch_one()

    def _fetch_one(self) -> None:
        started, before = time.perf_counter(), self._slot.cache.requantised
        token = self._drawn()
        self.stats.requantised.add(self._slot.cache.requantised - before)
        if token is None:
            self._end = "cancelled"
        elif token in self._stop_ids:
            self._end = "stop"
        else:
            self._sampler.accept(token)
            if self._forcing is not None:
                self._forcing.accept(token)
            if self._speculator is not None:
                self._speculator.accept(token)
            if self._constraint is not None:
                self._constraint.accept(token)
                if self._constraint.is_over:
                    self._end = "stop"
            self._text.ids.append(token)
            self._ready.append((token, time.perf_counter() - started))

    def _drawn(self) -> int | None:
        """The next token, or None if it was cancelled."""
        slot, text = self._slot, self._text
        if self._tokens is not None and slot.is_taken_by(text):
            if self._cancel.is_set():
                return None
            if (forced := self._forced()) is not None:
                self._tokens = None  # they follow another one
                return forced
            return checked(slot.following(text, self._tokens))
        if self._ahead:
            return self._drawn_on_host(self._ahead.popleft()[1])
        number = len(text.ids) - text.n_prompt
        started = time.perf_counter()
        reuse = slot.take(text)
        if number == 0:
            self.stats.n_reused, self.stats.n_lost = reuse
            for token in text.ids:
                self._sampler.accept(token)
            if self._speculator is not None:
                self._speculator.begin(text.ids)
        if self._speculator is not None and number:
            row = self._verified(self._speculator, self._budget - number - 1)
            return None if row is None else self._drawn_on_host(row)
        logits = slot.logits(text, self._cancel)
        if number == 0:
            self.stats.prompt_seconds = time.perf_counter() - started
            if self._cancel.is_set():
                return None
        if logits is None:
            return None
        if self._draw is None:
            return self._drawn_on_host(slot.model.backend.arrays.to_numpy(logits[0]))
        if (forced := self._forced()) is not None:
            return forced
        seed = self._sampler.seed
        arrays = slot.model.backend.arrays
        token = checked(int(self._draw(logits, arrays.int64([seed, number]))))
        assert slot.loop is not None
        self._tokens = slot.loop.tokens(
            slot.sequence,
            token,
            self._draw,
            seed=seed,
            number=number + 1,
            limit=self._budget - number - 1,
        )
        return token

    def _drawn_on_host(self, row: NDArray[np.float32]) -> int | None:
        """A token from the last one's logits, float32 [n_vocab]; None if it was cancelled.

        If it is the one that was drafted the next logits are there already; else those of the
        drafts have no place in the text.
        """
        if self._cancel.is_set():
            return None
        token = self._forced()
        if token is None:
            constraint = self._constraint
            token = self._sampler.sample(row if constraint is None else constraint.masked(row))
        if token not in self._stop_ids:
            if self._n_logprobs is not None:
                self._ranked.append(ranked(row, token, self._n_logprobs))
            if self.predictions is not None:
                self.predictions.add(row, token)
        if self._ahead and self._ahead[0][0] == token:
            self.stats.n_accepted += 1
            if self._speculator is not None:
                self._speculator.pace.saved()
        elif self._ahead:
            self._ahead.clear()
            self._slot.retract(self._text, len(self._text.ids))
        return token

    def _verified(self, speculator: Speculator, room: int) -> NDArray[np.float32] | None:
        """Evaluate what is missing of the text, and guesses: the last token's logits.

        Those of the guesses wait in `_ahead`, each with its token.

        Args:
            room: tokens that the text may have besides the next one.
        """
        slot, text = self._slot, self._text
        if speculator.is_resting:
            logits = slot.logits(text, self._cancel)
            return None if logits is None else slot.model.backend.arrays.to_numpy(logits)[0]
        missing = len(text.ids) - slot.sequence.length
        drafts = speculator.draft(room, missing=missing - 1)
        if self._constraint is not None and drafts:
            drafts = drafts[: self._constraint.n_valid(drafts)]
        started = time.perf_counter()
        logits = slot.logits(text, self._cancel, drafts)
        if logits is None:
            return None
        rows: NDArray[np.float32] = slot.model.backend.arrays.to_numpy(logits)
        if len(rows) > 1:
            self._ahead.extend(zip(drafts, rows[1:], strict=True))
            self.stats.n_drafted += len(drafts)
            self.stats.n_verified += 1
        speculator.pace.measured(missing + len(rows) - 1, time.perf_counter() - started)
        first: NDArray[np.float32] = rows[0]
        return first

    def _forced(self) -> int | None:
        return None if self._forcing is None else self._forcing.forced()


def checked(token: int) -> int:
    """A token that was drawn on the device.

    Raises:
        LocalKVError: the logits were NaN or infinite.
    """
    if token == NO_TOKEN:
        raise LocalKVError("the model produced NaN or infinite logits")
    return token
