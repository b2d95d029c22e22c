"""Many sequences at the same time, as llama-batched-bench measures them.

All prompts are evaluated first, then all sequences generate, through the scheduler that serves
`complete_many`. The first token of a sequence comes with its prompt and is not counted.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from statistics import fmean

import numpy as np

from localkv.bench.grid import Grid, Setting
from localkv.bench.result import Machine
from localkv.bench.run import GREEDY, Options, machine_of
from localkv.bench.source import Source, Subject
from localkv.cache.layout import PAGE_TOKENS, pages_for
from localkv.config import CacheConfig
from localkv.engine.batch_engine import BatchEngine
from localkv.engine.engine import Engine
from localkv.engine.generation import Generation, GenerationOptions
from localkv.sampling.sampler import Sampler
from localkv.system.threads import Threads, chosen_threads, use_threads

NO_LIMIT = 1e9
"""Milliseconds of a step: prompts are evaluated in whole batches."""


@dataclass(frozen=True)
class ParallelTest:
    """A test of several sequences, each with a prompt and tokens generated after it.

    Attributes:
        is_shared: all sequences share one prompt.
    """

    n_prompt: int
    n_gen: int
    n_parallel: int
    is_shared: bool = False

    @property
    def n_evaluated(self) -> int:
        """Tokens of prompts that are evaluated."""
        return self.n_prompt * (1 if self.is_shared else self.n_parallel)

    @property
    def n_kv(self) -> int:
        """Rows of all sequences together, once they have ended."""
        return self.n_evaluated + self.n_parallel * self.n_gen

    @property
    def n_ctx(self) -> int:
        """Tokens of one sequence; the last one drawn needs a place, too."""
        return self.n_prompt + self.n_gen + 1

    def cache(self, like: CacheConfig) -> CacheConfig:
        """A cache with room for it, and for the prompts as they are kept between its two halves."""
        n_pages = self.n_parallel * (pages_for(self.n_ctx) + 1)
        return replace(
            like, n_ctx=self.n_ctx, n_sequences=self.n_parallel, n_tokens=n_pages * PAGE_TOKENS
        )


@dataclass(frozen=True)
class ParallelResult:
    """A test, and what it took.

    Attributes:
        prompt_seconds, gen_seconds: mean of the repetitions.
        kv_bytes: the bytes allocated for K and V.
    """

    source: Source
    machine: Machine
    setting: Setting
    test: ParallelTest
    threads: Threads
    prompt_seconds: float
    gen_seconds: float
    kv_bytes: int

    @property
    def prompt_ts(self) -> float:
        """Tokens of prompts per second."""
        return self.test.n_evaluated / self.prompt_seconds

    @property
    def gen_ts(self) -> float:
        """Tokens generated per second, of all sequences together."""
        return self.test.n_parallel * self.test.n_gen / self.gen_seconds

    @property
    def seconds(self) -> float:
        return self.prompt_seconds + self.gen_seconds

    def values(self) -> dict[str, str | int | float]:
        """llama-batched-bench's keys, in its order; then ours."""
        test = self.test
        return {
            "n_kv_max": test.n_kv,
            "n_batch": self.setting.n_batch,
            "n_ubatch": self.setting.n_ubatch,
            "flash_attn": int(self.machine.backend != "reference"),
            "is_pp_shared": int(test.is_shared),
            "n_gpu_layers": self.source.config.n_layers + 1 if self.machine.gpu else 0,
            "n_threads": self.threads.one,
            "n_threads_batch": self.threads.several,
            "pp": test.n_prompt,
            "tg": test.n_gen,
            "pl": test.n_parallel,
            "n_kv": test.n_kv,
            "t_pp": self.prompt_seconds,
            "speed_pp": self.prompt_ts,
            "t_tg": self.gen_seconds,
            "speed_tg": self.gen_ts,
            "t": self.seconds,
            "speed": (test.n_evaluated + test.n_parallel * test.n_gen) / self.seconds,
            "model": self.source.kind,
            "cpu_info": self.machine.cpu,
            "gpu_info": self.machine.gpu,
            "type_k": self.setting.type_k,
            "type_v": self.setting.type_v,
            "kv_bytes": self.kv_bytes,
        }


