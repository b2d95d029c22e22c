"""`localkv bench`: what it runs, what it counts and what it prints."""

from __future__ import annotations

import csv
import io
import json
import os
import signal
import sqlite3
import subprocess
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from localkv.arch.spec import MoeSpec
from localkv.bench import result
from localkv.bench.grid import BenchTest, Grid
from localkv.bench.run import Options, bytes_per_token, run, weight_bytes
from localkv.bench.source import file_source, load, synthetic_source
from localkv.cache.layout import GroupLayout, SegmentSpec
from localkv.commands.bench import plot as bench_plot
from localkv.commands.bench.plot import fit, series
from localkv.engine.batch_engine import BatchEngine
from localkv.engine.cache_slot import CacheSlot
from localkv.engine.engine import Engine
from localkv.engine.generation import GenerationOptions
from localkv.errors import UsageError
from localkv.kernels import select
from localkv.kernels.cpu.cpu_backend import cpu_backend
from localkv.loader.gguf_file import open_gguf
from localkv.quant_formats import KV_FORMATS
from localkv.system.machine_memory import Budget
from localkv.system.threads import Threads, n_threads
from support.program import localkv_process, on_terminal

# as its own source lists them, in this order
LLAMA_BENCH_KEYS = [
    *("build_commit", "build_number", "cpu_info", "gpu_info", "backends", "model_filename"),
    *("model_type", "model_size", "model_n_params", "n_batch", "n_ubatch", "n_threads"),
    *("cpu_mask", "cpu_strict", "poll", "type_k", "type_v", "n_gpu_layers", "n_cpu_moe"),
    *("split_mode", "main_gpu", "no_kv_offload", "flash_attn", "devices", "tensor_split"),
    *("tensor_buft_overrides", "load_mode", "embeddings", "no_op_offload", "no_host"),
    *("fit_target", "fit_min_ctx", "n_prompt", "n_gen", "n_depth", "test_time"),
    *("avg_ns", "stddev_ns", "avg_ts", "stddev_ts"),
]
OWN_KEYS = [
    *("n_threads_batch", "n_ctx", "kv_bytes", "peak_bytes", "bytes_per_token", "bandwidth"),
    "roofline",
    *("attention_kernel", "linear_kernel"),
]
SMALL = ("-p", 8, "-n", 4, "-r", 2)
PROMPT = ("-p", 8, "-n", 0, "-r", 1)
GENERATION = ("-p", 0, "-n", 4, "-r", 1)


