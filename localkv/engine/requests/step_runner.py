"""Steps that the scheduler puts together, run and drawn from, for one request or many.

Where one request generates and nobody waits there is nothing to plan, and a step is what evaluates
its next token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from localkv.cache.arrays import Array
from localkv.cache.kv_cache import KVCache
from localkv.engine.generation import Generation
from localkv.engine.requests.batch_drafts import BatchDrafts
from localkv.engine.requests.cost_model import StepShape
from localkv.engine.requests.request import Request
from localkv.engine.requests.scheduler import Part, Rows, Scheduler, SchedulerConfig
from localkv.engine.speculation.prices import Prices

LEARN_FROM = 8
"""One of so many steps without a prompt teaches the cost model; all with one do."""


@dataclass
class BatchStats:
    """What the steps did so far.

    Attributes:
        n_steps: how many there were.
        n_generated: tokens that were drawn.
        n_prompt: tokens of prompts that were evaluated.
        n_reused: tokens of prompts that were found evaluated.
        n_preempted: how often a request gave its pages to others.
        n_drafted: tokens that were guessed and evaluated.
        n_accepted: of those, which were right.
        seconds: that the steps took.
    """

    n_steps: int = 0
    n_generated: int = 0
    n_prompt: int = 0
    n_reused: int = 0
    n_preempted: int = 0
    n_drafted: int = 0
    n_accepted: int = 0
    seconds: float = 0.0


class StepRows(Rows, Protocol):
    """The rows of requests in the cache, and what a step does with them.

    Attributes:
        n_reused: tokens of prompts that were found evaluated.
    """

    n_reused: int

    @property
    def cache(self) -> KVCache:
        """Has the rows."""
        ...

    def enter(self, running: Sequence[Request]) -> Sequence[Request]:
        """A step begins: those of the requests that have lost their rows to other users."""
        ...

    def forget(self, running: Sequence[Request]) -> None:
        """Give all rows back: they may be anything, as work broke off."""
        ...

    def reserve_drafts(self, request: Request, n_tokens: int, n_drafts: int) -> bool:
        """Take the pages of guesses, too, that follow its next tokens and may be taken back; False
        if there is no room."""
        ...

    def retract(self, request: Request, length: int) -> None:
        """Take back the rows of guesses from position `length` on."""
        ...


class Evaluator(Protocol):
    """Runs the model."""

    def evaluate(self, parts: Sequence[Part]) -> Sequence[tuple[Part, Array]]:
        """Of the parts that have no more, float32 [1 + drafts, n_vocab] after their last token and
        after each draft."""
        ...


class StepRunner:
    """Runs the steps of requests, in turns that somebody else takes.

    Args:
        rows: of the requests.
        model_steps: evaluates the parts of a step.
        config: of the scheduler.
        prices: of batches of one text.
        clock: seconds.
        reads_late: a result is only told to be computed until somebody reads it, as on a GPU.

    Attributes:
        generations: of the requests that are waiting or running, by their numbers.
    """

    def __init__(
        self,
        rows: StepRows,
        model_steps: Evaluator,
        config: SchedulerConfig,
        prices: Prices,
        clock: Callable[[], float],
        *,
        reads_late: bool,
    ) -> None:
        self.rows = rows
        self.scheduler = Scheduler(rows, config)
        self.stats = BatchStats()
        self.generations = dict[int, Generation]()
        self._model_steps = model_steps
        self._drafts = BatchDrafts(rows, prices, config)
        self._clock = clock
        self._reads_late = reads_late
        self._learns = config.n_parallel > 1
        self._unfinished = False

    def add(self, generation: Generation) -> None:
        """Have a request served, unless nothing is wanted of it."""
        if not generation.has_ended:
            self.generations[generation.request.number] = generation
            self.scheduler.add(generation.request)

    def end(self, request: Request) -> None:
        """A request is done, or cancelled; its rows are kept as long as there is room."""
        if self.generations.pop(request.number, None) is not None:
            self.scheduler.end(request)

    def step(self) -> None:
        """Run a step for all requests that are there.

        Raises:
            LocalKVError: the model can't be run.
        """
        scheduler, started = self.scheduler, self._clock()
        if self._unfinished:
            self._start_over()
        self._unfinished = True
        cache = self.rows.cache
        before = None if cache.ladder is None else cache.requantised
        for request in self.rows.enter(scheduler.running):
            scheduler.begin_anew(request)
        for generation in [*self.generations.values()]:
            if generation.cancelled.is_set():
                self._cancel(generation)
        part = None
        if not self._learns or self.stats.n_steps % LEARN_FROM:
            part = scheduler.next_alone()
        parts = self._planned(started) if part is None else [part]
        if parts:
            takers = [self.generations[part.request.number] for part in parts]
            shape = self.run(parts, is_planned=part is None)
            if before is not None:
                for generation in takers:
                    generation.stats.requantised.add(cache.requantised - before)
            self._count(shape, self._clock() - started)
        self._unfinished = False

    def _planned(self, now: float) -> list[Part]:
        for request in self.scheduler.overdue(now):
            self._cancel(self.generations[request.number])
        return self.scheduler.step(now)

    def run(self, parts: list[Part], *, is_planned: bool = False) -> StepShape | None:
        """Evaluate the parts of a step, with guesses where they are worth it, and draw.

        Returns:
            what the cost model learns from, if the step was planned.
        """
        generations, began = self.generations, 0.0
        guesses = False
        for one in [*generations.values()]:  # other threads add some
            guesses |= one.speculator is not None and not one.speculator.is_resting
        if guesses:
            parts = self._drafts.added(parts, generations)
            began = self._clock()
        shape = self.scheduler.shape(parts) if is_planned else None
        taking_part = {**generations} if guesses and self._reads_late else generations
        ends = self._model_steps.evaluate(parts)
        measures = guesses and (shape is None or not shape.n_prompt)
        if measures and not self._reads_late:
            self._drafts.measured(parts, taking_part, self._clock() - began)
        self._draw(ends)
        if measures and self._reads_late:
            self._drafts.measured(parts, taking_part, self._clock() - began)
        return shape

    def _count(self, shape: StepShape | None, seconds: float) -> None:
        stats = self.stats
        if shape is not None:
            stats.n_prompt += shape.n_prompt
            stats.n_reused = self.rows.n_reused
            stats.n_preempted = self.scheduler.n_preempted
            if self._learns and (shape.n_prompt or stats.n_steps % LEARN_FROM == 0):
                self.scheduler.cost.learn(shape, 1e3 * seconds)
        stats.n_steps += 1
        stats.seconds += seconds

    def _start_over(self) -> None:
        """Have all requests begin anew: their rows may be anything, as work broke off."""
        running = [*self.scheduler.running]
        self.rows.forget(running)
        for request in running:
            self.scheduler.begin_anew(request)

    def _draw(self, ends: Sequence[tuple[Part, Array]]) -> None:
        """The next tokens of the requests of which nothing is missing."""
        for part, rows in ends:
            request, drafts = part.request, part.drafts
            generation = self.generations[request.number]
            if generation.cancelled.is_set():
                self._cancel(generation)
                continue
            n_before, n_right = len(request.text.ids), 0
            try:
                if drafts:
                    n_right = generation.draw_verified(rows, drafts)
                else:
                    generation.draw(rows[0])
            except Exception as error:  # this request's; the others go on
                generation.fail(error)
            self.stats.n_generated += len(request.text.ids) - n_before
            if drafts:
                self.stats.n_drafted += len(drafts)
                self.stats.n_accepted += n_right
                self.rows.retract(request, n_before + n_right)
            if generation.has_ended:
                self.end(request)

    def _cancel(self, generation: Generation) -> None:
        generation.cancel()
        self.end(generation.request)
