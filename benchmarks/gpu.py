"""The GPU backend, stage by stage: right, and how fast.

    python benchmarks/gpu.py [--stages tests copy decode linear prefill model] [--out FOLDER]
    python benchmarks/gpu.py --llama-bench PROGRAM --gguf FILE
    python benchmarks/gpu.py --dry-run

Needs torch, Triton, NumPy and this package; pytest for the first stage, and pytest-xdist for it to
be fast. With all stages it takes some minutes on one GPU; what would start after `--minutes` is
left out, and said to be, and what was measured until then is kept.
`--dry-run` walks through the stages without a GPU, in Triton's interpreter and tiny sizes; its
times mean nothing, and it writes only where `--out` says.

    compile  the kernels of the next stages, in as many processes as there are cores
    tests    the tests marked `gpu`
    text     what the small model in models/ writes, beside what it writes on the CPU
    copy     bandwidth of a copy in memory, which the other stages are compared with
    decode   attention of one new token, by pair of cache types and context
    linear   products with packed weights, one token and many
    prefill  attention of a chunk, by pair, beside torch's with K and V in f16
    model    random weights in the shape of Llama 3 8B: prompts and decoding, by pair and depth
    peer     the same tests by llama.cpp's llama-bench, if there is one, with a model of that shape

Times are medians of CUDA events around replayed graphs. Layers and matrices are gone through in
turn, more of them than the GPU's cache can hold. Writes `<GPU>-<date>.json` and `.md`.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAIRS = ("f16", "q8_0", "q4_0", "q4_0/q8_0", "q8_0/q4_0", "fp8_e4m3", "q5_1")
WEIGHTS = (
    "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl", "q4_K", "q5_K", "q6_K",
)  # fmt: skip
STAGES = ("compile", "tests", "text", "copy", "decode", "linear", "prefill", "model", "peer")
COMPILED = ("decode", "linear", "prefill")
"""Stages whose kernels can be compiled ahead of them, each in one of several processes."""
PEER_PAIRS = ("f16", "q8_0", "q4_0")
"""llama.cpp's default build has GPU kernels for pairs of one type only."""


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


def add_tiny_shape() -> None:
    """Make `TINY.model` a shape that models can have."""
    from localkv.loader.known_models import KNOWN_MODELS

    tiny = KNOWN_MODELS["llama-tiny"]
    sizes = {
        "block_count": 1,
        "embedding_length": 256,
        "feed_forward_length": 256,
        "attention.head_count": 8,
        "attention.head_count_kv": 4,
        "context_length": 4096,
    }
    KNOWN_MODELS[TINY.model] = replace(
        tiny, name=TINY.model, n_vocab=64, keys={**tiny.keys, **sizes}
    )


class OutOfTimeError(Exception):
    """What is under way is left."""


@dataclass
class Run:
    """A measurement under way.

    Attributes:
        device: "cuda", or "cpu" for a dry run.
        limit: seconds from `started` on after which nothing more is begun.
        bandwidth: bytes per second of a copy, read and written, once it is measured.
        rows: results: the stage, and whatever it measured.
        peer: llama-bench and a model for it, or None.
        part: (i, n): only measurements i, i + n, i + 2n... are made, once, so that their kernels
            are compiled.
    """

    device: str
    sizes: Sizes
    started: float
    limit: float
    bandwidth: float = 0.0
    rows: list[dict[str, Any]] = field(default_factory=list)
    peer: tuple[str, str] | None = None
    part: tuple[int, int] | None = None
    n_measured: int = 0

    def is_others(self) -> bool:
        """Whether the next measurement is another process's part."""
        self.n_measured += 1
        return self.part is not None and self.n_measured % self.part[1] != self.part[0]

    def add(self, stage: str, **values: Any) -> None:
        self.rows.append({"stage": stage, **values})
        shown = "  ".join(f"{key} {number(value)}" for key, value in values.items())
        print(f"{time.perf_counter() - self.started:6.0f} s  {stage:8}{shown}", flush=True)

    def seconds_left(self) -> float:
        """Until the limit.

        Raises:
            OutOfTimeError: there are none.
        """
        left = self.started + self.limit - time.perf_counter()
        if left <= 0:
            raise OutOfTimeError(f"left out: {self.limit / 60:g} minutes are over")
        return left

    def share(self, n_bytes: float, seconds: float) -> float:
        """Percent of the bandwidth of a copy, or 0 if it was not measured."""
        return 100 * n_bytes / seconds / self.bandwidth if self.bandwidth else 0.0


