"""`localkv bench --parallel`: many sequences at the same time."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest

from localkv.bench.grid import Grid
from localkv.bench.parallel import ParallelTest, parallel_tests, run_parallel
from localkv.bench.run import Options
from localkv.bench.source import file_source, load
from localkv.config import CacheConfig
from localkv.engine.batch_engine import BatchEngine
from localkv.engine.engine import Engine
from localkv.engine.generation import GenerationOptions
from localkv.sampling.params import SamplingParams
from localkv.sampling.sampler import Sampler

# as llama-batched-bench prints them, in this order
PEER_KEYS = [
    *("n_kv_max", "n_batch", "n_ubatch", "flash_attn", "is_pp_shared", "n_gpu_layers"),
    *("n_threads", "n_threads_batch", "pp", "tg", "pl", "n_kv", "t_pp", "speed_pp", "t_tg"),
    *("speed_tg", "t", "speed"),
]


@pytest.fixture
def bench(program: Any, tiny_model: Path) -> Any:
    """Flags -> what `localkv bench` on the tiny model prints; it must succeed."""

    def call(*flags: object) -> str:
        result = program("bench", "-m", tiny_model, "-r", 1, *flags)
        assert result.code == 0, result.err
        return str(result.out)

    return call


def test_every_prompt_generation_and_number_with_every_pair(bench: Any) -> None:
    lines = bench(
        *("-p", "8,16", "-n", "4", "--parallel", "1,3", "-ctk", "f16,q8_0", "-o", "jsonl")
    ).splitlines()
    rows = [json.loads(line) for line in lines]
    assert list(rows[0])[: len(PEER_KEYS)] == PEER_KEYS
    assert [(row["type_k"], row["pp"], row["pl"], row["n_kv"]) for row in rows] == [
        (name, n_prompt, n, n * (n_prompt + 4))
        for name in ("f16", "q8_0")
        for n_prompt in (8, 16)
        for n in (1, 3)
    ]
    for row in rows:
        assert row["speed_tg"] == pytest.approx(row["pl"] * row["tg"] / row["t_tg"])
        assert row["t"] == pytest.approx(row["t_pp"] + row["t_tg"])


@pytest.mark.parametrize("form", ["md", "json", "csv"])
def test_formats_say_the_same(bench: Any, form: str) -> None:
    text = bench(*("-p", "8", "-n", "3", "-npl", "2", "-pps", "-o", form))
    if form == "json":
        (row,) = json.loads(text)
    elif form == "csv":
        (row,) = csv.DictReader(io.StringIO(text))
    else:
        titles, _, cells = (line.strip("| ").split("|") for line in text.splitlines()[:3])
        named = {a.strip(): b.strip() for a, b in zip(titles, cells, strict=True)}
        row = {"pp": named["PP"], "tg": named["TG"], "pl": named["B"], "n_kv": named["N_KV"]}
        assert "products: " in text
    assert [int(row[key]) for key in ("pp", "tg", "pl", "n_kv")] == [8, 3, 2, 8 + 2 * 3]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("-d", "8"), "-d does not go with --parallel"),
        (("-pg", "8,8"), "-pg does not go with --parallel"),
        (("-p", "0"), "each sequence has a prompt"),
        (("-o", "sql"), "format sql does not go with --parallel"),
        (("--plot", "x.png"), "--plot does not go with --parallel"),
    ],
)
def test_what_makes_no_sense_beside_it(
    program: Any, tiny_model: Path, arguments: tuple[str, ...], message: str
) -> None:
    ran = program("bench", "-m", tiny_model, "--parallel", "2", *arguments)
    assert (ran.code, ran.out) == (2, "")
    assert message in ran.err


def test_a_shared_prompt_needs_sequences(program: Any, tiny_model: Path) -> None:
    ran = program("bench", "-m", tiny_model, "-pps")
    assert ran.code == 2
    assert "-pps is about --parallel" in ran.err


@pytest.mark.parametrize("is_shared", [False, True])
def test_caches_have_room_for_all(tiny_model: Path, is_shared: bool) -> None:
    """No sequence waits for pages, and what is told of the cache is what it takes."""
    subject = load(file_source(tiny_model), "cpu", "on")
    grid = Grid(n_prompt=(250,), n_gen=(8,), pairs=(("q8_0", "q4_0"),))
    tests = parallel_tests(grid, [4], is_shared=is_shared)
    assert tests == [ParallelTest(250, 8, 4, is_shared)]
    (result,) = run_parallel(subject, grid, tests, Options(repetitions=1, warm_up=False))
    cache = tests[0].cache(CacheConfig("q8_0", "q4_0"))
    engine = Engine(subject.model, cache)
    assert result.kv_bytes == engine.cache.n_bytes("k") + engine.cache.n_bytes("v")
    batch, n_vocab = BatchEngine(engine), subject.model.config.n_vocab
    greedy = SamplingParams(temperature=0.0)
    for _ in range(2):
        generations = [
            batch.generate(
                [i] * 250, GenerationOptions(sampler=Sampler(greedy, n_vocab=n_vocab), max_tokens=9)
            )
            for i in range(4)
        ]
        assert [len(list(one)) for one in generations] == [9] * 4
    assert batch.stats.n_preempted == 0
