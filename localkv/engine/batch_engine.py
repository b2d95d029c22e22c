"""Requests, one or many at the same time: steps that the scheduler puts together, and tokens.

Nobody waits for a thread of its own: whoever wants a token takes a turn and runs steps until it is
there, and a step serves all requests. A generation yields the tokens that it would yield alone.

In a cache of one sequence one request runs at a time. Whoever is asked for a token goes on with the
rows that are there of its text, and takes the turn until there is one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count

from localkv.cache.layout import PAGE_TOKENS
from localkv.engine.engine import Engine
from localkv.engine.generation import Generation, GenerationOptions
from localkv.engine.logprobs import check_logprobs
from localkv.engine.scheduler import Request, Scheduler, SchedulerConfig
from localkv.engine.speculation.config import Speculation, check_drafter, check_head
from localkv.engine.speculation.draft_model import ModelSpeculator
from localkv.engine.speculation.speculator import Speculator
from localkv.engine.step_runner import BatchStats, ModelSteps, RequestRows, StepRunner
from localkv.errors import ContextOverflowError, LocalKVError, ModelClosedError, counted
from localkv.model import Transformer
from localkv.system.turns import CancelledWaitError

STEP_MS_CPU = 100.0
STEP_MS_GPU = 30.0
"""Milliseconds of a step where the user names none."""

LEAST_SHARE = 0.05
"""Seconds of tokens that a generation draws, at least, in a turn that others wait for."""


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


def new_speculator(
    config: Speculation, engine: Engine, request: Request, *, reads_late: bool = False
) -> Speculator | None:
    """What drafts for a new generation, or None.

    Args:
        engine: has the model that drafts, if there is one, or the model's own block.
        request: the generation's.
        reads_late: a model that drafts reads a text when it first drafts for it, and not at the
            text's beginning.

    Raises:
        UsageError: one of these should draft, and there is none.
    """
    match config.drafter:
        case "none":
            return None
        case "ngram":
            return Speculator(config, engine.prices)
        case "mtp":
            from localkv.engine.speculation.prediction_head import head_speculator

            check_head(engine.head is not None, "none was loaded")
            assert engine.head is not None

            def is_over() -> bool:
                return request.state == "done"

            return head_speculator(config, engine.head, request.text, is_over)
    check_drafter(config, engine.draft)
    assert engine.draft is not None
    return ModelSpeculator(config, engine.draft, reads_late=reads_late)


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
        self.rows = RequestRows(engine.cache, engine.slot.prefixes, engine.slot)
        self._is_in_place = self.rows.in_place is not None
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
            engine.slot,
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
            UsageError: the vocabulary has fewer tokens than `logprobs`, or the model is an encoder.
        """
        self.engine.check_writes()
        if self.most_waiting is not None and self._runner.n_waiting >= self.most_waiting:
            raise QueueFullError(
                f"{counted(self.most_waiting, 'request')} in the queue already",
                hint="ask again later, or let more wait",
            )
        engine, n_prompt = self.engine, len(prompt_ids)
        n_ctx = min(self.n_ctx, self._most_tokens())
        check_logprobs(options.logprobs, self.model.config.n_vocab)
        engine.check_prompt(prompt_ids)
        if n_prompt > n_ctx:
            raise ContextOverflowError(
                f"the prompt has {n_prompt} tokens, but the cache holds {n_ctx} of all requests "
                "together",
                hint="use a larger cache or a shorter prompt",
            )
        now, most = self.clock(), options.max_tokens
        request = Request(
            next(self._numbers),
            engine.text_of(prompt_ids, options.salt, options.scales, options.origin),
            now,
            n_ctx if most is None else min(n_ctx, n_prompt + most),
            priority=options.priority,
            deadline=None if options.timeout is None else now + options.timeout,
            reuses=options.reuses,
        )
        # where others run, a draft would have to wait for its model at the text's beginning
        reads_late = not self._is_in_place
        speculator = new_speculator(options.speculation, engine, request, reads_late=reads_late)
        host = (options.logprobs, options.predictions, options.constraint, speculator)
        on_host = any(one is not None for one in host)
        generation = Generation(
            self,
            request,
            options,
            self.model.backend.arrays,
            draw=None if on_host else self.model.draw(options.sampler.params),
            n_ctx=n_ctx,
            speculator=speculator,
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
        return all(one.has_ended for one in [*self._runner.generations.values()])

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
                found |= {*self.engine.sequence.held(i)}
                if (reading := self.rows.reading) is not None and reading.sequence is not None:
                    found |= {*reading.sequence.held(i)}
                lost += n_others - len(found)
                n_others = len(found)
            kept += n_others
        return Pages(running, shared, kept, lost)

    def step(
        self, unless: Callable[[], bool] = lambda: False, asked: Generation | None = None
    ) -> None:
        """Run one step in a turn of its own; it serves all requests that are there.

        In a cache of one sequence, the request that is asked for a token has the turn until the
        token is there. So the pieces of its prompt need not be evaluated again because of others.

        Args:
            unless: asked when the turn has come: whether no step is needed any more.
            asked: whose token is wanted; None if any will do.

        Raises:
            LocalKVError: the model can't be run.
        """
        slot = self.engine.slot
        if asked is None or not self._is_in_place:
            slot.turn(lambda: None if unless() else self._runner.step())
            return
        try:
            slot.turn(partial(self._serve, asked, unless), asked.cancelled)
        except CancelledWaitError:
            asked.close()
        except Exception as error:
            if not asked.n_ready:
                raise
            asked.fail(error)  # raised once the tokens drawn before are used up
            self.end(asked.request)

    def _serve(self, generation: Generation, unless: Callable[[], bool]) -> None:
        """Draw a token; and more, while others wait, as every change has its price.

        The others then have the rows evaluated that they lack. So at least half of the time goes
        into new tokens, however many take turns.
        """
        slot, step, started = self.engine.slot, self._runner.step, self.clock()
        generation.resume(started)
        step(generation)
        while not unless():
            step(generation)
        if not slot.is_wanted:
            return
        now = self.clock()
        until = now + max(LEAST_SHARE, now - started)
        while slot.is_wanted and not generation.has_ended and self.clock() < until:
            step(generation)

    def end(self, request: Request) -> None:
        """A request is done; its rows are kept as long as there is room.

        Where it has no rows to give back nobody waits for a turn: the next step ends it.
        """
        slot = self.engine.slot
        if request.state != "done" and not (self._is_in_place and slot.is_busy):
            with suppress(ModelClosedError):
                slot.turn(lambda: self._runner.end(request))

    def close(self) -> None:
        """Close the engine, and let go of what steps need of it; its generations may live on.

        Raises:
            ModelClosedError: it was closed already.
        """
        self.engine.close()
        del self.rows, self._model_steps, self._runner
