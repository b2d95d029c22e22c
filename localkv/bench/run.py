"""Runs a grid of tests and times them, on the engine that `complete` runs on.

A prompt is timed from its first batch to the logits of its last token. Generation is greedy and
goes on to the length asked for, whatever is drawn; it counts the time of each token after the
first, as in `GenerationStats`. Loading, warming up and filling the context are never timed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

import numpy as np

from localkv.bench.grid import BenchTest, Grid, Setting
from localkv.bench.result import Machine, PeakMemory, Result, bandwidth
from localkv.bench.source import Subject
from localkv.cache.layout import GroupLayout, bytes_of, pages_for, read_rows, written_rows
from localkv.config import CacheConfig
from localkv.engine.batch_engine import BatchEngine
from localkv.engine.engine import Engine
from localkv.engine.generation import GenerationOptions
from localkv.kernels.backend import in_words
from localkv.kernels.layer_weights import tensors_of
from localkv.model import Transformer
from localkv.quant_formats.packed_tensor import PackedTensor
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
        offload: the arguments of `LLM` that divide a model over devices.
        cache: of all caches, but for their types and sizes.
        on_progress: called with the next step, in a few words.
    """

    repetitions: int = 5
    warm_up: bool = True
    device: str = "auto"
    offload: Mapping[str, Any] = field(default_factory=dict)
    cache: CacheConfig = field(default_factory=CacheConfig)
    on_progress: Callable[[str], None] = lambda text: None


def run(subject: Subject, grid: Grid, options: Options) -> Iterator[Result]:
    """The results of a model's tests, one by one, in the grid's order.

    A cache is made once for all tests of one setting and depth, and filled to the depth with random
    tokens. After each repetition the rows beyond the depth are dropped.

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
                test.n_prompt, test.n_gen if records else min(test.n_gen, WARM_UP_GEN), test.n_depth
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
        generation = BatchEngine(self.engine).generate(
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
    # the words for attention are the same for all cache types
    kernels = in_words(subject.model.uses([("f16", "f16")]))
    return Machine(
        cpu=processor_name(),
        gpu=backend.hardware,
        backend=backend.name,
        device=device,
        attention=kernels["attention"],
        linear=kernels["products"],
        n_gpu_layers=subject.model.places.placement.n_gpu_layers,
    )


PAGE_ENTRY = 8
"""Bytes of a page's number in a page table."""
_EXPERTS = ("ffn_gate_exps", "ffn_up_exps", "ffn_gate_up_exps", "ffn_down_exps")


def weight_bytes(model: Transformer, n_tokens: int) -> float:
    """Bytes of weights that a batch of `n_tokens` reads for the logits of its last token.

    Of routed experts those count that tokens are expected to be sent to if every expert is as
    likely: E (1 - (1 - k / E)^n) of E, with k for each of n tokens.
    """
    weights = model.weights
    embedding = weights.token_embd
    total: float = n_tokens * embedding.format.row_bytes(embedding.shape[-1])
    total += _bytes(weights.output) + _bytes(weights.output_norm) + _bytes(weights.altup)
    if (per_layer := weights.per_layer) is not None:
        rows = per_layer.token_embd
        total += n_tokens * rows.format.row_bytes(rows.shape[-1])
        total += _bytes(per_layer.model_proj) + _bytes(per_layer.proj_norm)
    for spec, layer in zip(model.config.layers, weights.layers, strict=True):
        total += _bytes(layer)
        if (moe := spec.moe) is not None:
            unused = (1 - moe.n_experts_used / moe.n_experts) ** n_tokens
            total -= unused * sum(_bytes(getattr(layer.moe, name)) for name in _EXPERTS)
    return total


def bytes_per_token(
    model: Transformer, layouts: Sequence[GroupLayout], test: BenchTest, n_batch: int
) -> float:
    """Bytes that are moved for each token of a test, on average.

    Args:
        layouts: of the cache.
        n_batch: most tokens evaluated at a time.
    """
    total = 0.0
    for start in range(0, test.n_prompt, n_batch):
        n = min(n_batch, test.n_prompt - start)
        total += weight_bytes(model, n) + _row_bytes(layouts, test.n_depth + start, n)
    if n := test.n_gen:
        total += n * weight_bytes(model, 1)
        first = test.n_before_gen
        total += sum(_row_bytes(layouts, at, 1) for at in range(first, first + n))
    return total / test.n_tokens


def _row_bytes(layouts: Sequence[GroupLayout], n_before: int, n_new: int) -> int:
    """Bytes of rows of K and V that new tokens read, their own included, and write; and of page
    tables."""
    total = 0
    for layout in layouts:
        read = read_rows(layout, n_before, n_new)
        total += bytes_of(layout, read) + bytes_of(layout, written_rows(layout, n_before, n_new))
        total += PAGE_ENTRY * len(layout.group.layers) * sum(pages_for(n) for n in read)
    return total


def _bytes(part: Any) -> int:
    """Bytes of all tensors in a part of the weights, as they lie in memory."""
    return sum(
        tensor.n_bytes if isinstance(tensor, PackedTensor) else tensor.nbytes
        for tensor in tensors_of(part)
    )
