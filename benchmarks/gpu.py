"""The GPU backend, stage by stage: right, and how fast.

    python benchmarks/gpu.py --minutes 12 [--stages kernels decode ...] [--out FOLDER]
    python benchmarks/gpu.py --llama-bench PROGRAM --gguf FILE
    python benchmarks/gpu.py --dry-run

Needs torch, Triton, NumPy and this package, which need not be installed. The stages that have a CPU
beside the GPU need Numba. Tests need pytest, and are fast with pytest-xdist.

Each stage is a process of its own and has a share of the minutes. What it does not use is left to
those behind it; at the end of its share it is stopped. A measurement that fails is a row that says
so, and the next one goes on. If the process dies, or a kernel has spoiled the GPU's state, another
process goes on behind that measurement. The results are written after each.

`--dry-run` walks through the stages without a GPU, in Triton's interpreter and tiny sizes; its
times mean nothing, and it writes only where `--out` says.

    kernels  one kernel of each family beside the references, and a small model of each kind
    text     what the model in models/ writes, and its logits, beside those on the CPU
    copy     bandwidth of a copy in memory, which the other stages are compared with
    compile  the kernels of the next three stages, in as many processes as there are cores
    decode   attention of one new token, by pair of cache types and context
    linear   products with packed weights, one token and many
    prompts  attention of a chunk, by pair, beside torch's with K and V in f16
    model    random weights in the shape of Llama 3 8B: prompts and decoding, by pair and depth
    places   layers with experts, divided between the GPU and the CPU, beside all on the GPU
    tests    the tests marked `gpu`
    peer     the same tests by llama.cpp's llama-bench, if there is one, with a model of that shape

Times are medians of CUDA events around replayed graphs. Layers and matrices are gone through in
turn, more of them than the GPU's cache can hold. Writes `<GPU>-<date>.json` and `.md`.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import gc
import importlib.util
import json
import multiprocessing
import os
import platform
import signal
import statistics
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

ROOT = Path(__file__).parents[1]
PAIRS = ("f16", "q8_0", "q4_0", "q4_0/q8_0", "q8_0/q4_0", "fp8_e4m3", "q5_1")
WEIGHTS = (
    "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl", "q4_K", "q5_K", "q6_K",
)  # fmt: skip
SHARES = {
    "kernels": 2.0,
    "text": 0.8,
    "copy": 0.2,
    "compile": 1.5,
    "decode": 1.0,
    "linear": 1.0,
    "prompts": 1.0,
    "model": 1.6,
    "places": 1.3,
    "tests": 1.2,
    "peer": 0.4,
}
"""Minutes of twelve that a stage has. They are stretched to the minutes that there are."""
COMPILED = ("decode", "linear", "prompts")
"""Stages whose kernels can be compiled ahead of them, each in one of several processes."""
LATE_SECONDS = 5.0
"""A stage looks at the clock between measurements; when it is so late, it is killed."""
FORK = multiprocessing.get_context("fork")
"""Processes that have imported all; none of their parents has asked anything of the GPU."""
PEER_PAIRS = ("f16", "q8_0", "q4_0")
"""llama.cpp's default build has GPU kernels for pairs of one type only."""


AttentionShape = tuple[list[tuple[int, int]], int, int]
"""Rows before and new tokens of each sequence, channels of a head, query heads of a KV head."""


@dataclass(frozen=True)
class Sizes:
    """What is measured: on a GPU, or in the interpreter."""

    copy_bytes: int = 4 << 30
    n_kv_heads: int = 8
    group: int = 4
    head_dim: int = 128
    contexts: tuple[int, ...] = (1024, 4096, 8192, 16384, 32768, 131072)
    cold_bytes: int = 512 << 20
    matrix: tuple[int, int] = (14336, 4096)
    tokens: tuple[int, ...] = (1, 2, 4, 8, 16, 64, 512)
    chunk: int = 2048
    depths: tuple[int, ...] = (0, 8192)
    one_token: AttentionShape = ([(1300, 1)], 128, 4)
    prompt: AttentionShape = ([(300, 40), (0, 90)], 128, 8)
    product_tokens: tuple[int, ...] = (1, 17, 300)
    text_tokens: int = 200
    families: tuple[tuple[str, int], ...] = (
        ("llama-tiny", 2),
        ("moe-tiny", 2),
        ("gemma3-1b", 6),
        ("gpt-oss-20b", 2),
        ("qwen35-0.8b", 4),
        ("granite-4-h-micro", 6),
        ("deepseek-v2-lite", 2),
    )
    experts: tuple[str, int] = ("qwen3-30b-a3b", 6)
    experts_type: str = "q4_0"
    model: str = "llama-8b"
    model_depths: tuple[int, ...] = (0, 4096, 32768)
    prompts: tuple[int, ...] = (512, 4096)
    model_weights: tuple[str, ...] = ("q4_0", "q8_0", "q4_K")
    model_pairs: tuple[str, ...] = ("f16", "q8_0", "q4_0", "q4_0/q8_0", "fp8_e4m3")
    n_decode: int = 128
    n_batch: int = 2048
    repeats: int = 20
    pairs: tuple[str, ...] = PAIRS
    weights: tuple[str, ...] = WEIGHTS


TINY = Sizes(
    copy_bytes=1 << 16,
    one_token=([(40, 1)], 64, 2),
    prompt=([(20, 3)], 64, 2),
    product_tokens=(1, 3),
    text_tokens=3,
    families=(("moe-tiny", 1),),
    experts=("moe-tiny", 2),
    n_kv_heads=1,
    group=2,
    head_dim=64,
    contexts=(256, 300),
    cold_bytes=1,
    matrix=(64, 512),
    tokens=(1, 3),
    chunk=32,
    depths=(0, 40),
    model="dry-run",
    model_depths=(0, 200),
    prompts=(16,),
    model_weights=("q4_0",),
    model_pairs=("q4_0/q8_0",),
    n_decode=2,
    repeats=1,
    pairs=("f16", "q4_0/q8_0"),
    weights=("f16", "q4_0", "q6_K"),
)