@pytest.fixture(autouse=True)
def small_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bandwidth is measured, but of something small."""
    monkeypatch.setattr(result, "CPU_BUFFER", 1 << 20)


@pytest.fixture
def bench(program, tiny_model: Path) -> Any:
    """Flags -> what `localkv bench` on the tiny model prints; it must succeed."""

    def call(*flags: object) -> str:
        result = program("bench", "-m", tiny_model, *flags)
        assert result.code == 0, result.err
        return result.out

    return call


# -- what is printed


def test_json_has_llama_benchs_keys_and_ours(bench, tiny_model) -> None:
    rows = json.loads(bench(*SMALL, "-ctk", "q8_0", "-d", "0,300", "-t", 1, "-o", "json"))
    assert [(row["n_prompt"], row["n_gen"], row["n_depth"]) for row in rows] == [
        (8, 0, 0),
        (0, 4, 0),
        (8, 0, 300),
        (0, 4, 300),
    ]
    gguf = open_gguf(tiny_model)
    for row in rows:
        assert list(row) == [*LLAMA_BENCH_KEYS, "samples_ns", "samples_ts", *OWN_KEYS]
        assert (row["type_k"], row["type_v"], row["n_threads"]) == ("q8_0", "f16", 1)
        assert row["model_filename"] == str(tiny_model)
        assert row["model_size"] == sum(tensor.n_bytes for tensor in gguf.tensors.values())
        assert len(row["samples_ns"]) == len(row["samples_ts"]) == 2
        n_tokens = row["n_prompt"] + row["n_gen"]
        speeds = [n_tokens / (ns / 1e9) for ns in row["samples_ns"]]
        assert row["samples_ts"] == pytest.approx(speeds)
        assert row["avg_ts"] == pytest.approx(sum(speeds) / 2)
        assert row["stddev_ts"] == pytest.approx(abs(speeds[0] - speeds[1]) / 2**0.5)
        share = row["bytes_per_token"] * row["avg_ts"] / row["bandwidth"]
        assert row["roofline"] == pytest.approx(share)
        # two layers with one head of 64, in whole pages of 256 tokens
        pages = -(-row["n_ctx"] // 256)
        row_bytes = KV_FORMATS["q8_0"].row_bytes(64) + KV_FORMATS["f16"].row_bytes(64)
        assert row["kv_bytes"] == pages * 256 * 2 * row_bytes
        assert row["n_ctx"] >= row["n_depth"] + n_tokens
        assert row["peak_bytes"] > row["kv_bytes"] + row["model_size"]


def test_jsonl_is_an_object_per_line(bench) -> None:
    lines = bench(*SMALL, "-pg", "8,4", "-o", "jsonl").splitlines()
    assert [json.loads(line)["n_gen"] for line in lines] == [0, 4, 4]
    assert list(json.loads(lines[0]))[: len(LLAMA_BENCH_KEYS)] == LLAMA_BENCH_KEYS


def test_csv_has_a_header_and_a_row_per_test(bench) -> None:
    header, *rows = csv.reader(io.StringIO(bench(*SMALL, "-o", "csv")))
    assert header == [*LLAMA_BENCH_KEYS, *OWN_KEYS]
    found = [dict(zip(header, row, strict=True)) for row in rows]
    assert [(row["n_prompt"], row["n_gen"]) for row in found] == [("8", "0"), ("0", "4")]
    assert {row["cpu_strict"] for row in found} == {"0"}
    assert all(float(row["avg_ts"]) > 0 for row in found)


def test_sql_makes_and_fills_a_table(bench) -> None:
    with closing(sqlite3.connect(":memory:")) as database:
        database.executescript(bench(*SMALL, "-o", "sql"))
        database.executescript(bench(*PROMPT, "-o", "sql"))  # a second run adds to the first
        columns = [row[1] for row in database.execute("PRAGMA table_info(llama_bench)")]
        query = "SELECT n_prompt, n_gen, typeof(avg_ts), typeof(n_depth), typeof(cpu_info), no_host"
        rows = database.execute(f"{query} FROM llama_bench").fetchall()
    assert columns == [*LLAMA_BENCH_KEYS, *OWN_KEYS]
    kinds = ("real", "integer", "text", 0)
    assert rows == [(8, 0, *kinds), (0, 4, *kinds), (8, 0, *kinds)]


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def test_markdown_has_llama_benchs_columns_and_ours(bench) -> None:
    header, rule, *lines = bench(*SMALL, "-d", 10, "-t", 1).splitlines()
    own = ["KV MiB", "peak MiB", "MB/token", "roofline"]
    names = ["model", "size", "params", "backend", "threads", "test", "t/s"]
    assert cells(header) == [*names, *own]
    assert len({len(line) for line in (header, rule, *lines[:2])}) == 1
    assert cells(rule)[0].startswith("---")
    assert [cells(line)[5] for line in lines[:2]] == ["pp8 @ d10", "tg4 @ d10"]
    assert cells(lines[0])[3:5] == ["CPU", "1"]
    assert " ± " in cells(lines[0])[6]
    notes = "\n".join(lines[2:])
    assert "attention: packed K and V" in notes
    assert "GB/s (a read by 1 thread)" in notes


def test_markdown_shows_what_is_not_the_default(bench) -> None:
    out = bench(*PROMPT, "--pairs", "f16/f16,q5_1/q8_0", "-ub", "4,8", "-b", 8)
    header, _, *lines = out.splitlines()
    shown = ["n_batch", "n_ubatch", "type_k", "type_v"]
    assert cells(header)[5:9] == shown
    assert [cells(line)[5:9] for line in lines[:4]] == [
        ["8", "4", "f16", "f16"],
        ["8", "4", "q5_1", "q8_0"],
        ["8", "8", "f16", "f16"],
        ["8", "8", "q5_1", "q8_0"],
    ]


def test_a_second_table_goes_to_stderr(program, tiny_model) -> None:
    result = program("bench", "-m", tiny_model, *SMALL, "-o", "csv", "-oe", "jsonl")
    assert result.out.startswith("build_commit,")
    assert [json.loads(line)["n_prompt"] for line in result.err_lines] == [8, 0]


def test_several_models_and_shapes(program, tiny_model) -> None:
    result = program("bench", "-m", f"{tiny_model},{tiny_model}", "-m", tiny_model, *GENERATION)
    assert result.out.count(" tg4 |") == 3
    shapes = ("--synthetic", "llama-tiny:q4_0,moe-tiny:Q8_0")
    result = program("bench", *shapes, *PROMPT, "-o", "jsonl")
    rows = [json.loads(line) for line in result.out.splitlines()]
    assert [row["model_filename"] for row in rows] == ["llama-tiny:q4_0", "moe-tiny:q8_0"]
    assert [row["model_type"] for row in rows] == ["llama 5.2M Q4_0", "qwen3moe 5.0M Q8_0"]
    assert [row["load_mode"] for row in rows] == ["none", "none"]


def test_a_shape_of_the_environment_does_not_hide_the_model_asked_for(program, tiny_model) -> None:
    program.setenv(LOCALKV_SYNTHETIC="llama-tiny:q4_0")
    assert "llama-tiny" in program("bench", *SMALL, "-o", "jsonl").out
    result = program("bench", "-m", tiny_model, *SMALL, "-o", "jsonl")
    assert result.code == 0
    assert "llama-tiny" not in result.out


# -- what is run


def test_only_what_a_test_names_is_evaluated(monkeypatch, tiny_model) -> None:
    """The depth once, then prompts in batches; a warm-up, and the first token of generation."""
    batches: list[int] = []
    evaluate = CacheSlot.evaluate

    def counted(self: CacheSlot, ids: list[int], *args: Any, **kind: bool) -> torch.Tensor:
        batches.append(len(ids))
        return evaluate(self, ids, *args, **kind)

    subject = load(file_source(tiny_model), "reference")
    monkeypatch.setattr(CacheSlot, "evaluate", counted)
    grid = Grid(n_ubatch=(8,), n_depth=(20,), n_prompt=(12,), n_gen=(3,))
    results = list(run(subject, grid, Options(repetitions=2)))
    prompt, generation = [8, 4], [1] * 4
    assert batches == [8, 8, 4, *prompt * 3, *[1] * 3, *generation * 2]
    assert [result.n_ctx for result in results] == [32, 32]
    batches.clear()
    list(run(subject, grid, Options(repetitions=1, warm_up=False)))
    assert batches == [8, 8, 4, *prompt, *generation]


def test_a_generation_starts_behind_the_prompt(monkeypatch, tiny_model) -> None:
    lengths: list[int] = []
    generate = BatchEngine.generate

    def watched(self: BatchEngine, ids: list[int], options: GenerationOptions) -> Any:
        lengths.append(len(ids))
        return generate(self, ids, options)

    subject = load(file_source(tiny_model), "reference")
    monkeypatch.setattr(BatchEngine, "generate", watched)
    grid = Grid(n_depth=(0, 5), n_prompt=(0,), n_gen=(2,), n_pg=((3, 2),))
    results = list(run(subject, grid, Options(repetitions=1, warm_up=False)))
    assert lengths == [1, 3, 5, 8]
    assert all(ns > 0 for result in results for ns in result.samples_ns)


def test_threads_are_as_they_were_afterwards(tiny_model) -> None:
    before = n_threads()
    subject = load(file_source(tiny_model), "cpu")
    grid = Grid(n_threads=(1, 2), n_threads_batch=(None, 3), n_prompt=(4,), n_gen=(0,))
    results = list(run(subject, grid, Options(repetitions=1)))
    assert [str(result.threads) for result in results] == ["1", "1/3", "2", "2/3"]
    assert n_threads() == before


# -- what is counted


def test_a_token_reads_every_weight_but_the_embedding(tiny_model) -> None:
    tensors = open_gguf(tiny_model).tensors
    embedding = tensors["token_embd.weight"]
    row = embedding.n_bytes // embedding.shape[0]
    rest = sum(tensor.n_bytes for tensor in tensors.values()) - embedding.n_bytes
    model = load(file_source(tiny_model), "reference").model
    assert weight_bytes(model, 1) == rest + row
    assert weight_bytes(model, 7) == rest + 7 * row


@pytest.mark.parametrize(
    ("test", "n_batch", "batches", "rows"),
    [
        # rows of K and V: those that each batch or token sees, and those that it stores
        (BenchTest(6, 0, 10), 4, [4, 2], (14 + 4) + (16 + 2)),
        (BenchTest(0, 3, 10), 4, [1, 1, 1], (11 + 1) + (12 + 1) + (13 + 1)),
        (BenchTest(0, 2, 0), 4, [1, 1], (2 + 1) + (3 + 1)),
        (BenchTest(5, 1, 0), 8, [5, 1], (5 + 5) + (6 + 1)),
    ],
)
def test_bytes_per_token(tiny_model, test: BenchTest, n_batch: int, batches: list[int], rows: int):
    model = load(file_source(tiny_model), "reference").model
    weights = sum(weight_bytes(model, n) for n in batches)
    spec = SegmentSpec("q4_0", "q8_0")
    layouts = [GroupLayout(group, (spec,)) for group in model.config.groups]
    row_bytes = 2 * (KV_FORMATS["q4_0"].row_bytes(64) + KV_FORMATS["q8_0"].row_bytes(64))
    tables = 2 * 8 * len(batches)  # a page's number in each layer
    expected = (weights + rows * row_bytes + tables) / sum(batches)
    assert bytes_per_token(model, layouts, test, n_batch) == pytest.approx(expected)


def test_a_token_reads_the_experts_it_is_sent_to() -> None:
    model = load(synthetic_source("moe-tiny:q8_0"), "reference").model
    moe = model.config.layers[0].ffn
    assert isinstance(moe, MoeSpec)
    routed = sum(
        getattr(layer.ffn, name).n_bytes
        for layer in model.weights.layers
        for name in ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
    )
    every, one, many = (weight_bytes(model, n) for n in (1000, 1, 3))
    embedding = model.weights.token_embd
    row = embedding.n_bytes / embedding.shape[0]
    share = moe.n_experts_used / moe.n_experts
    assert every - 999 * row - one == pytest.approx((1 - share) * routed, rel=1e-6)
    assert many - 2 * row - one == pytest.approx((1 - share - (1 - share) ** 3) * routed, rel=1e-6)


def test_a_gpu_that_is_left_alone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "nvidia_driver_is_here", lambda: True)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(select, "why_no_gpu", lambda: ("torch is not installed", "pip install"))
    source = synthetic_source("llama-tiny:q8_0")
    line = "the GPU is not used: torch is not installed (pip install)"
    assert load(source).warnings == (line,)
    assert load(source, "cpu").warnings == ()


def test_bandwidth_is_measured() -> None:
    assert 1e6 < result.bandwidth(cpu_backend()) < 1e13


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux forgets peaks")
def test_a_peak_is_that_of_its_test() -> None:
    backend = cpu_backend()
    first = result.PeakMemory(backend)
    taken = np.ones(1 << 25, np.float32)
    assert first.n_bytes() > taken.nbytes
    high = first.n_bytes()
    del taken
    assert result.PeakMemory(backend).n_bytes() < high - (1 << 26)


# -- presets, and what fits


def types_of(result: Any) -> list[tuple[str, str]]:
    rows = [json.loads(line) for line in result.out.splitlines()]
    return [(row["type_k"], row["type_v"]) for row in rows]


def test_a_preset_is_the_types_it_stands_for(program, tiny_model) -> None:
    argv = ("bench", "-m", tiny_model, *PROMPT, "-o", "jsonl", "--preset", "speed")
    result = program(*argv)
    assert types_of(result) == [("q8_0", "q4_0")]
    assert result.err == "preset speed: -ctk q8_0 -ctv q4_0\n"
    result = program(*argv, "-ctk", "f16,q8_0")
    assert types_of(result) == [("f16", "q4_0"), ("q8_0", "q4_0")]
    assert result.err == "preset speed: -ctv q4_0 (given: -ctk f16,q8_0)\n"
    program.setenv(LOCALKV_PRESET="speed")
    result = program(*argv[:-2], "--pairs", "bf16/f32")
    assert (types_of(result), result.err) == ([("bf16", "f32")], "")


def test_what_does_not_fit_is_refused_before_anything_is_loaded(
    program, tiny_model, monkeypatch
) -> None:
    monkeypatch.setattr("localkv.bench.fit.free_memory", lambda device: Budget(1 << 22, "here"))
    argv = ("bench", *PROMPT, "-d", 100_000)
    for model in (("-m", tiny_model), ("--synthetic", "llama-70b:q4_0")):
        result = program(*argv, *model)
        assert (result.code, result.out) == (1, "")
        assert result.err.startswith("error: K and V of 100008 tokens in f16/f16 take ")
        assert len(result.err_lines) == 2
        assert " -c " not in result.err, "bench has no such option"
    result = program("bench", *PROMPT, "-m", tiny_model, "-d", 16, "--fit", "off")
    assert result.code == 0


def test_weights_made_in_memory_must_fit_in_it(program, monkeypatch) -> None:
    """No file backs them, so that the system could drop any."""

    def load(*args: Any) -> None:
        raise AssertionError("weights were made")

    monkeypatch.setattr("localkv.bench.fit.free_memory", lambda device: Budget(100 << 30, "here"))
    monkeypatch.setattr("localkv.bench.source.load", load)
    result = program("bench", *PROMPT, "--synthetic", "llama-70b:f32")
    assert (result.code, result.out) == (1, "")
    assert "no context does: a smaller file of the model is needed" in result.err


# -- a run that ends early


@pytest.mark.slow
def test_ctrl_c_keeps_the_rows_that_are_done(tiny_model) -> None:
    argv = ("bench", "-m", tiny_model, "-p", 8, "-n", 10_000, "-o", "json", "--device", "reference")
    popen = {"stdin": subprocess.DEVNULL, "bufsize": 0}
    with localkv_process(*argv, "--no-warmup", **popen) as process:
        lines = []
        while not lines or "linear_kernel" not in lines[-1]:
            lines.append(process.stdout.readline().decode())
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    (row,) = json.loads("".join(lines) + out.decode())
    assert row["n_prompt"] == 8
    assert err == b"note: interrupted after 1 of 2 tests\n"


def test_ctrl_c_before_the_first_row(program, tiny_model, monkeypatch) -> None:
    def interrupted(*args: object) -> float:
        raise KeyboardInterrupt

    monkeypatch.setattr(Engine, "evaluate", interrupted)
    result = program("bench", "-m", tiny_model, *SMALL, "--device", "reference", "-o", "json")
    assert result.code == 130
    assert json.loads(result.out) == []


def test_an_error_leaves_a_whole_table(program, tiny_model, monkeypatch) -> None:
    generate = BatchEngine.generate

    def failing(self: BatchEngine, *args: Any, **options: Any) -> Any:
        raise UsageError("it went wrong")

    monkeypatch.setattr(BatchEngine, "generate", failing)
    result = program("bench", "-m", tiny_model, *SMALL, "-o", "json")
    assert (result.code, result.err) == (2, "error: it went wrong\n")
    assert [row["n_prompt"] for row in json.loads(result.out)] == [8]
    assert generate is not failing


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="terminals of POSIX")
def test_progress_shows_on_a_terminal(tiny_model) -> None:
    code, shown = on_terminal("bench", "-m", tiny_model, *SMALL, "--device", "reference")
    assert code == 0
    assert b"test 2 of 2: f16/f16 tg4, 1 of 2" in shown
    assert b"\x1b[K| model " in shown  # the line makes room for the table
    assert shown.endswith(b"\r\x1b[K")


# -- the picture


def test_plot_is_written(bench, tmp_path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "speed.png"
    bench(*GENERATION, "-d", "0,100", "--pairs", "f16/f16,q4_0/q8_0", "--plot", path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_lines_of_the_picture_are_what_varies(tiny_model) -> None:
    subject = load(file_source(tiny_model), "reference")
    grid = Grid(pairs=(("f16", "f16"), ("q8_0", "q4_0")), n_depth=(8, 0), n_gen=(2,))
    results = list(run(subject, grid, Options(repetitions=1)))
    lines = series(results)
    assert [line.label for line in lines] == ["f16/f16", "q8_0/q4_0"]
    assert all(line.depths == (2.5, 9.5) for line in lines)
    first = next(r for r in results if r.test.name == "tg2 @ d8")
    assert lines[0].mean_ms[1] == pytest.approx(first.samples_ns[0] / 1e6 / 2)
    results += [replace(result, threads=Threads(9, 9)) for result in results]
    labels = [line.label for line in series(results)]
    threads = [results[0].threads.in_words(), "9 threads"]
    assert labels == [f"{pair}, {n}" for n in threads for pair in ("f16/f16", "q8_0/q4_0")]


def test_a_line_is_fitted() -> None:
    found = fit([0, 1000, 3000], [(5, 5.1), (7, 6.9), (11, 11)])
    assert found is not None
    assert (found.intercept, found.slope) == pytest.approx((5.0, 0.002), rel=0.05)
    assert found.holds
    assert fit([4.0], [(1.0,)]) is None


@pytest.mark.parametrize(
    "ms",
    [
        [(24.6, 24.7), (27.6, 27.7), (26.2, 26.3)],  # up and down again
        [(20, 30), (21, 31), (22, 32)],  # repetitions differ by more than depths
        [(10, 10), (20, 20), (40, 40), (80, 80)],  # no straight line, though it explains much
    ],
)
def test_no_line_is_drawn_that_contradicts_its_points(ms: list[tuple[float, ...]]) -> None:
    found = fit([1000.0 * i for i in range(len(ms))], ms)
    assert found is not None
    assert not found.holds


def test_a_picture_without_a_line_says_so(bench, tmp_path, monkeypatch) -> None:
    pytest.importorskip("matplotlib")
    noted: list[str] = []
    monkeypatch.setattr(bench_plot, "note", noted.append)
    misfit = bench_plot.Fit(1.0, 1.0, 0.125, holds=False)
    monkeypatch.setattr(bench_plot, "fit", lambda depths, ms: misfit)
    bench(*GENERATION, "-d", "0,100", "--plot", tmp_path / "speed.svg")
    assert noted == ["f16/f16: no straight line describes its times (R2 0.12)"]
    noted.clear()
    bench(*GENERATION, "--plot", tmp_path / "rows.svg")
    assert noted == ["no slope is fitted through one depth; add some, as in -d 0-8192+2048"]


def test_an_axis_begins_where_the_values_do() -> None:
    assert bench_plot.limits([10, 40]) == pytest.approx((0, 42.4))
    low, high = bench_plot.limits([24, 32])
    assert 22 < low < 24
    assert 32 < high < 34


# -- errors


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("-p x", "error: -p/--n-prompt: 'x' is neither a number nor a range; as in 512, "),
        ("-d 8-1", "error: -d/--n-depth: '8-1' is an empty range"),
        ("-n 0-9*2", "error: -n/--n-gen: '0-9*2' is a range without end"),
        ("-b 0", "error: -b/--batch-size: 0 is less than 1"),
        ("-t 4000", "error: -t/--threads: 4000 is more than 512"),
        ("-pg 512", "error: -pg/--n-prompt-gen: '512' is not a prompt and a generation"),
        ("-ctk iq4", "error: -ctk/--cache-type-k: unknown cache type 'iq4'; did you mean iq4_nl?"),
        ("-p 0 -n 0", "error: -p 0 and -n 0 leave nothing to measure\nhint: as in -p 512 -n 128"),
        ("--pairs f16", "error: --pairs: 'f16' is not a pair of cache types\nhint: as in --pairs "),
        ("--pairs pure -ctk f16", "error: --pairs names the cache types\nhint: leave out -ctk, "),
        ("--pairs pure --preset speed", "error: --pairs names the cache types\nhint: leave out "),
        ("-r 0", "error: -r/--repetitions: 0 is less than 1"),
        ("-o xml", "error: -o/--output: 'xml' is not one of "),
        ("--plot x.png -n 0", "error: --plot draws generation over depth\nhint: add -n 128"),
        ("--plot x.bmp", "error: --plot x.bmp: not a kind of picture"),
        ("-ctk fp8_e4m3_head", "error: "),
        ("--synthetic llama-1b:q4_0", "error: --synthetic takes the place of a file\nhint: "),
    ],
)
def test_what_can_not_work_is_one_line(program, tiny_model, flags: str, message: str) -> None:
    result = program("bench", "-m", tiny_model, *flags.split())
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith(message)
    assert len(result.err_lines) <= 2


def test_models_that_are_not_there(program, tmp_path) -> None:
    result = program("bench", "-p", 8)
    assert result.code == 2
    assert result.err.startswith("error: -m/--model is missing")
    result = program("bench", "-m", tmp_path / "no.gguf")
    assert result.code == 1
    assert "no such file" in result.err
    for name, hint in (
        ("llama-1b", "hint: as in --synthetic llama-1b:q4_0"),
        ("x:q4_0", "hint: localkv plan --help-all lists the shapes"),
        ("llama3", "did you mean llama"),
    ):
        result = program("bench", "--synthetic", name)
        assert result.code == 2
        assert hint in result.err


def test_a_type_that_does_not_fit_the_heads(program, tiny_model, monkeypatch) -> None:
    from localkv.loader.known_models import KNOWN_MODELS

    keys = {"block_count": 1, "embedding_length": 80 * 8, "feed_forward_length": 64}
    odd = replace(KNOWN_MODELS["llama-tiny"], name="odd", n_vocab=32)
    odd = replace(odd, keys={**odd.keys, **keys, "attention.head_count": 8})
    monkeypatch.setitem(KNOWN_MODELS, "odd", odd)
    pure = ("--pairs", "pure", "-o", "csv", "--device", "reference")
    result = program("bench", "--synthetic", "odd:f16", *SMALL, "-ctk", "q8_0")
    assert result.code == 2
    assert "does not divide head_dim 80" in result.err
    result = program("bench", "--synthetic", "odd:f16", *PROMPT, *pure)
    assert result.code == 0
    kinds = {row["type_k"] for row in csv.DictReader(io.StringIO(result.out))}
    assert kinds == {
        name for name, fmt in KV_FORMATS.items() if not (80 % fmt.block_size or fmt.scales_by_head)
    }
