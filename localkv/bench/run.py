"""Runs a grid of tests and times them, on the engine that `complete` runs on.

A prompt is timed from its first batch to the logits of its last token. Generation is greedy and
goes on to the length asked for, whatever is drawn; it counts the time of each token after the
first, as in `GenerationStats`. Loading, warming up and filling the context are never timed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial

import numpy as np

from localkv.bench.grid import BenchTest, Grid, Setting
from localkv.bench.machine import PeakMemory, bandwidth
from localkv.bench.result import Machine, Result
from localkv.bench.subject import Subject
from localkv.bench.traffic import bytes_per_token
from localkv.config import CacheConfig
from localkv.engine.engine import Engine
from localkv.engine.generation import GenerationOptions
from localkv.kernels.method import in_words
from localkv.sampling.params import SamplingParams
from localkv.sampling.sampler import Sampler
from localkv.system.processor import processor_name
from localkv.system.threads import chosen_threads, use_threads

GREEDY = SamplingParams(seed=0, temperature=0.0)
WARM_UP_GEN = 2
"""Tokens generated before generation is timed, where steps are not recorded."""


@dataclass(frozen=True)
class Options:
    """How the grid is run.

    Attributes:
        repetitions: samples of each test.
        warm_up: run each test once before the samples.
        device: the value of `--device`.
        cache: of all caches, but for their types and sizes.
        on_progress: called with the next step, in a few words.
    """

    repetitions: int = 5
    warm_up: bool = True
    device: str = "auto"
    cache: CacheConfig = field(default_factory=CacheConfig)
    on_progress: Callable[[str], None] = lambda text: None


def run(subject: Subject, grid: Grid, options: Options) -> Iterator[Result]:
    """The results of a model's tests, one by one, in the grid's order.

    A cache is made, and filled to its depth with random tokens, once for all tests of one setting
    and depth; after each repetition the rows beyond the depth are dropped.

    Args:
        grid: its caches are known to fit (`fit.py`).

    Raises:
        UsageError: a type's scales are missing or not this model's.
        LocalKVError: a cache does not fit the memory.
    """
    machine = machine_of(subject, options.device)
    before, measured = chosen_threads(), dict[int, float]()
    try:
        for setting in grid.settings():
            chosen = setting.n_threads or before.one
            use_threads(chosen, setting.n_threads_batch)
            if chosen not in measured:
                options.on_progress("bandwidth of the memory")
                measured[chosen] = bandwidth(subject.model.backend)
            for depth in grid.n_depth:
                bench = partial(_Bench, subject, setting, depth, options=options)
                yield from _at_depth(bench, grid.tests(depth), machine, measured[chosen])
    finally:
        use_threads(before.one, before.several)


def _at_depth(
    make: Callable[[int], _Bench],
    tests: Sequence[BenchTest],
    machine: Machine,
    bytes_per_second: float,
) -> Iterator[Result]:
    """The results of tests that share a cache, which is gone when they are done."""
    if tests:
        bench = make(max(test.n_ctx for test in tests))
        for test in tests:
            yield bench.result(test, machine, bytes_per_second)


class _Bench:
    """An engine whose cache holds random tokens up to a depth."""

    def __init__(
        self, subject: Subject, setting: Setting, depth: int, n_ctx: int, options: Options
    ) -> None:
        self.subject, self.setting, self.options = subject, setting, options
        cache = replace(options.cache, type_k=setting.type_k, type_v=setting.type_v, n_ctx=n_ctx)
        self.engine = Engine(subject.model, cache, n_batch=setting.n_evaluated)
        n_vocab = subject.model.config.n_vocab
        self.ids = np.random.default_rng(0).integers(n_vocab, size=n_ctx).tolist()
        if subject.model.backend.compiles:
            self._progress("compiling kernels")
            self.engine.warm_up()
        self._progress(f"filling {depth} tokens")
        self._return_to(depth)

    def result(self, test: BenchTest, machine: Machine, bytes_per_second: float) -> Result:
        peak = PeakMemory(self.engine.model.backend)
        started = datetime.now(UTC)
        if self.options.warm_up:
            self._progress(f"{test.name}, warming up")
            self._warm_up(test)
        samples = []
        for number in range(1, self.options.repetitions + 1):
            self._progress(f"{test.name}, {number} of {self.options.repetitions}")
            samples.append(round(1e9 * self._seconds(test)))
        model, cache, setting = self.subject.model, self.engine.cache, self.setting
        return Result(
            source=self.subject.source,
            machine=machine,
            setting=setting,
            test=test,
            threads=self.engine.slot.threads,
            test_time=started.strftime("%Y-%m-%dT%H:%M:%SZ"),
            samples_ns=tuple(samples),
            n_ctx=self.engine.n_ctx,
            kv_bytes=cache.n_bytes("k") + cache.n_bytes("v"),
            peak_bytes=peak.n_bytes(),
            bytes_per_token=bytes_per_token(model, cache.layouts, test, self.engine.n_batch),
            bandwidth=bytes_per_second,
        )

    def _warm_up(self, test: BenchTest) -> None:
        records = self.subject.model.backend.records
        self._seconds(
            BenchTest(
                test.n_prompt,
                test.n_gen if records else min(test.n_gen, WARM_UP_GEN),
                test.n_depth,
            )
        )

    def _seconds(self, test: BenchTest) -> float:
        """Run a test at the depth, and drop the rows it added."""
        seconds = 0.0
        if test.n_prompt:
            seconds += self._evaluate(test.n_depth, test.n_depth + test.n_prompt)
        if test.n_gen:
            seconds += self._generate(test.n_before_gen, test.n_gen)
        self._return_to(test.n_depth)
        return seconds

    def _return_to(self, depth: int) -> None:
        """Have the cache hold the tokens up to a depth, and no more; not timed."""
        held = self.engine.truncate(depth)
        if held < depth:
            self._evaluate(held, depth)
        self.engine.checkpoint()

    def _evaluate(self, first: int, end: int) -> float:
        """Seconds to evaluate the tokens from `first` to `end` as a prompt is evaluated."""
        started = time.perf_counter()
        for start in range(first, end, self.engine.n_batch):
            logits = self.engine.evaluate(self.ids[start : min(start + self.engine.n_batch, end)])
            if start + self.engine.n_batch >= end:
                logits[0, 0].item()  # waits
        return time.perf_counter() - started

    def _generate(self, n_before: int, n_gen: int) -> float:
        """Seconds to generate: the first token comes with the prompt and is not counted."""
        generation = self.engine.generate(
            self.ids[:n_before],
            GenerationOptions(
                sampler=Sampler(GREEDY, n_vocab=self.subject.model.config.n_vocab),
                max_tokens=n_gen + 1,
            ),
        )
        for _ in generation:
            pass
        return generation.stats.decode_seconds

    def _progress(self, text: str) -> None:
        setting = self.setting
        self.options.on_progress(f"{setting.type_k}/{setting.type_v} {text}")


def machine_of(subject: Subject, device: str) -> Machine:
    """Where a model runs, and with which kernels.

    Args:
        device: the value of `--device`.
    """
    backend = subject.model.backend
    # attention's words are those of all types
    kernels = in_words(subject.model.uses([("f16", "f16")]))
    return Machine(
        cpu=processor_name(),
        gpu=backend.hardware,
        backend=backend.name,
        device=device,
        attention=kernels["attention"],
        linear=kernels["products"],
    )
