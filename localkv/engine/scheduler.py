"""Requests, who takes part in the next step, and how long it will take.

A step is one batch: a token of every sequence that generates, and pieces of prompts in what is left
of its time. Nothing here runs a model or reads a clock, and the same calls give the same steps.

Rules, in this order:

1. A request that is past its deadline is done.
2. All requests that generate take part, by priority and then by age. A request with `AHEAD` tokens
   that nobody has asked for yet takes no part. If a page is missing, such a request gives its pages
   back, or else the youngest request of the lowest priority. It waits again, before all others of
   its priority, and goes on where it was.
3. Prompts share the rest of the step's milliseconds, as the cost model estimates them. They get at
   least `LEAST_SHARE` of a step's, and at least `LEAST_TOKENS`. If nobody generates, they share the
   milliseconds of `ALONE` steps: no more, so that a request that comes meanwhile does not wait
   long. Once the step completes a prompt, which then has a token to give, the other prompts get
   only what is left of a single step.
4. Prompts with a larger priority come first, then preempted ones, then those with the fewest tokens
   left. Each second in which only others had steps counts as `AGEING` tokens less. So a short
   prompt comes before a long one that is being read, however long that takes.
5. A request begins if there are pages for its whole prompt, and one more page for each running
   request that may come to need one. If a request can't begin more than `PATIENCE` seconds after
   it came, no request after it begins.
6. Where one request runs at a time, who is asked for a token takes the place of who runs, whose
   rows stay as long as there is room (`Scheduler.step_for`). Nobody has to wait for the step, so
   its prompt is read in whole batches.

The cost model learns from the steps that were run. A step's time is modelled as a sum: a constant,
a time for each sequence that generates a token, and one for each token of a prompt. Each row of K
and V that is read has a time, too, and so has each pair of a prompt's token and a row that it
attends to. The coefficients are fitted by least squares. A step counts less the larger it is, and
less with each step after it, so that the fit follows a machine that gets busier. Steps in a row are
mostly alike, and tell the sum but not its parts. So the fit is drawn a little towards a first
guess, multiplied by how many times as large steps have been found to be (ridge regression; Hoerl
and Kennard 1970). No part is negative.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from localkv.cache.pages import Sequence as CachedSequence
from localkv.engine.prefix import Text

RequestState = Literal["waiting", "running", "done"]


@dataclass(eq=False)
class Request:
    """What a caller asks of the scheduler: a text that is to be continued, and how far it has got.

    Attributes:
        number: counts all requests, in the order in which they came.
        text: its tokens; whoever draws one adds it.
        arrived: when it came, in seconds of the scheduler's clock.
        most: tokens that the text will have at most.
        priority: those with a larger one are served first.
        deadline: when it ends, if it has not by then; None for never.
        sequence: its rows in the cache, while it runs.
        state: "waiting" for room or for the first step, "running", or "done".
        n_reused: tokens of its prompt that it found evaluated when it ran first.
        n_lost: further ones that were the same, but whose rows were no longer there.
        n_preempted: how often it had to give its pages to others.
        passed: seconds in which others had steps without it, up to `passed_from`.
        passed_from: the end of the last step that it took part in; None before the first.
        ready: tokens that were drawn and that nobody has asked for yet, and the seconds of each.
            Other threads ask for them than run steps.
        reuses: rows that are there of its text already are taken; else only its own, after it had
            to give way.
        most_again: generated tokens that are evaluated once more in a step like any other.
        is_read: rows of it are being read from a disk, so that it waits for nobody's pages.
        is_looked_up: there are no further ones on the disk.
    """

    number: int
    text: Text
    arrived: float
    most: int
    priority: int = 0
    deadline: float | None = None
    sequence: CachedSequence | None = None
    state: RequestState = "waiting"
    n_reused: int = 0
    n_lost: int = 0
    n_preempted: int = 0
    passed: float = 0.0
    passed_from: float | None = None
    ready: deque[tuple[int, float]] = field(default_factory=deque)
    reuses: bool = True
    most_again: int = 16
    is_read: bool = False
    is_looked_up: bool = False

    def waited(self, now: float) -> float:
        """Seconds since it came in which it took no part in a step."""
        return self.passed + now - (self.arrived if self.passed_from is None else self.passed_from)

    @property
    def n_unread(self) -> int:
        """Tokens that were drawn and that nobody has asked for yet."""
        return len(self.ready)

    @property
    def n_held(self) -> int:
        """Tokens whose rows the cache has."""
        return 0 if self.sequence is None else self.sequence.length

    @property
    def n_missing(self) -> int:
        """Tokens that are still to be evaluated before the next one can be drawn."""
        return len(self.text.ids) - self.n_held

    @property
    def is_decoding(self) -> bool:
        """Whether all that is missing is the token that was drawn last, or some that drafts were
        taken back with."""
        if self.sequence is None or self.n_held < self.n_prompt:
            return False
        return self.n_missing <= self.most_again

    @property
    def n_prompt(self) -> int:
        """Tokens of the prompt."""
        return self.text.n_prompt

    @property
    def n_alike(self) -> int:
        """Missing tokens up to the last of the same kind: of the prompt, or generated."""
        if self.n_held < self.n_prompt:
            return self.n_prompt - self.n_held
        return self.n_missing


FORGETTING = 0.95
"""What a step counts less with each one after it."""
DRAWN = 0.01
"""What a coefficient that is twice the guess, or none of it, costs: as one step with such a squared
relative error."""
LEAST = 0.01
"""The share of its guess that a coefficient is at least."""
SHORTEST = 1e-3
"""Milliseconds that a step counts as at least, whatever a clock says."""
WILD = 4.0
"""A step counts as at most this many times as long as expected."""
ROWS = 1000.0
"""Rows of K and V, and pairs, that the last coefficients are about."""


@dataclass(frozen=True)
class StepShape:
    """What a step evaluates.

    Attributes:
        n_generating: sequences that generate a token each.
        n_prompt: tokens of prompts.
        n_rows: rows of K and V that these read, of all sequences together.
        n_pairs: of a token of a prompt and a row that it attends to.
    """

    n_generating: int
    n_prompt: int
    n_rows: int
    n_pairs: int = 0

    @property
    def features(self) -> NDArray[np.float64]:
        rows, pairs = self.n_rows / ROWS, self.n_pairs / ROWS
        return np.array([1.0, self.n_generating, self.n_prompt, rows, pairs])


def pairs(n_tokens: int, n_held: int) -> int:
    """Pairs of a prompt's tokens after `n_held` others: each attends to all before it."""
    return n_tokens * n_held + n_tokens * (n_tokens + 1) // 2