def number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def seconds_of(run: Run, calls: list[Callable[[], object]]) -> float:
    """Median seconds of a call; all of them are made in turn, as one recorded graph."""
    import torch

    run.seconds_left()
    if run.is_others():
        return 1.0
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
) -> subprocess.CompletedProcess[str]:
    """Another program, once it has ended; by default where this one runs, with its environment.

    Raises:
        OutOfTimeError: it did not in the time that is left.
    """
    try:
        return subprocess.run(
            command,
            cwd=folder,
            env=env,
            capture_output=True,
            text=True,
            check=False,
            timeout=run.seconds_left(),
        )
    except subprocess.TimeoutExpired as late:
        raise OutOfTimeError(f"stopped: {run.limit / 60:g} minutes are over") from late


def stage_compile(run: Run) -> None:
    """Fill Triton's cache of compiled kernels: several processes make a part of the calls each."""
    n_parts = min(16, os.cpu_count() or 1)
    command = [sys.executable, __file__, "--stages", *COMPILED, "--of", str(n_parts), "--part"]
    if run.device == "cpu":
        command.insert(2, "--dry-run")

    def compile_part(i: int) -> str:
        done = finished(run, [*command, str(i)], ROOT)
        return done.stderr.strip()[-2000:] if done.returncode else ""

    started = time.perf_counter()
    with ThreadPoolExecutor(n_parts) as pool:
        failures = [text for text in pool.map(compile_part, range(n_parts)) if text]
    for text in failures:
        print(text)
    seconds = time.perf_counter() - started
    run.add("compile", processes=n_parts, failed=len(failures), seconds=seconds)


def stage_tests(run: Run) -> None:
    """The tests marked `gpu`, in a process of their own."""
    if importlib.util.find_spec("pytest") is None:
        run.add("tests", result="not run: there is no pytest")
        return
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider"]
    # an image's pytest may be too old for the project's settings, and its packages may warn
    command += ["-c", os.devnull, "--rootdir", str(ROOT), "-W", "ignore"]
    command += ["-o", f"pythonpath={ROOT / 'tests'}", "--import-mode", "importlib"]
    command.append("--noconftest")  # it needs more than a bare image has
    if importlib.util.find_spec("xdist") is not None:
        command += ["-n", str(min(16, os.cpu_count() or 1))]  # compiling takes most of the time
    # in the interpreter they would take minutes; without a GPU they are skipped
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    # pytest's `pythonpath` does not reach the processes of xdist
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    done = finished(run, [*command, "tests/kernels/gpu/test_gpu.py"], ROOT, env)
    lines = done.stdout.strip().splitlines() or done.stderr.strip().splitlines() or ["nothing"]
    for line in lines[-40:] if done.returncode else lines[-1:]:
        print("   ", line)
    run.add("tests", result=lines[-1], status=done.returncode)