TINY_SHAPE = {
    "block_count": 1,
    "embedding_length": 256,
    "feed_forward_length": 256,
    "attention.head_count": 8,
    "attention.head_count_kv": 4,
    "context_length": 4096,
}


def add_shape(name: str, like: str, **keys: Any) -> None:
    """Make `name` a shape that models can have, with few tokens: another one, with other keys."""
    from localkv.loader.known_models import KNOWN_MODELS

    known = KNOWN_MODELS[like]
    n_layers = keys.get("block_count", 0)
    most = known.keys["block_count"]
    cut = {
        key: value[:n_layers] if isinstance(value, list) and len(value) == most else value
        for key, value in {**known.keys, **keys}.items()
    }
    KNOWN_MODELS[name] = replace(known, name=name, n_vocab=512, keys=cut)


class OutOfTimeError(Exception):
    """What is under way is left."""


@dataclass
class Run:
    """A measurement under way.

    Attributes:
        device: "cuda", or "cpu" for a dry run.
        minutes: that there are for all.
        end: when the stage's share is over, as `time.perf_counter` counts.
        rows: results: the stage, and whatever it measured.
        peer: llama-bench and a model for it, or None.
        part: (i, n): only measurements i, i + n, i + 2n... are made, once, so that their kernels
            are compiled.
        send: tells the first process of a measurement that begins, or of a row.
        n_done: measurements of the stage that another process has made.
        n_begun: measurements of the stage that began, in all its processes.
        failures: what failed where nobody is told.
    """

    device: str
    sizes: Sizes
    minutes: float
    end: float = 0.0
    rows: list[dict[str, Any]] = field(default_factory=list)
    peer: tuple[str, str] | None = None
    part: tuple[int, int] | None = None
    send: Callable[[Any], None] = print
    n_done: int = 0
    n_begun: int = 0
    failures: list[str] = field(default_factory=list)

    @property
    def bandwidth(self) -> float:
        """Bytes per second of a copy, read and written; 0 if it was not measured."""
        found = [row["gb_per_s"] for row in self.rows if "gb_per_s" in row]
        return 1e9 * found[-1] if found else 0.0

    def measure(self, stage: str, make: Callable[[], dict[str, Any]], **labels: Any) -> None:
        """Make a row of labels and what is measured, or of what failed.

        Raises:
            OutOfTimeError: the stage's share is over.
        """
        self.n_begun += 1
        if self.n_begun <= self.n_done:
            return
        if self.part is not None and self.n_begun % self.part[1] != self.part[0]:
            return
        row = {"stage": stage, **labels}
        self.send(("begun", self.n_begun, row))
        self.seconds_left()
        try:
            row |= make()
        except OutOfTimeError as late:
            row |= {"result": str(late)}
        except Exception as error:
            text = traceback.format_exc()
            if self.part is not None:
                self.failures.append(text)
                return
            print(text, file=sys.stderr, flush=True)
            row |= {"result": failure(error), "failed": 1}
            error.__traceback__ = None  # it would keep what was allocated
            self.send(("row", row))
            self._recover()
            return
        if self.part is None:
            self.send(("row", row))

    def _recover(self) -> None:
        """Give back memory; leave the process if the GPU does nothing more for it."""
        import torch

        gc.collect()
        if self.device != "cuda":
            return
        try:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        except RuntimeError:
            self.send(("spoiled", self.n_begun, None))
            os._exit(1)

    def seconds_left(self) -> float:
        """Until the stage's end.

        Raises:
            OutOfTimeError: there are none.
        """
        left = self.end - time.perf_counter()
        if left <= 0:
            raise OutOfTimeError(out_of_time(self))
        return left

    def share(self, n_bytes: float, seconds: float) -> float:
        """Percent of the bandwidth of a copy, or 0 if it was not measured."""
        return 100 * n_bytes / seconds / self.bandwidth if self.bandwidth else 0.0


def out_of_time(run: Run) -> str:
    return f"left out: its share of {run.minutes:g} minutes is over"


def failure(error: Exception) -> str:
    """The first line of what an exception says."""
    said = str(error).strip().splitlines()
    return f"{type(error).__name__}: {said[0]}"[:300] if said else type(error).__name__


def number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def seconds_of(run: Run, calls: list[Callable[[], object]]) -> float:
    """Median seconds of a call; all of them are made in turn, as one recorded graph."""
    import torch

    started = time.perf_counter()
    for call in calls[:1] if run.part else calls:
        call()
    if run.device == "cpu" or run.part:
        return (time.perf_counter() - started) / len(calls)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(run.sizes.repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1000 / len(calls))
    return statistics.median(times)


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """The slope of the line that fits best."""
    return statistics.linear_regression(x, y).slope


def sides(pair: str) -> tuple[str, str]:
    """The types of K and V: "q4_0/q8_0", or "f16" for both."""
    type_k, _, type_v = pair.partition("/")
    return type_k, type_v or type_k


def fill_randomly(cache: Any) -> None:
    """Random rows in every page: packed once and repeated, so no row is read from a cache."""
    import torch

    from localkv.kernels.reference.torch_arrays import encode

    device = cache.layers[0].segments[0].k[0].device
    generator = torch.Generator().manual_seed(0)
    for layer in cache.layers:
        for segment in layer.segments:
            for fmt, planes in ((segment.format_k, segment.k), (segment.format_v, segment.v)):
                heads, tokens = planes[0].shape[1:3]
                head_dim = planes[0].shape[3] * fmt.block_size
                x = torch.randn(heads, tokens, head_dim, generator=generator)
                for plane, values in zip(planes, encode(fmt, x), strict=True):
                    plane.copy_(values.to(device).expand_as(plane))