@dataclass
class CostModel:
    """Milliseconds of a step.

    Attributes:
        first_guess: of a step, of a generated token beside others, of a prompt's token, of 1,000
            rows of K and V, and of 1,000 pairs.
        n_steps: that were learned from.
        weights: the same five, as learned, all above 0.
    """

    first_guess: tuple[float, float, float, float, float] = (20.0, 2.0, 2.0, 1.0, 0.5)
    n_steps: int = 0
    weights: NDArray[np.float64] = field(init=False)
    _gram: NDArray[np.float64] = field(init=False)
    _moment: NDArray[np.float64] = field(init=False)
    _taken: float = 0.0
    _guessed: float = 0.0

    def __post_init__(self) -> None:
        self.weights = np.array(self.first_guess)
        n = len(self.weights)
        self._gram, self._moment = np.zeros((n, n)), np.zeros(n)

    def milliseconds(self, shape: StepShape) -> float:
        """What a step is expected to take."""
        return float(self.weights @ shape.features)

    def prompt_tokens(self, milliseconds: float, n_held: int) -> int:
        """Tokens of a prompt, after `n_held` others, that take as long."""
        if milliseconds <= 0:
            return 0
        pair = self.weights[4] / ROWS
        one = self.weights[2] + pair * n_held  # n tokens: n * one + pair * n * n / 2
        return int(2 * milliseconds / (one + math.sqrt(one * one + 2 * pair * milliseconds)))

    def learn(self, shape: StepShape, milliseconds: float) -> None:
        """Take in what a step took."""
        expected, milliseconds = self.milliseconds(shape), max(milliseconds, SHORTEST)
        if self.n_steps:
            milliseconds = min(milliseconds, WILD * expected)
        self.n_steps += 1
        guess, x = np.array(self.first_guess), shape.features
        self._taken = FORGETTING * self._taken + milliseconds
        size = float(guess @ x)
        self._guessed = FORGETTING * self._guessed + size
        self._gram = FORGETTING * self._gram + np.outer(x, x) / size**2
        self._moment = FORGETTING * self._moment + x * (milliseconds / size**2)
        prior, drawn = guess * (self._taken / self._guessed), DRAWN / guess**2
        least = LEAST * prior
        gram, moment = self._gram + np.diag(drawn), self._moment + drawn * prior
        self.weights = least + _solved(gram, moment - gram @ least)