def parallel_tests(grid: Grid, n_parallel: Sequence[int], *, is_shared: bool) -> list[ParallelTest]:
    """Every prompt with every generation and every number of sequences, as llama-batched-bench."""
    return [
        ParallelTest(n_prompt, n_gen, n, is_shared)
        for n_prompt, n_gen, n in product(grid.n_prompt, grid.n_gen, n_parallel)
    ]


def run_parallel(
    subject: Subject, grid: Grid, tests: Sequence[ParallelTest], options: Options
) -> Iterator[ParallelResult]:
    """The results of a model's tests, one by one, for each setting of the grid.

    Raises:
        LocalKVError: a cache does not fit the memory.
    """
    machine, before = machine_of(subject, options.device), chosen_threads()
    try:
        for setting in grid.settings():
            use_threads(setting.n_threads or before.one, setting.n_threads_batch)
            for test in tests:
                yield _result(subject, machine, setting, test, options)
    finally:
        use_threads(before.one, before.several)


def _result(
    subject: Subject, machine: Machine, setting: Setting, test: ParallelTest, options: Options
) -> ParallelResult:
    like = replace(options.cache, type_k=setting.type_k, type_v=setting.type_v)
    engine = Engine(subject.model, test.cache(like), n_batch=setting.n_evaluated)
    ids = np.random.default_rng(0).integers(
        subject.model.config.n_vocab, size=(test.n_parallel, test.n_prompt)
    )
    prompts = [ids[0 if test.is_shared else i].tolist() for i in range(test.n_parallel)]
    name = f"{setting.type_k}/{setting.type_v}, {test.n_parallel} sequences"
    if options.warm_up:
        options.on_progress(f"{name}, warming up")
        _seconds(engine, prompts, min(test.n_gen, 4))
    samples = []
    for number in range(1, options.repetitions + 1):
        options.on_progress(f"{name}, {number} of {options.repetitions}")
        samples.append(_seconds(engine, prompts, test.n_gen))
    cache = engine.cache
    return ParallelResult(
        subject.source,
        machine,
        setting,
        test,
        engine.slot.threads,
        fmean(prompt for prompt, _ in samples),
        fmean(gen for _, gen in samples),
        cache.n_bytes("k") + cache.n_bytes("v"),
    )


def _seconds(engine: Engine, prompts: Sequence[Sequence[int]], n_gen: int) -> tuple[float, float]:
    """Seconds that the prompts take, and seconds that the tokens after them take."""
    engine.reset()
    batch = BatchEngine(engine, step_ms=NO_LIMIT)

    def start(max_tokens: int) -> list[Generation]:
        n_vocab = engine.model.config.n_vocab
        return [
            batch.generate(
                ids,
                GenerationOptions(sampler=Sampler(GREEDY, n_vocab=n_vocab), max_tokens=max_tokens),
            )
            for ids in prompts
        ]

    started = time.perf_counter()
    _read_all(batch, start(1))
    prompt_seconds = time.perf_counter() - started
    generations = start(n_gen + 1)
    while not all(one.n_ready or one.has_ended for one in generations):
        batch.step()
    drawn = batch.stats.n_generated
    started = time.perf_counter()
    _read_all(batch, generations)
    seconds = time.perf_counter() - started
    # a sequence that was first may have drawn a token while another one began
    share = (batch.stats.n_generated - drawn) / (n_gen * len(prompts))
    return prompt_seconds, seconds / share


def _read_all(batch: BatchEngine, generations: Sequence[Generation]) -> None:
    while not batch.is_idle:
        batch.step()
        for one in generations:
            for _ in range(one.n_ready):
                next(one)
