"""Many requests at the same time: steps that the scheduler puts together, run and drawn from.

Nobody waits for a thread of its own: whoever wants a token takes a turn and runs steps until it is
there, and a step serves all requests. A generation yields the tokens that it would yield alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

from localkv.cache.layout import PAGE_TOKENS
from localkv.engine.engine import Engine
from localkv.engine.generation import Generation, GenerationOptions
from localkv.engine.request import Request
from localkv.engine.scheduler import Scheduler, SchedulerConfig
from localkv.engine.step_runner import BatchStats, ModelSteps, RequestRows, StepRunner
from localkv.errors import ContextOverflowError, LocalKVError, counted
from localkv.model import Transformer

STEP_MS_CPU = 100.0
STEP_MS_GPU = 30.0
"""Milliseconds of a step where the user names none."""


class QueueFullError(LocalKVError):
    """The queue is full: no further request may wait."""


@dataclass(frozen=True)
class Pages:
    """Who holds the pages of the cache, all groups of layers together.

    Attributes:
        running: that requests hold which run.
        shared: that several texts hold, running or kept.
        kept: that only texts hold which are kept; they are given back when they are needed.
        lost: that are neither free nor of any text. There must be none; they are looked for only
            while no request runs.
    """

    running: int
    shared: int
    kept: int
    lost: int


class BatchEngine:
    """Serves many requests on an engine's cache.

    Args:
        engine: whose model, cache and turns it shares.
        n_parallel: requests that run at the same time; None for as many as the cache has sequences.
        step_ms: milliseconds that a step should take while somebody generates; None for the
            device's.
        most_waiting: requests that wait at most; None for no limit.
        clock: seconds.

    Raises:
        LocalKVError: the cache has fewer sequences.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        n_parallel: int | None = None,
        step_ms: float | None = None,
        most_waiting: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.engine = engine
        self.clock = clock
        self.most_waiting = most_waiting
        self.rows = RequestRows(engine.cache, engine.slot.prefixes, engine.slot.leave)
        default = STEP_MS_GPU if engine.loop is not None else STEP_MS_CPU
        config = SchedulerConfig(
            n_parallel or engine.cache.n_sequences,
            engine.n_batch,
            default if step_ms is None else step_ms,
        )
        if not 1 <= config.n_parallel <= engine.cache.n_sequences:
            raise LocalKVError(
                f"{config.n_parallel} requests at a time do not fit a cache of "
                f"{engine.cache.n_sequences} sequences"
            )
        self._model_steps = ModelSteps(engine.slot, self.rows)
        self._runner = StepRunner(
            self.rows,
            self._model_steps,
            config,
            engine.prices,
            clock,
            reads_late=engine.loop is not None,
        )
        self._numbers = count()  # threads may ask at the same time

    @property
    def stats(self) -> BatchStats:
        """What the steps did so far."""
        return self._runner.stats

    @property
    def scheduler(self) -> Scheduler:
        """Decides what each step evaluates."""
        return self._runner.scheduler

    @property
    def model(self) -> Transformer:
        """Weights on a backend."""
        return self.engine.model

    @property
    def n_ctx(self) -> int:
        """Tokens that a request can have."""
        return self.engine.n_ctx

    def generate(self, prompt_ids: Sequence[int], options: GenerationOptions) -> Generation:
        """Continue a prompt, beside others.

        Raises:
            ContextOverflowError: the prompt is longer than the context, or than all pages.
            QueueFullError: `most_waiting` requests wait already.
            UsageError: the vocabulary has fewer tokens than `logprobs`.
        """
        if self.most_waiting is not None and len(self.scheduler.waiting) >= self.most_waiting:
            raise QueueFullError(
                f"{counted(self.most_waiting, 'request')} in the queue already",
                hint="ask again later, or let more wait",
            )
        n_prompt, room = len(prompt_ids), min(self.n_ctx, self._most_tokens())
        generation = self.engine.new_generation(
            self, prompt_ids, options, n_ctx=room, number=next(self._numbers), reads_late=True
        )
        if n_prompt > room:
            raise ContextOverflowError(
                f"the prompt has {n_prompt} tokens, but the cache holds {room} of all requests "
                "together",
                hint="use a larger cache or a shorter prompt",
            )
        self._runner.add(generation)
        return generation

    def _most_tokens(self) -> int:
        """Tokens that one request alone has room for."""
        pools = self.engine.cache.pools
        return min(
            (
                pool.first + pool.n_pages * PAGE_TOKENS
                for pool in pools
                if pool.n_pages < pool.n_places(self.n_ctx)
                and pool.most == pool.n_places(self.n_ctx)
            ),
            default=self.n_ctx,
        )

    @property
    def is_idle(self) -> bool:
        """Whether no request is waiting or running."""
        return not self._runner.generations

    @property
    def pages(self) -> Pages:
        """Who holds the pages."""
        running = shared = kept = lost = 0
        sequences = [request.sequence for request in self.scheduler.running]
        for i, pool in enumerate(self.engine.cache.pools):
            held = {page for sequence in sequences if sequence for page in sequence.held(i)}
            running += len(held)
            shared += sum(n > 1 for n in pool.n_holders)
            n_others = pool.n_pages - len(pool.free) - len(held)
            if not sequences:
                texts = self.rows.prefixes.texts
                found = {page for text in texts for page in text.sequence.held(i)}
                lost += n_others - len(found)
                n_others = len(found)
            kept += n_others
        return Pages(running, shared, kept, lost)

    def step(self, unless: Callable[[], bool] = lambda: False) -> None:
        """Run one step in a turn of its own; it serves all requests that are there.

        Args:
            unless: asked when the turn has come: whether no step is needed any more.

        Raises:
            LocalKVError: the model can't be run.
        """
        self.engine.slot.turn(lambda: None if unless() else self._runner.step())

    def end(self, request: Request) -> None:
        """A request is done; its rows are kept as long as there is room."""
        if request.number in self._runner.generations:
            self.engine.slot.turn(lambda: self._runner.end(request))