def _solved(gram: NDArray[np.float64], moment: NDArray[np.float64]) -> NDArray[np.float64]:
    """The w >= 0 with gram w = moment, where those that would be negative are 0."""
    found, free = np.zeros(len(moment)), np.ones(len(moment), bool)
    while free.any():
        some = np.linalg.solve(gram[np.ix_(free, free)], moment[free])
        if some.min() >= 0:
            found[free] = some
            break
        free[np.flatnonzero(free)[some.argmin()]] = False
    return found


LEAST_SHARE = 0.6
"""The share of a step's milliseconds that prompts have, if there are some."""
ALONE = 5.0
"""Steps' milliseconds that prompts have together if nobody generates."""
LEAST_TOKENS = 8
"""Tokens of prompts that a step has at least, if there are as many."""
PIECE = 4
"""Tokens that the size of a piece of a prompt is a multiple of, but for the last."""
AGEING = 200.0
"""Tokens that a second counts for in which others had steps and a prompt did not."""
AHEAD = 32
"""Tokens that are drawn for a reader who pauses."""
PATIENCE = 5.0
"""Seconds that a request waits for pages before no other begins."""


class Rows(Protocol):
    """The rows of requests in the cache."""

    def begin(self, request: Request, running: Sequence[Request]) -> bool:
        """Give a request a sequence, with the rows that are there of its text already.

        False if there is no room for all of its tokens and a page more for each that runs and may
        come to need one. False, too, if it does better to wait: another one evaluates now what it
        begins with.
        """
        ...

    def reserve(self, request: Request, n_tokens: int) -> bool:
        """Take the pages of its next tokens; False if there are none."""
        ...

    def chunk(self, request: Request, n_tokens: int) -> int:
        """The number of its next tokens, at most `n_tokens`, that are to be evaluated together."""
        ...

    def end(self, request: Request) -> None:
        """Take its sequence away, and keep its rows as long as there is room."""
        ...