def finished(
    run: Run, command: list[str], folder: Path | None = None, env: dict[str, str] | None = None
) -> tuple[list[str], list[str], int | None]:
    """Another program's lines, on stdout and on stderr, and its status once it has ended.

    The status is None if it was stopped at the end of the stage's share.
    """
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    stopped = threading.Event()

    def stop() -> None:
        stopped.set()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(run.seconds_left(), stop)
    timer.start()
    try:
        out, err = process.communicate()
    finally:
        timer.cancel()
    status = None if stopped.is_set() else process.returncode
    return out.strip().splitlines(), err.strip().splitlines(), status


def stage_kernels(run: Run) -> None:
    """Families of kernels on a few inputs, as the tests have them; then models of each kind."""
    tests = gpu_tests()
    s = run.sizes
    checks: dict[str, Callable[[], None]] = {
        "store": partial(tests.test_stored_rows_are_the_references, "q4_0"),
        "attention, one token": partial(tests.test_attention, "q4_0", "q8_0", *s.one_token),
        "attention, prompt": partial(tests.test_attention, "q8_0", "q4_0", *s.prompt),
    }
    for n in s.product_tokens:
        checks[f"product, {n} tokens"] = partial(tests.test_products, "q4_0", n)
    for name, check in checks.items():
        run.measure("kernels", partial(passes, check), family=name)
    for shape, n_layers in run.sizes.families:
        for n_batch in (1, 64):
            run.measure(
                "kernels",
                partial(off_the_reference, run, shape, n_layers, n_batch),
                family=shape,
                tokens_at_once=n_batch,
            )