def stage_text(run: Run) -> None:
    """A real model from its file to its logits, of a text that it wrote itself on the CPU."""
    model = ROOT / "models" / "tales-4M-Q8_0.gguf"
    try:
        from localkv import LLM

        for pair in run.sizes.pairs:
            run.seconds_left()
            types = dict(zip(("cache_type_k", "cache_type_v"), sides(pair), strict=True))
            cpu, gpu = (LLM(model, device=name, n_ctx=512, **types) for name in ("cpu", run.device))
            text = cpu.complete("Once upon a time", max_tokens=200, temperature=0.0).text
            ids = cpu.tokenize(text)
            want, got = (torch_logits(llm.engine.logits(ids)) for llm in (cpu, gpu))
            p, q = want.log_softmax(-1), got.log_softmax(-1)
            run.add(
                "text",
                pair=pair,
                tokens=len(ids),
                kl_mean=float((p.exp() * (p - q)).sum(-1).mean()),
                same_first=float((p.argmax(-1) == q.argmax(-1)).float().mean()),
                text=repr(gpu.complete("Once upon a time", max_tokens=20, temperature=0.0).text),
            )
    except ImportError as missing:
        run.add("text", result=f"not run: {missing}")


def torch_logits(logits: Any) -> Any:
    """float64, of any backend's arrays."""
    import torch

    return torch.as_tensor(logits).cpu().double()


def stage_copy(run: Run) -> None:
    import torch

    source = torch.empty(run.sizes.copy_bytes, dtype=torch.uint8, device=run.device).random_()
    target = torch.empty_like(source)
    seconds = seconds_of(run, [lambda: target.copy_(source)] * 2)
    run.bandwidth = 2 * run.sizes.copy_bytes / seconds
    run.add("copy", gb_per_s=run.bandwidth / 1e9)


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
    for n_ctx in run.sizes.contexts:
        f16 = 0.0
        for pair in run.sizes.pairs:
            work = attention_calls(run, pair, 1, n_ctx)
            seconds = seconds_of(run, work.calls)
            f16 = f16 or seconds
            run.add(
                "decode",
                context=n_ctx,
                pair=pair,
                us=1e6 * seconds,
                percent_of_copy=run.share(work.n_bytes, seconds),
                to_f16=seconds / f16,
            )
    times = {(r["pair"], r["context"]): r["us"] for r in run.rows if r["stage"] == "decode"}
    contexts, pairs = run.sizes.contexts, run.sizes.pairs
    slopes = {pair: slope(contexts, [times[pair, n] for n in contexts]) for pair in pairs}
    for pair in pairs:
        run.add(
            "slope",
            pair=pair,
            ns_per_token=1000 * slopes[pair],
            to_f16=slopes[pair] / slopes["f16"] if slopes["f16"] else 0.0,
        )