class Part(NamedTuple):
    """The next `n_tokens` missing ones of a request, which are all of one kind, and guesses of
    those that follow."""

    request: Request
    n_tokens: int
    drafts: tuple[int, ...] = ()

    @property
    def n_rows(self) -> int:
        """Tokens that are evaluated."""
        return self.n_tokens + len(self.drafts)


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits.

    Attributes:
        n_parallel: requests that run at the same time.
        n_batch: tokens of prompts in a step.
        step_ms: milliseconds that a step should take while somebody generates.
        ahead: tokens that are drawn for a reader who pauses.
    """

    n_parallel: int = 8
    n_batch: int = 512
    step_ms: float = 100.0
    ahead: int = AHEAD


@dataclass
class Scheduler:
    """Decides what each step evaluates.

    Attributes:
        waiting: requests that have no sequence.
        running: those that have one, in the order in which they began.
        n_preempted: how often one had to give its pages to others.
    """

    rows: Rows
    config: SchedulerConfig
    cost: CostModel = field(default_factory=CostModel)
    waiting: list[Request] = field(default_factory=list)
    running: list[Request] = field(default_factory=list)
    n_preempted: int = 0
    _served: list[Request] = field(default_factory=list)
    _gave_way: set[Request] = field(default_factory=set)

    def add(self, request: Request) -> None:
        """Have a request served."""
        request.most_again = min(request.most_again, self.config.n_batch)
        self.waiting.append(request)

    def end(self, request: Request) -> None:
        """Let go of a request that is done or cancelled; its rows stay while there is room.

        An exception may have come between two changes of it, so it may be in neither list.
        """
        if request in self.running:
            self.running.remove(request)
            self.rows.end(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        request.state = "done"

    def restart(self, request: Request) -> None:
        """A request that runs has lost its rows, or their place; it waits for others."""
        self.running.remove(request)
        request.sequence, request.state = None, "waiting"
        self.waiting.append(request)

    def next_alone(self) -> Part | None:
        """What `step` would say, if there is one request and it generates; else None."""
        if len(self.running) != 1 or self.waiting:
            return None
        request, config = self.running[0], self.config
        if request.deadline is not None or request.n_unread >= config.ahead:
            return None
        n = request.n_missing
        if not request.is_decoding or not self.rows.reserve(request, n):
            return None
        return Part(request, n)

    def overdue(self, now: float) -> list[Request]:
        """Requests whose deadline is over."""
        every = (*self.running, *self.waiting)
        return [one for one in every if one.deadline is not None and now >= one.deadline]

    def step(self, now: float) -> list[Part]:
        """What to evaluate next; nothing if nobody is there."""
        for request in self._served:  # until now
            request.passed_from = now
        self._gave_way.clear()
        while not (parts := self._parts(now)) and self._blocks():
            self._preempt(self._least_important())  # all wait for pages that others have
        self._served = [part.request for part in parts]
        return parts

    def step_for(self, request: Request) -> list[Part]:
        """What to evaluate next for a request that is asked for a token, where one runs at a time.

        An exception may have come between two changes of it, so it may be in neither list.
        """
        if request not in self.running:
            for other in [*self.running]:
                self.restart(other)
            if not self.rows.begin(request, self.running):
                return []
            self.running.append(request)
            if request in self.waiting:
                self.waiting.remove(request)
            request.state = "running"
        if request.is_decoding:
            return [Part(request, request.n_missing)]
        n_tokens = min(request.n_alike, self.config.n_batch)
        return [Part(request, self.rows.chunk(request, n_tokens))]

    def _parts(self, now: float) -> list[Part]:
        """What can be evaluated with the free pages, and the pages of whoever gives way."""
        parts = self._generating()
        alone, n_taken, prompts = not parts, 0, self._prompts(now)
        n_running = len(self.running)
        left = self._left(parts, ALONE if alone else 1.0) if prompts else 0.0
        is_held_up = False
        for request in prompts:
            if self._room(request, left, n_taken) < 1:
                break
            if request.state == "waiting" and (is_held_up or not self._begin(request)):
                is_held_up |= now - request.arrived > PATIENCE
                continue
            n = self._piece(request, self._room(request, left, n_taken))
            if n and self.rows.reserve(request, n):
                parts.append(Part(request, n))
                request.passed = request.waited(now)
                n_taken += n
                alone = alone and n < request.n_missing
                left = self._left(parts, ALONE if alone else 1.0)
        if len(self.running) > n_running:
            parts = self._still_reserved(parts)
        return parts

    def _blocks(self) -> bool:
        """Whether somebody could go on if another one gave its pages back."""
        every = (*self.running, *self.waiting)
        wanted = [one for one in every if not self._has_enough(one) and not one.is_read]
        return bool(wanted) and any(one not in wanted[:1] for one in self.running)

    def shape(self, parts: Iterable[Part]) -> StepShape:
        """What the cost model wants to know of a step."""
        parts = list(parts)
        n_generating = sum(part.n_rows for part in parts if part.request.is_decoding)
        return StepShape(
            n_generating,
            sum(part.n_rows for part in parts) - n_generating,
            sum(part.request.n_held + part.n_rows for part in parts),
            sum(
                pairs(part.n_tokens, part.request.n_held)
                for part in parts
                if not part.request.is_decoding
            ),
        )

    def _generating(self) -> list[Part]:
        """The parts of those that generate."""
        parts = list[Part]()
        for request in sorted(self.running, key=lambda one: (-one.priority, one.number)):
            while (
                request.state == "running" and request.is_decoding and not self._has_enough(request)
            ):
                if self.rows.reserve(request, request.n_missing):
                    parts.append(Part(request, request.n_missing))
                    break
                victim = self._least_important()
                parts = [part for part in parts if part.request is not victim]
                self._preempt(victim)
        return parts

    def _still_reserved(self, parts: list[Part]) -> list[Part]:
        """The parts that have their pages: one that begins shares the pages of another, which then
        has to copy what it writes to."""
        for part in parts:
            while part.request.state == "running" and not self.rows.reserve(
                part.request, part.n_tokens
            ):
                self._preempt(self._least_important())
        return [part for part in parts if part.request.state == "running"]

    def _least_important(self) -> Request:
        return min(
            self.running, key=lambda one: (not self._has_enough(one), one.priority, -one.number)
        )

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self.rows.end(request)
        self._gave_way.add(request)  # who would take the pages back at once, and so on
        request.state = "waiting"
        request.n_preempted += 1
        self.n_preempted += 1
        self.waiting.append(request)

    def _left(self, parts: Sequence[Part], steps: float) -> float:
        """Milliseconds that some parts leave of the time of a number of steps."""
        return steps * self.config.step_ms - self.cost.milliseconds(self.shape(parts))

    def _room(self, request: Request, milliseconds: float, n_taken: int) -> int:
        """Tokens of a prompt that a step may have.

        Args:
            milliseconds: that are left of the step.
            n_taken: tokens of other prompts that it has.
        """
        cost, n_held = self.cost, request.n_held
        n = cost.prompt_tokens(milliseconds, n_held)
        share = cost.prompt_tokens(LEAST_SHARE * self.config.step_ms, n_held)
        least = max(LEAST_TOKENS, (share + PIECE // 2) // PIECE * PIECE)
        return min(self.config.n_batch - n_taken, max(n, least - n_taken))

    def _prompts(self, now: float) -> list[Request]:
        """Requests that do not generate yet, in the order in which they are served."""

        def key(one: Request) -> tuple[float, ...]:
            left = one.n_missing - AGEING * one.waited(now)
            return -one.priority, not one.n_preempted, left, one.number

        every = [*self.waiting, *(one for one in self.running if not one.is_decoding)]
        return sorted((one for one in every if not self._has_enough(one)), key=key)

    def _begin(self, request: Request) -> bool:
        """Give a waiting request a sequence, if there is room for it."""
        if len(self.running) >= self.config.n_parallel or request in self._gave_way:
            return False
        if not self.rows.begin(request, self.running):
            return False
        self.waiting.remove(request)
        self.running.append(request)
        request.state = "running"
        return True

    def _piece(self, request: Request, n_tokens: int) -> int:
        """How many of its tokens are evaluated in a step that has room for `n_tokens`."""
        if request.n_alike > n_tokens and n_tokens < self.config.n_batch:
            n_tokens -= n_tokens % PIECE
        return self.rows.chunk(request, min(n_tokens, request.n_alike))

    def _has_enough(self, request: Request) -> bool:
        return request.n_unread >= self.config.ahead