def gpu_tests() -> ModuleType:
    """The module of tests marked `gpu`."""
    path = ROOT / "tests" / "kernels" / "gpu" / "test_gpu.py"
    spec = importlib.util.spec_from_file_location("gpu_tests", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def passes(check: Callable[[], None]) -> dict[str, Any]:
    """Run a test."""
    started = time.perf_counter()
    check()
    return {"result": "agrees", "seconds": time.perf_counter() - started}


FAR = 3e-2
"""The largest difference of a median row of logits: products round activations to fp16."""


def off_the_reference(run: Run, shape: str, n_layers: int, n_batch: int) -> dict[str, Any]:
    """How far a small model's logits are from the reference's: a prompt, `n_batch` at once."""
    import torch

    from localkv.config import CacheConfig
    from localkv.engine.engine import Engine
    from localkv.kernels.reference.backend import reference_backend
    from localkv.loader.synthetic import synthetic_model

    started = time.perf_counter()
    name = f"{shape}, cut"
    add_shape(name, shape, block_count=n_layers)
    n_tokens = 4 if n_batch == 1 else 40
    ids = [(31 * i + 7) % 512 for i in range(n_tokens)]
    want, got = (
        torch_logits(
            Engine(
                synthetic_model(name, "q8_0", backend), CacheConfig(n_ctx=64), n_batch=n_batch
            ).logits(ids)
        )
        for backend in (reference_backend(), backend_of_models(run))
    )
    rows = (got - want).norm(dim=1) / want.norm(dim=1)
    off = float(torch.nan_to_num(rows, nan=float("inf")).median())
    if off > FAR:
        raise ValueError(f"the median row of logits is off by {off:.2g}, at most {FAR:g} is right")
    return {"result": "agrees", "off": off, "seconds": time.perf_counter() - started}


def stage_compile(run: Run) -> None:
    """Fill Triton's cache of compiled kernels: several processes make a part of the calls each."""
    n_parts = min(16, os.cpu_count() or 1)

    def compile_part(i: int, failures: Any) -> None:
        run.part, run.send, run.n_done = (i, n_parts), lambda message: None, 0
        for name in COMPILED:
            with suppress(OutOfTimeError):
                run_stage(run, name)
        failures.put(run.failures)

    def compile_all() -> dict[str, Any]:
        started = time.perf_counter()
        failures = FORK.SimpleQueue()
        parts = [FORK.Process(target=compile_part, args=(i, failures)) for i in range(n_parts)]
        for part in parts:
            part.start()
        for part in parts:
            part.join(max(0.0, run.end - 1 - time.perf_counter()))
        late = [part for part in parts if part.is_alive()]
        for part in late:
            part.kill()
        texts = list[str]()
        while not failures.empty():
            texts += failures.get()
        for text in texts:
            print(text, file=sys.stderr)
        died = sum(part.exitcode not in (0, None) for part in parts if part not in late)
        found = {"processes": n_parts, "stopped": len(late), "failed": len(texts) + died}
        return {**found, "seconds": time.perf_counter() - started}

    run.measure("compile", compile_all)


def run_stage(run: Run, name: str) -> None:
    """A stage's measurements, until its share is over."""
    globals()[f"stage_{name}"](run)


def stage_tests(run: Run) -> None:
    """The tests marked `gpu`, in a process of their own."""
    if importlib.util.find_spec("pytest") is None:
        run.measure("tests", lambda: {"result": "not run: there is no pytest"})
        return
    command = [sys.executable, "-m", "pytest", "-v", "-m", "gpu", "-p", "no:cacheprovider"]
    # an image's pytest may be too old for the project's settings, and its packages may warn
    command += ["-c", os.devnull, "--rootdir", str(ROOT), "-W", "ignore", "--tb", "short"]
    command += ["-o", f"pythonpath={ROOT / 'tests'}", "--import-mode", "importlib"]
    command.append("--noconftest")  # it needs more than a bare image has
    if importlib.util.find_spec("xdist") is not None:
        command += ["-n", str(min(16, os.cpu_count() or 1))]  # compiling takes most of the time
    # in the interpreter they would take minutes; without a GPU they are skipped
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    # pytest's `pythonpath` does not reach the processes of xdist
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests")])

    def tested() -> dict[str, Any]:
        out, err, status = finished(run, [*command, "tests/kernels/gpu/test_gpu.py"], ROOT, env)
        counts = Counter(
            word
            for line in out
            for word in ("PASSED", "FAILED", "ERROR", "SKIPPED")
            if f"{word} tests/" in line or f" {word} [" in line
        )
        said = ", ".join(f"{n} {word.lower()}" for word, n in counts.items())
        if status is None:
            return {"result": f"{said or 'none'}, then stopped: {out_of_time(run)}"}
        for line in out[-60:] if status else []:
            print("   ", line)
        last = (out or err or ["nothing"])[-1].strip("= ")
        return {"result": last, "status": status, "failed": counts["FAILED"] + counts["ERROR"]}

    run.measure("tests", tested)


def stage_text(run: Run) -> None:
    """A real model from its file to its logits, of a text that it wrote itself on the CPU."""
    from localkv.config import CacheConfig
    from localkv.engine.engine import Engine
    from localkv.loader.gguf_file import open_gguf
    from localkv.loader.weights import load_model

    path = ROOT / "models" / "tales-4M-Q8_0.gguf"
    gguf = open_gguf(path)
    pieces = gguf.metadata.strings("tokenizer.ggml.tokens")
    beginning = ids_of("Once upon a time", pieces)
    n_tokens = run.sizes.text_tokens

    def compared(pair: str) -> dict[str, Any]:
        config = CacheConfig(*sides(pair), n_ctx=512)
        cpu, gpu = (
            Engine(load_model(path, backend)[0], config)
            for backend in (cpu_of_the_machine(), backend_of_models(run))
        )
        ids, others = (greedy(engine, beginning, n_tokens) for engine in (cpu, gpu))
        want, got = (torch_logits(engine.logits([*beginning, *ids])) for engine in (cpu, gpu))
        p, q = want.log_softmax(-1), got.log_softmax(-1)
        n_same = next(
            (i for i, two in enumerate(zip(ids, others, strict=True)) if len({*two}) > 1), len(ids)
        )
        # where the texts part, what was taken instead should be nearly as good
        at = want[len(beginning) + n_same - 1]
        short = 0.0 if n_same == len(ids) else float(at.max() - at[others[n_same]])
        return {
            "tokens": len(ids),
            "kl_mean": float((p.exp() * (p - q)).sum(-1).mean()),
            "same_first": float((p.argmax(-1) == q.argmax(-1)).float().mean()),
            "same_text": n_same,
            "logit_short_there": short,
            "text": repr("".join(pieces[i] for i in others[:20])),
        }

    for pair in run.sizes.pairs:
        run.measure("text", partial(compared, pair), pair=pair)


def ids_of(text: str, pieces: Sequence[str]) -> list[int]:
    """Tokens of a text, the longest piece first: an image may have no tokenizers."""
    number = {piece: i for i, piece in enumerate(pieces)}
    space = "\u0120" if "\u0120a" in number else "\u2581"
    text, ids = text.replace(" ", space), list[int]()
    while text:
        longest = next(n for n in range(len(text), 0, -1) if text[:n] in number)
        ids.append(number[text[:longest]])
        text = text[longest:]
    return ids


def greedy(engine: Any, beginning: list[int], n_tokens: int) -> list[int]:
    """The most likely tokens after a beginning."""
    from localkv.engine.batch_engine import BatchEngine

    return list(BatchEngine(engine).generate(beginning, greedily(engine, n_tokens)))


def greedily(engine: Any, n_tokens: int) -> Any:
    from localkv.engine.generation import GenerationOptions
    from localkv.sampling.params import SamplingParams
    from localkv.sampling.sampler import Sampler

    sampler = Sampler(SamplingParams(temperature=0.0), n_vocab=engine.model.config.n_vocab)
    return GenerationOptions(sampler=sampler, max_tokens=n_tokens)


def backend_of_models(run: Run, gpu: str = "cuda") -> Any:
    """The GPU's; in a dry run plain torch, since a model takes Triton's interpreter minutes."""
    from localkv.kernels.gpu.triton_backend import triton_backend
    from localkv.kernels.reference.backend import reference_backend

    return triton_backend(gpu) if run.device == "cuda" else reference_backend()


def cpu_of_the_machine() -> Any:
    """The CPU's backend, on an image without platformdirs, too, which only names a folder."""
    try:
        import platformdirs
    except ImportError:
        folder = str(Path.home() / ".cache")
        sys.modules["platformdirs"] = SimpleNamespace(  # type: ignore[assignment]
            user_cache_dir=lambda name: os.path.join(folder, name)
        )
    else:
        del platformdirs
    from localkv.kernels.cpu.cpu_backend import cpu_backend
    from localkv.system.threads import default_threads, use_threads

    use_threads(default_threads(), default_threads())
    return cpu_backend()


def torch_logits(logits: Any) -> Any:
    """float64, of any backend's arrays."""
    import torch

    return torch.as_tensor(logits).cpu().double()


def stage_copy(run: Run) -> None:
    import torch

    def copied() -> dict[str, Any]:
        source = torch.empty(run.sizes.copy_bytes, dtype=torch.uint8, device=run.device).random_()
        target = torch.empty_like(source)
        seconds = seconds_of(run, [lambda: target.copy_(source)] * 2)
        return {"gb_per_s": 2e-9 * run.sizes.copy_bytes / seconds}

    run.measure("copy", copied)


@dataclass(frozen=True)
class Attention:
    """Attention of new tokens at the end of a random context, in several layers' caches."""

    calls: list[Callable[[], object]]
    n_bytes: int
    q: Any


def attention_calls(run: Run, pair: str, n_new: int, n_ctx: int) -> Attention:
    import torch

    from localkv.arch.spec import AttentionParams
    from localkv.cache.kv_cache import uniform_cache
    from localkv.cache.layout import SegmentSpec
    from localkv.kernels.attention import attention
    from localkv.kernels.gpu.attention.packed_attention import segment_attention
    from localkv.kernels.gpu.group_store import rotate_gpu
    from localkv.kernels.gpu.products.tile_sizes import gpu_of
    from localkv.kernels.reference.torch_arrays import TorchArrays
    from localkv.quant_formats import TOKEN_FORMATS

    s = run.sizes
    types = sides(pair)
    row = sum(TOKEN_FORMATS[name].row_bytes(s.head_dim) for name in types)
    n_bytes = row * s.n_kv_heads * n_ctx
    cache = uniform_cache(
        TorchArrays(run.device),
        n_layers=max(1, min(32, -(-s.cold_bytes // n_bytes))),
        n_kv_heads=s.n_kv_heads,
        head_dim=s.head_dim,
        segments=[SegmentSpec(*types)],
        n_ctx=n_ctx,
    )
    fill_randomly(cache)
    sequence = cache.new_sequence()
    sequence.length = n_ctx - n_new
    batch = cache.batch([(sequence, [0] * n_new)])
    attend = partial(segment_attention, gpu_of(torch.device(run.device)))
    q = torch.randn(n_new, s.n_kv_heads * s.group, s.head_dim, device=run.device)
    params = AttentionParams(s.head_dim**-0.5)
    calls = [
        lambda layer=layer: attention(attend, q, layer, batch, params, rotate=rotate_gpu).flatten(1)
        for layer in cache.layers
    ]
    return Attention(calls, n_bytes, q)


def stage_decode(run: Run) -> None:
    def decoded(pair: str, n_ctx: int) -> dict[str, Any]:
        work = attention_calls(run, pair, 1, n_ctx)
        seconds = seconds_of(run, work.calls)
        return {"us": 1e6 * seconds, "percent_of_copy": run.share(work.n_bytes, seconds)}

    for pair in run.sizes.pairs:
        for n_ctx in run.sizes.contexts:
            run.measure("decode", partial(decoded, pair, n_ctx), pair=pair, context=n_ctx)


def slopes(rows: list[dict[str, Any]]) -> Iterable[dict[str, Any]]:
    """What a token more of context takes, by pair, as `decode` measured it."""
    found = dict[str, float]()
    for pair in dict.fromkeys(row["pair"] for row in rows):
        points = {row["context"]: row["us"] for row in rows if row["pair"] == pair and "us" in row}
        if len(points) > 1:
            found[pair] = slope([*points], [*points.values()])
    for pair, value in found.items():
        to_f16 = value / found["f16"] if found.get("f16") else 0.0
        yield {"stage": "slope", "pair": pair, "ns_per_token": 1000 * value, "to_f16": to_f16}


def stage_linear(run: Run) -> None:
    import torch

    from localkv.kernels.gpu.products.products import linears
    from localkv.kernels.gpu.triton_backend import triton_backend
    from localkv.kernels.layer_weights import Linear
    from localkv.loader.synthetic import random_rows
    from localkv.quant_formats import FORMATS
    from localkv.quant_formats.packed_tensor import PackedTensor

    n_out, n_in = run.sizes.matrix

    @functools.lru_cache(1)
    def layers_of(name: str) -> tuple[list[Linear], int]:
        """Copies of a matrix, and the bytes of one."""
        fmt = FORMATS[name]
        rows = torch.from_numpy(random_rows(fmt, n_out, n_in)).to(run.device)
        copies = max(1, min(16, -(-run.sizes.cold_bytes // rows.nbytes)))
        packed = PackedTensor(fmt, rows, (n_out, n_in))
        backend = triton_backend(run.device)
        return [Linear(backend.prepare(packed)) for _ in range(copies)], rows.numel()

    def multiplied(name: str, n_tokens: int) -> dict[str, Any]:
        layers, n_bytes = layers_of(name)
        x = torch.randn(n_tokens, n_in, device=run.device)
        residual = torch.randn(n_tokens, n_out, device=run.device)
        seconds = seconds_of(run, [lambda w=w: linears(x, (w,), residual) for w in layers])
        return {
            "us": 1e6 * seconds,
            "percent_of_copy": run.share(n_bytes, seconds),
            "tflop_per_s": 2e-12 * n_tokens * n_out * n_in / seconds,
        }

    for name in run.sizes.weights:
        for n_tokens in run.sizes.tokens:
            run.measure(
                "linear", partial(multiplied, name, n_tokens), weights=name, tokens=n_tokens
            )


def stage_prompts(run: Run) -> None:
    import torch

    from localkv.kernels.gpu.attention import packed_attention

    s = run.sizes

    def seen(depth: int, pair: str | None, codes: bool = False) -> dict[str, Any]:
        packed_attention.MULTIPLIES_CODES = codes
        n_ctx = depth + s.chunk
        n_heads = s.n_kv_heads * s.group
        flop = 4 * s.head_dim * n_heads * s.chunk * (depth + (s.chunk + 1) / 2)
        if pair is not None:
            seconds = seconds_of(run, attention_calls(run, pair, s.chunk, n_ctx).calls[:2])
            return {"us": 1e6 * seconds, "tflop_per_s": 1e-12 * flop / seconds}
        plain = torch.randn(2, 1, n_heads, n_ctx, s.head_dim, device=run.device).half()
        mask = None
        if depth:
            mask = torch.ones(s.chunk, n_ctx, dtype=torch.bool, device=run.device).tril(depth)
        attention = partial(
            torch.nn.functional.scaled_dot_product_attention,
            plain[0, :, :, depth:],
            *plain,
            attn_mask=mask,
            is_causal=mask is None,
        )
        seconds = seconds_of(run, [attention] * 2)
        return {"us": 1e6 * seconds, "tflop_per_s": 1e-12 * flop / seconds}

    for depth in s.depths:
        for pair in (None, *s.pairs):
            name = "torch f16" if pair is None else pair
            run.measure("prompts", partial(seen, depth, pair), depth=depth, pair=name)
        if "fp8_e4m3" in s.pairs:
            name = "fp8_e4m3, K's codes multiplied"
            run.measure("prompts", partial(seen, depth, "fp8_e4m3", True), depth=depth, pair=name)


def stage_model(run: Run) -> None:
    """tg and pp by type of weights and of cache; the depth is filled with random pages."""
    s = run.sizes
    for weights in s.model_weights:
        pairs = s.model_pairs if weights == s.model_weights[0] else s.model_pairs[:1]
        model_of(run, weights, pairs)


def model_of(run: Run, weights: str, pairs: Sequence[str]) -> None:
    """With one type of weights; when this returns its memory is free."""
    from localkv.config import CacheConfig
    from localkv.engine.engine import Engine
    from localkv.loader.synthetic import synthetic_model

    s = run.sizes
    n_ctx = s.model_depths[-1] + max(*s.prompts, s.n_decode + 2)
    n_times = 3 if run.device == "cuda" else 1

    @functools.cache
    def model() -> Any:
        return synthetic_model(s.model, weights, backend_of_models(run))

    @functools.lru_cache(1)
    def engine_with(pair: str) -> Any:
        # with rows that nobody generated: reused as if they were a prompt's
        config = CacheConfig(*sides(pair), n_ctx=n_ctx)
        engine = Engine(model(), config, n_batch=min(s.n_batch, n_ctx), exact=False)
        fill_randomly(engine.cache)
        if engine.model.backend.compiles:
            engine.warm_up()
        return engine

    def decoded(pair: str, depth: int) -> dict[str, Any]:
        engine, times = engine_with(pair), list[float]()
        for _ in range(n_times):
            place(engine, depth)
            times.append(token_seconds(engine, [*engine.cached_ids, 7], s.n_decode))
        return {"tokens_per_s": 1 / min(times)}

    def read(pair: str, depth: int, n_prompt: int) -> dict[str, Any]:
        engine, times = engine_with(pair), list[float]()
        for _ in range(n_times):
            place(engine, depth)
            times.append(prompt_seconds(run, engine, n_prompt))
        return {"tokens_per_s": n_prompt / min(times)}

    for pair in pairs:
        for depth in s.model_depths:
            point = {"weights": weights, "pair": pair, "depth": depth}
            run.measure("model", partial(decoded, pair, depth), test=f"tg{s.n_decode}", **point)
            for n in s.prompts:
                run.measure("model", partial(read, pair, depth, n), test=f"pp{n}", **point)


def token_seconds(engine: Any, ids: list[int], n_tokens: int) -> float:
    """Seconds a token, from the second one on, as `localkv bench` counts them."""
    from localkv.engine.batch_engine import BatchEngine

    generation = BatchEngine(engine).generate(ids, greedily(engine, n_tokens))
    n_generated = len(list(generation))
    return float(generation.stats.decode_seconds) / (n_generated - 1)


def prompt_seconds(run: Run, engine: Any, n_prompt: int) -> float:
    """Seconds of a prompt after the cached tokens."""
    wait(run)
    started = time.perf_counter()
    for start in range(0, n_prompt, engine.n_batch):
        engine.evaluate([5] * min(engine.n_batch, n_prompt - start))
    wait(run)
    return time.perf_counter() - started


def steps(rows: list[dict[str, Any]]) -> Iterable[dict[str, Any]]:
    """From one token to the next, at depth 0 and by token of depth, as `model` measured it."""
    found = dict[tuple[str, str], tuple[float, float]]()
    for key in dict.fromkeys((row["weights"], row["pair"]) for row in rows):
        points = {
            row["depth"]: 1 / row["tokens_per_s"]
            for row in rows
            if (row["weights"], row["pair"]) == key
            and row["test"].startswith("tg")
            and "tokens_per_s" in row
        }
        if 0 in points and len(points) > 1:
            found[key] = points[0], slope([*points], [*points.values()])
    for (weights, pair), (at_0, per_token) in found.items():
        f16 = found.get((weights, "f16"), (0.0, 0.0))[1]
        yield {
            "stage": "itl",
            "weights": weights,
            "pair": pair,
            "us_at_0": 1e6 * at_0,
            "ns_per_token": 1e9 * per_token,
            "to_f16": per_token / f16 if f16 else 0.0,
        }


def stage_places(run: Run) -> None:
    """A model with experts on the GPU, and divided between GPU and CPU as llama.cpp's options do.

    Logits are compared with one place's by the median row: a few tokens go to other experts, where
    activations are rounded in another way.
    """
    import torch

    from localkv.arch.placement import Placement
    from localkv.config import CacheConfig
    from localkv.engine.engine import Engine
    from localkv.kernels.places import Places
    from localkv.loader.synthetic import synthetic_model

    s = run.sizes
    shape, n = s.experts
    name, half = f"{shape}, cut", n // 2
    add_shape(name, shape, block_count=n)
    devices, all_there, below = ("cuda0", "cpu"), (0,) * n, (1,) * (n - half) + (0,) * half
    placements = {
        "one place": None,
        f"-ngl {half + 1}": Placement(devices, below, below, embedding=1),
        f"--n-cpu-moe {n}": Placement(devices, all_there, (1,) * n, embedding=1),
        f"--n-cpu-moe {n - half}": Placement(devices, all_there, below, embedding=1),
    }
    ids = [(31 * i + 7) % 512 for i in range(16 if run.device == "cpu" else 200)]

    @functools.cache
    def gpu() -> Any:
        return backend_of_models(run, "cuda:0")

    @functools.lru_cache(1)
    def engine_in(where: str) -> Any:
        placement = placements[where]
        if placement is None:
            places = Places.one(gpu(), n)
        else:
            places = Places((gpu(), cpu_of_the_machine()), placement)
        model = synthetic_model(name, s.experts_type, places)
        engine = Engine(model, CacheConfig(n_ctx=512), n_batch=256)
        if model.backend.compiles:
            engine.warm_up()
        return engine

    @functools.cache
    def logits_in_one_place() -> Any:
        return torch_logits(engine_in("one place").logits(ids))

    def compared(where: str) -> dict[str, Any]:
        want = logits_in_one_place()
        got = torch_logits(engine_in(where).logits(ids))
        rows = (got - want).norm(dim=1) / want.norm(dim=1)
        off = float(torch.nan_to_num(rows, nan=float("inf")).median())
        if off > FAR:
            raise ValueError(f"the median row of logits is off by {off:.2g}")
        same = (got.argmax(-1) == want.argmax(-1)).double().mean()
        return {"off": off, "same_first": float(same)}

    def decoded(where: str) -> dict[str, Any]:
        engine, times = engine_in(where), list[float]()
        for _ in range(3 if run.device == "cuda" else 1):
            engine.truncate(0)
            times.append(token_seconds(engine, ids[:2], max(2, s.n_decode // 2)))
        return {"tokens_per_s": 1 / min(times)}

    def read(where: str) -> dict[str, Any]:
        engine, times = engine_in(where), list[float]()
        for _ in range(3 if run.device == "cuda" else 1):
            engine.truncate(0)
            times.append(prompt_seconds(run, engine, len(ids)))
        return {"tokens_per_s": len(ids) / min(times)}

    for where in placements:
        run.measure("places", partial(compared, where), where=where, test="logits")
        run.measure("places", partial(decoded, where), where=where, test="tg")
        run.measure("places", partial(read, where), where=where, test=f"pp{len(ids)}")


def place(engine: Any, depth: int) -> None:
    """Pretend that `depth` tokens are cached."""
    engine.truncate(0)
    engine.cache.reserve(engine.sequence, depth, depth)  # the next token's, with a window
    engine.sequence.length = depth
    engine.slot.ids[:], engine.slot.generated[:] = [0] * depth, [False] * depth


def wait(run: Run) -> None:
    import torch

    if run.device == "cuda":
        torch.cuda.synchronize()


def stage_peer(run: Run) -> None:
    """llama.cpp, layers on the GPU and flash attention on, as fast as it goes there."""
    if run.peer is None:
        run.measure("peer", lambda: {"result": "not run: no --llama-bench and --gguf"})
        return
    s, (program, file) = run.sizes, run.peer
    depths = ",".join(map(str, s.model_depths))
    prompts = ",".join(map(str, s.prompts))

    def benched(pair: str) -> dict[str, Any]:
        type_k, type_v = sides(pair)
        tests = ["-p", prompts, "-n", str(s.n_decode), "-d", depths, "-r", "3"]
        types = ["-ngl", "99", "-fa", "1", "-ctk", type_k, "-ctv", type_v]
        out, err, status = finished(run, [program, "-m", file, *tests, *types, "-o", "json"])
        if status is None:
            raise OutOfTimeError(out_of_time(run))
        if status:
            raise ValueError((err or ["failed"])[-1])
        points = json.loads("\n".join(out))
        for point in points:
            decodes = point["n_gen"] > 0
            row = {
                "stage": "peer",
                "pair": pair,
                "test": f"tg{point['n_gen']}" if decodes else f"pp{point['n_prompt']}",
                "weights": point["model_type"],
                "depth": point["n_depth"],
                "tokens_per_s": float(point["avg_ts"]),
            }
            run.send(("row", row))
        return {"result": f"{len(points)} tests"}

    for pair in PEER_PAIRS:
        run.measure("peer", partial(benched, pair), pair=pair)


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: one table for each stage."""
    text = []
    for stage in dict.fromkeys(row["stage"] for row in rows):
        of_stage = [row for row in rows if row["stage"] == stage]
        names = list(dict.fromkeys(name for row in of_stage for name in row if name != "stage"))
        text += [f"\n## {stage}\n", "| " + " | ".join(names) + " |", "|---" * len(names) + "|"]
        text += [
            "| " + " | ".join(number(row.get(name, "")) for name in names) + " |"
            for row in of_stage
        ]
    return "\n".join(text) + "\n"


def write(run: Run, folder: Path, machine: dict[str, str], command: str) -> Path:
    name = f"{machine['gpu'].replace(' ', '-')}-{datetime.date.today().isoformat()}"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.md"
    facts = "\n".join(f"- {key}: {value}" for key, value in machine.items())
    path.write_text(f"# {machine['gpu']}\n\n`{command}`\n\n{facts}\n{table(run.rows)}")
    document = {"command": command, "machine": machine, "rows": run.rows}
    path.with_suffix(".json").write_text(json.dumps(document, indent=1))
    return path


class Results:
    """Rows as they come: shown, and written to the folder, if there is one, each time."""

    def __init__(self, run: Run, folder: Path | None, machine: dict[str, str]) -> None:
        self.run, self.folder, self.machine = run, folder, machine
        self.started = time.perf_counter()

    def add(self, row: dict[str, Any]) -> None:
        """Take a row, with how many times as long as with f16 it took."""
        if "us" in row and row["stage"] in ("decode", "prompts"):
            for other in self.run.rows:
                keys = ("stage", "context", "depth")
                if other.get("pair") == "f16" and all(other.get(k) == row.get(k) for k in keys):
                    row["to_f16"] = row["us"] / other["us"] if "us" in other else ""
        self.run.rows.append(row)
        shown = "  ".join(f"{key} {number(row[key])}" for key in row if key != "stage")
        print(f"{time.perf_counter() - self.started:6.0f} s  {row['stage']:8}{shown}", flush=True)
        if self.folder is not None:
            self.path = write(self.run, self.folder, self.machine, " ".join(sys.argv))

    def stage(self, name: str) -> None:
        """Run a stage until it ends or its share does, in as many processes as it takes."""
        run = self.run
        if time.perf_counter() >= run.end:
            self.add({"stage": name, "result": out_of_time(run)})
            return
        run.n_done = 0
        while not self._process(name):
            pass
        of_stage = [row for row in run.rows if row["stage"] == name]
        for row in {"decode": slopes, "model": steps}.get(name, lambda rows: ())(of_stage):
            self.add(row)

    def _process(self, name: str) -> bool:
        """One process of a stage; whether it is done. Else another one has to go on."""
        run = self.run
        receiver, sender = FORK.Pipe(duplex=False)
        process = FORK.Process(target=in_process, args=(run, name, sender))
        process.start()
        sender.close()
        under_way = None
        while True:
            left = run.end + LATE_SECONDS - time.perf_counter()
            if not receiver.poll(max(0.0, left)):
                end_group(process.pid)
                process.join()
                row = under_way or {"stage": name}
                self.add(
                    {**row, "result": f"stopped: its share of {run.minutes:g} minutes is over"}
                )
                return True
            try:
                kind, *message = receiver.recv()
            except EOFError:
                break
            if kind == "row":
                self.add(message[0])
                under_way = None
            elif kind in ("begun", "spoiled"):
                run.n_done, under_way = message
            elif kind == "done":
                process.join()
                return True
        process.join()
        end_group(process.pid)
        if under_way is not None:
            text = f"its process ended with {process.exitcode}"
            self.add({**under_way, "result": text, "failed": 1})
        elif run.n_done == 0:
            text = f"the stage's process ended with {process.exitcode}"
            self.add({"stage": name, "result": text, "failed": 1})
            return True
        return False


def end_group(pid: int | None) -> None:
    """Kill a stage's process and all that it started."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid or 0, signal.SIGKILL)


def in_process(run: Run, name: str, sender: Any) -> None:
    """A stage, in a process of its own that has a group of its own."""
    os.setsid()
    run.send, run.n_begun = sender.send, 0
    try:
        run_stage(run, name)
    except OutOfTimeError as late:
        sender.send(("row", {"stage": name, "result": str(late)}))
    except Exception as error:
        traceback.print_exc()
        sender.send(("row", {"stage": name, "result": failure(error), "failed": 1}))
    sender.send(("done",))


def machine_of(device: str) -> dict[str, str]:
    """What there is, as a process of its own finds it.

    Raises:
        SystemExit: there is no GPU.
    """
    import torch
    import triton

    def look(sender: Any) -> None:
        found = torch.cuda.is_available()
        sender.send(torch.cuda.get_device_name() if found else "")

    gpu = "dry run"
    if device == "cuda":
        receiver, sender = FORK.Pipe(duplex=False)
        process = FORK.Process(target=look, args=(sender,))
        process.start()
        gpu = receiver.recv() if receiver.poll(60) else ""
        process.kill()
        process.join()
    if not gpu:
        raise SystemExit("no GPU that torch can use; --dry-run walks through without one")
    versions = {"torch": torch.__version__, "triton": triton.__version__}
    return {"gpu": gpu, **versions, "python": platform.python_version()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stages", nargs="+", choices=SHARES, default=list(SHARES))
    parser.add_argument("--dry-run", action="store_true", help="without a GPU, tiny sizes")
    parser.add_argument("--minutes", type=float, default=12.0)
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="default: benchmarks/results")
    parser.add_argument("--llama-bench", metavar="PROGRAM", help="llama.cpp's, built for CUDA")
    parser.add_argument("--gguf", metavar="FILE", help="a model of 8B in Q4_0, for llama-bench")
    options = parser.parse_args()
    if options.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    # neither the package nor its tests need be installed
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    device = "cpu" if options.dry_run else "cuda"
    machine = machine_of(device)
    run = Run(device, TINY if options.dry_run else Sizes(), options.minutes)
    if options.dry_run:
        from support.interpreted import replace_language_once

        replace_language_once()
        add_shape(TINY.model, "llama-tiny", **TINY_SHAPE)
    if options.llama_bench and options.gguf:
        run.peer = options.llama_bench, options.gguf
    folder = options.out or (None if options.dry_run else Path(__file__).parent / "results")
    results = Results(run, folder, machine)
    total = sum(SHARES[name] for name in options.stages)
    run.end = results.started
    for name in options.stages:
        run.end += 60 * options.minutes * SHARES[name] / total
        results.stage(name)
    print(table(run.rows) if folder is None else f"\nwritten: {results.path}")
    if any(row.get("status") or row.get("failed") for row in run.rows):
        raise SystemExit("something failed: see the rows that say so")


if __name__ == "__main__":
    main()
