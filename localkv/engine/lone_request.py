"""One request, on the scheduler that many have, and with the rows of a slot.

A turn of `LoneRequest` lasts until there is a token, so that the pieces of a prompt need not be
evaluated again because of others; and while these wait, a request draws for at least as long as it
took to get its rows back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from localkv.cache.arrays import Array, Draw
from localkv.cache.kv_cache import KVCache
from localkv.engine.cache_slot import CacheSlot
from localkv.engine.generation import Generation, checked
from localkv.engine.request import Request
from localkv.engine.scheduler import Part, SchedulerConfig
from localkv.engine.speculation.prices import Prices
from localkv.engine.step_runner import StepRunner
from localkv.system.turns import CancelledWaitError

LEAST_SHARE = 0.05
"""Seconds of tokens that a generation draws, at least, in a turn that others wait for."""

NO_LIMIT = 1 << 30
"""Milliseconds of a step, and tokens that are drawn for a reader who pauses: nobody else is there
who would have to wait."""


class LoneRequest:
    """Runs the steps of one generation. Several of them take turns with the slot.

    Args:
        slot: whose turns it takes, and in which its rows are.
        prices: of batches.
    """

    def __init__(self, slot: CacheSlot, prices: Prices) -> None:
        self.clock = time.perf_counter
        self._slot = slot
        self._runner = StepRunner(
            SlotRows(slot),
            SlotSteps(slot),
            SchedulerConfig(1, slot.n_batch, NO_LIMIT, NO_LIMIT),
            prices,
            self.clock,
            reads_late=slot.loop is not None,
        )
        self._tokens: Iterator[int] | None = None

    def add(self, generation: Generation) -> None:
        """Serve the request of a generation, and no other."""
        self._runner.add(generation)

    def end(self, request: Request) -> None:
        """The request is done; its rows stay in the slot."""
        self._tokens = None
        self._runner.end(request)

    def step(self, unless: Callable[[], bool]) -> None:
        """Run steps in a turn until there is a token, and more while others wait.

        Raises:
            LocalKVError: the model can't be run.
        """
        generation = next(iter(self._runner.generations.values()), None)
        if generation is None:
            return
        try:
            self._slot.turn(partial(self._serve, generation, unless), generation.cancelled)
        except CancelledWaitError:
            generation.close()
        except Exception as error:
            if not generation.n_ready:
                raise
            generation.fail(error)  # raised once the tokens drawn before are used up
            self.end(generation.request)

    def _serve(self, generation: Generation, unless: Callable[[], bool]) -> None:
        """Draw a token; and more, while others wait, as every change has its price.

        The others then have the rows evaluated that they lack. So at least half of the time goes
        into new tokens, however many take turns.
        """
        slot, started = self._slot, self.clock()
        generation.resume(started)
        self._step(generation)
        while not unless():
            self._step(generation)
        if not slot.is_wanted:
            return
        now = self.clock()
        until = now + max(LEAST_SHARE, now - started)
        while slot.is_wanted and not generation.has_ended and self.clock() < until:
            self._step(generation)

    def _step(self, generation: Generation) -> None:
        """Run a step; what follows a drawn token needs no plan."""
        slot, request, draw = self._slot, generation.request, generation.device_draw
        text, speculator, cache = request.text, generation.speculator, slot.cache
        is_next = (
            slot.is_taken_by(text)
            and text.n_prompt <= slot.sequence.length == len(text.ids) - 1
            and not generation.cancelled.is_set()
            and request.deadline is None
        )
        if not is_next:
            self._tokens = None
        guesses = speculator is not None and not speculator.is_resting
        if is_next and guesses and cache.ladder is None:
            self._runner.run([Part(request, 1)])
            return
        if not is_next or guesses:
            self._runner.step()
            return
        before = None if cache.ladder is None else cache.requantised
        if draw is None:
            goes_on = generation.draw(slot.advance(text, 1)[0])
        else:
            goes_on = generation.take(self._drawn_ahead(generation, draw))
        if before is not None:
            generation.stats.requantised.add(cache.requantised - before)
        if not goes_on:
            self.end(request)

    def _drawn_ahead(self, generation: Generation, draw: Draw) -> int:
        """A token that the device draws while the one before is on its way."""
        slot, text = self._slot, generation.request.text
        token = generation.forced()
        if token is not None:
            self._tokens = None  # they follow another one
            return token
        if self._tokens is None:
            assert slot.loop is not None
            self._tokens = slot.loop.tokens(
                slot.sequence,
                text.ids[-1],
                draw,
                seed=generation.seed,
                number=generation.n_drawn,
                limit=generation.room + 1,
            )
        return checked(slot.following(text, self._tokens))


class SlotRows:
    """What the scheduler moves if there is one request, and other users of its slot.

    Args:
        slot: has the rows.

    Attributes:
        n_reused: tokens of prompts that were found evaluated.
    """

    def __init__(self, slot: CacheSlot) -> None:
        self.slot = slot
        self.n_reused = 0

    @property
    def cache(self) -> KVCache:
        """Has the rows."""
        return self.slot.cache

    def enter(self, running: Sequence[Request]) -> Sequence[Request]:
        """Begin a step: the requests that have lost their rows to other users."""
        return [one for one in running if not self.slot.is_taken_by(one.text)]

    def forget(self, running: Sequence[Request]) -> None:
        """Nothing: the slot itself gives its rows back after work that broke off."""

    def begin(self, request: Request, running: Sequence[Request]) -> bool:
        """Have the slot go on with the rows that are there of a request's text already."""
        n_reused, n_lost = self.slot.take(request.text)
        request.sequence = self.slot.sequence
        if len(request.text.ids) == request.n_prompt:
            request.n_reused, request.n_lost = n_reused, n_lost
            self.n_reused = n_reused
        return True

    def reserve(self, request: Request, n_tokens: int) -> bool:
        """A context has room for them, and a batch takes the pages that it needs."""
        return True

    def chunk(self, request: Request, n_tokens: int) -> int:
        """The number of its next tokens, at most `n_tokens`, that are to be evaluated together."""
        return self.slot.piece(request.text, n_tokens)

    def reserve_drafts(self, request: Request, n_tokens: int, n_drafts: int) -> bool:
        """Whether guesses don't change the rows of the next tokens."""
        return self.cache.may_guess(self.slot.sequence, n_tokens, n_drafts)

    def retract(self, request: Request, length: int) -> None:
        """Take back the rows of guesses from position `length` on."""
        self.slot.retract(request.text, length)

    def end(self, request: Request) -> None:
        """Its rows stay where they are, for a text that begins like it."""
        request.sequence = None


class SlotSteps:
    """Evaluates the parts of steps of one request.

    Args:
        slot: whose model and cache it uses, in a turn.
    """

    def __init__(self, slot: CacheSlot) -> None:
        self.slot = slot

    def evaluate(self, parts: Sequence[Part]) -> Sequence[tuple[Part, Array]]:
        """Run the model on the one part of a step.

        Returns:
            if it has no more, float32 [1 + drafts, n_vocab] after its last token and after each
            draft.
        """
        (part,) = parts
        slot, text = self.slot, part.request.text
        if part.drafts or part.n_tokens == 1:
            out = slot.advance(text, part.n_tokens, part.drafts)
        else:
            end = slot.sequence.length + part.n_tokens
            while slot.sequence.length < end:
                out = slot.advance(text, slot.piece(text, end - slot.sequence.length))
        is_end = slot.sequence.length >= len(text.ids)
        return [(part, out)] if is_end else []