def stage_linear(run: Run) -> None:
    import torch

    from localkv.kernels.gpu.products.products import linears
    from localkv.kernels.gpu.triton_backend import triton_backend
    from localkv.kernels.layer_weights import Linear
    from localkv.loader.synthetic import random_rows
    from localkv.quant_formats import FORMATS
    from localkv.quant_formats.packed_tensor import PackedTensor

    n_out, n_in = run.sizes.matrix
    backend = triton_backend(run.device)
    for name in run.sizes.weights:
        fmt = FORMATS[name]
        rows = torch.from_numpy(random_rows(fmt, n_out, n_in)).to(run.device)
        copies = max(1, min(16, -(-run.sizes.cold_bytes // rows.nbytes)))
        layers = [
            Linear(backend.prepare(PackedTensor(fmt, rows, (n_out, n_in)))) for _ in range(copies)
        ]
        for n_tokens in run.sizes.tokens:
            x = torch.randn(n_tokens, n_in, device=run.device)
            residual = torch.randn(n_tokens, n_out, device=run.device)
            seconds = seconds_of(
                run, [lambda w=w, x=x, r=residual: linears(x, (w,), r) for w in layers]
            )
            run.add(
                "linear",
                weights=name,
                tokens=n_tokens,
                us=1e6 * seconds,
                percent_of_copy=run.share(rows.numel(), seconds),
                tflop_per_s=2e-12 * n_tokens * n_out * n_in / seconds,
            )


def stage_prefill(run: Run) -> None:
    import torch

    s = run.sizes
    for depth in s.depths:
        n_ctx = depth + s.chunk
        n_heads = s.n_kv_heads * s.group
        flop = 4 * s.head_dim * n_heads * s.chunk * (depth + (s.chunk + 1) / 2)
        plain = torch.randn(2, 1, n_heads, n_ctx, s.head_dim, device=run.device).half()
        queries = plain[0, :, :, depth:]
        mask = None
        if depth:
            mask = torch.ones(s.chunk, n_ctx, dtype=torch.bool, device=run.device).tril(depth)
        plain_attention = partial(
            torch.nn.functional.scaled_dot_product_attention,
            queries,
            *plain,
            attn_mask=mask,
            is_causal=mask is None,
        )
        seconds = seconds_of(run, [plain_attention] * 2)
        tflops = 1e-12 * flop / seconds
        run.add("prefill", depth=depth, pair="torch f16", us=1e6 * seconds, tflop_per_s=tflops)
        f16 = 0.0
        for pair in s.pairs:
            seconds = seconds_of(run, attention_calls(run, pair, s.chunk, n_ctx).calls[:2])
            f16 = f16 or seconds
            run.add(
                "prefill",
                depth=depth,
                pair=pair,
                us=1e6 * seconds,
                tflop_per_s=1e-12 * flop / seconds,
                to_f16=seconds / f16,
            )


def stage_model(run: Run) -> None:
    """tg and pp by type of weights and of cache; the depth is filled with random pages."""
    s = run.sizes
    for weights in s.model_weights:
        model_of(
            run, weights, s.model_pairs if weights == s.model_weights[0] else s.model_pairs[:1]
        )


def model_of(run: Run, weights: str, pairs: Sequence[str]) -> None:
    """With one type of weights; when this returns its memory is free."""
    from localkv.kernels.gpu.triton_backend import triton_backend
    from localkv.loader.synthetic import synthetic_model

    run.seconds_left()
    s = run.sizes
    model = synthetic_model(s.model, weights, triton_backend(run.device))
    f16_slope = 0.0
    for pair in pairs:
        itl = model_with(run, model, weights, pair)
        per_token = slope(s.model_depths, itl)
        f16_slope = f16_slope or per_token
        run.add(
            "itl",
            weights=weights,
            pair=pair,
            us_at_0=1e6 * itl[0],
            ns_per_token=1e9 * per_token,
            to_f16=per_token / f16_slope if f16_slope else 0.0,
        )


def model_with(run: Run, model: Any, weights: str, pair: str) -> list[float]:
    """Seconds from one token to the next, by depth, with a cache of that pair."""
    from localkv.config import CacheConfig
    from localkv.engine.batch_engine import BatchEngine
    from localkv.engine.engine import Engine
    from localkv.engine.generation import GenerationOptions
    from localkv.sampling.params import SamplingParams
    from localkv.sampling.sampler import Sampler

    run.seconds_left()
    s = run.sizes
    n_ctx = s.model_depths[-1] + max(*s.prompts, s.n_decode + 2)
    # with rows that nobody generated: reused as if they were a prompt's
    config = CacheConfig(*sides(pair), n_ctx=n_ctx)
    engine = Engine(model, config, n_batch=min(s.n_batch, n_ctx), exact=False)
    fill_randomly(engine.cache)
    if model.backend.compiles:
        engine.warm_up()
    n_times = 3 if run.device == "cuda" else 1

    def decode(ids: list[int]) -> float:
        """Seconds a token, from the second one on, as `localkv bench` counts them."""
        greedy = Sampler(SamplingParams(temperature=0.0), n_vocab=model.config.n_vocab)
        generation = BatchEngine(engine).generate(
            ids, GenerationOptions(sampler=greedy, max_tokens=s.n_decode)
        )
        n_generated = len(list(generation))
        return generation.stats.decode_seconds / (n_generated - 1)

    def read(n_prompt: int) -> float:
        """Seconds of a prompt after the cached tokens."""
        wait(run)
        started = time.perf_counter()
        for start in range(0, n_prompt, engine.n_batch):
            engine.evaluate([5] * min(engine.n_batch, n_prompt - start))
        wait(run)
        return time.perf_counter() - started

    itl = []
    for depth in s.model_depths:
        point = {"weights": weights, "pair": pair, "depth": depth}
        times = []
        for _ in range(n_times):
            place(engine, depth)
            times.append(decode([*engine.cached_ids, 7]))
        itl.append(min(times))
        run.add("model", test=f"tg{s.n_decode}", **point, tokens_per_s=1 / itl[-1])
        for n_prompt in s.prompts:
            run.seconds_left()
            times = []
            for _ in range(n_times):
                place(engine, depth)
                times.append(read(n_prompt))
            run.add("model", test=f"pp{n_prompt}", **point, tokens_per_s=n_prompt / min(times))
    return itl


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
        run.add("peer", result="not run: no --llama-bench and --gguf")
        return
    s, (program, file) = run.sizes, run.peer
    depths = ",".join(map(str, s.model_depths))
    prompts = ",".join(map(str, s.prompts))
    for pair in PEER_PAIRS:
        type_k, type_v = sides(pair)
        tests = ["-p", prompts, "-n", str(s.n_decode), "-d", depths, "-r", "3"]
        types = ["-ngl", "99", "-fa", "1", "-ctk", type_k, "-ctv", type_v]
        done = finished(run, [program, "-m", file, *tests, *types, "-o", "json"])
        if done.returncode:
            run.add("peer", pair=pair, result=(done.stderr.strip() or "failed").splitlines()[-1])
            continue
        for point in json.loads(done.stdout):
            decodes = point["n_gen"] > 0
            run.add(
                "peer",
                test=f"tg{point['n_gen']}" if decodes else f"pp{point['n_prompt']}",
                weights=point["model_type"],
                pair=pair,
                depth=point["n_depth"],
                tokens_per_s=float(point["avg_ts"]),
            )


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES))
    parser.add_argument("--dry-run", action="store_true", help="without a GPU, tiny sizes")
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--part", type=int, metavar="I", help="only compile part I")
    parser.add_argument("--of", type=int, metavar="N", default=1, help="parts that there are")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="default: benchmarks/results")
    parser.add_argument("--llama-bench", metavar="PROGRAM", help="llama.cpp's, built for CUDA")
    parser.add_argument("--gguf", metavar="FILE", help="a model of 8B in Q4_0, for llama-bench")
    options = parser.parse_args()
    if options.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    sys.path.insert(0, str(ROOT))  # the package need not be installed
    import torch
    import triton

    from localkv.errors import LocalKVError

    if not options.dry_run and not torch.cuda.is_available():
        raise SystemExit("no GPU that torch can use; --dry-run walks through without one")
    device = "cpu" if options.dry_run else "cuda"
    machine = {
        "gpu": "dry run" if options.dry_run else torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
    }
    sizes = TINY if options.dry_run else Sizes()
    run = Run(device, sizes, time.perf_counter(), 60 * options.minutes)
    if options.dry_run:
        add_tiny_shape()
    if options.llama_bench and options.gguf:
        run.peer = options.llama_bench, options.gguf
    if options.part is not None:
        run.part = options.part, options.of
    nowhere = options.dry_run or options.part is not None
    folder = options.out or (None if nowhere else Path(__file__).parent / "results")
    for name in options.stages:
        try:
            run.seconds_left()
            globals()[f"stage_{name}"](run)
        except (OutOfTimeError, torch.OutOfMemoryError, LocalKVError) as left:
            run.add(name, result=str(left).splitlines()[0])
            gc.collect()
        finally:
            if folder is not None:
                path = write(run, folder, machine, " ".join(sys.argv))
    print(table(run.rows) if folder is None else f"\nwritten: {path}")
    if any(row.get("status") for row in run.rows):
        raise SystemExit("some tests failed")


if __name__ == "__main__":
    main()
