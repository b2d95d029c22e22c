"""Loops and runs without doubt: found wherever they are, and nowhere else."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localkv.config import CacheConfig
from localkv.engine.stream import (
    LEAST_REPEATS,
    LEAST_TOKENS,
    LONGEST_PERIOD,
    RUN_TOKENS,
    Loop,
    degeneration,
    find_certain_run,
    find_loop,
)
from support.paths import MODELS
from support.program import Program

F16 = MODELS / "tales-4M-F16.gguf"


def plain_loop(ids: list[int]) -> Loop | None:
    """The loop that `find_loop` finds, token by token."""
    best = None
    for period in range(1, LONGEST_PERIOD + 1):
        start = 0
        for at in range(period, len(ids) + 1):
            if at < len(ids) and ids[at] == ids[at - period]:
                continue
            n = at - start
            is_loop = n >= max(LEAST_TOKENS, LEAST_REPEATS * period)
            if is_loop and (best is None or n > best.n_tokens):
                best = Loop(start + 1, period, n)
            start = at - period + 1
    return best


@settings(max_examples=200, deadline=None)
@given(
    before=st.lists(st.integers(0, 3), max_size=20),
    piece=st.lists(st.integers(0, 3), min_size=1, max_size=9),
    repeats=st.integers(1, 20),
    after=st.lists(st.integers(0, 3), max_size=20),
)
def test_the_longest_loop(
    before: list[int], piece: list[int], repeats: int, after: list[int]
) -> None:
    ids = [*before, *piece * repeats, *after]
    found = find_loop(ids)
    assert found == plain_loop(ids)
    if repeats >= LEAST_REPEATS and len(piece) * repeats >= LEAST_TOKENS:
        assert found is not None
        assert found.n_tokens >= len(piece) * repeats
    if found is not None:
        text = ids[found.at - 1 : found.at - 1 + found.n_tokens]
        assert text[found.period :] == text[: -found.period]
        assert found.n_repeats >= LEAST_REPEATS


@given(st.lists(st.integers(0, 1 << 30), unique=True, max_size=200))
def test_no_loop_without_repeats(ids: list[int]) -> None:
    assert find_loop(ids) is None


def test_a_run_without_doubt() -> None:
    entropies = [0.5] * 30 + [0.001] * RUN_TOKENS + [0.5] * 30
    first = find_certain_run(entropies)
    assert first is not None
    assert 20 <= first <= 31  # a few others do no harm
    assert find_certain_run(entropies[: 30 + RUN_TOKENS // 2]) is None
    assert find_certain_run([0.5] * 1000) is None
    assert find_certain_run([]) is None


@pytest.mark.parametrize(
    ("type_k", "remedy"),
    [("q4_0", "-ctk q8_0"), ("kv2_0", "-ctk q8_0"), ("q8_0", "-ctk f16"), ("f16", "--dry-multi")],
)
def test_what_would_help(type_k: str, remedy: str) -> None:
    found = degeneration([1, 2, 3] * 30)
    line = found.line(CacheConfig(type_k))
    assert line.startswith("the same 3 tokens 30 times from token 1 on; ")
    assert remedy in line
    assert degeneration(range(100)).line(CacheConfig(type_k)) == ""
    assert "one" not in degeneration([5] * 40).line(CacheConfig(type_k))
    certain = degeneration(range(RUN_TOKENS), np.zeros(RUN_TOKENS).tolist())
    assert certain.line(CacheConfig(type_k)).startswith("256 tokens without any doubt from token 1")


def test_types_by_layer_have_a_remedy() -> None:
    cache = CacheConfig(layer_types=(("q4_0", "q4_0"), ("q8_0", "q4_0")))
    assert "-ctk q8_0" in degeneration([1] * 50).line(cache)


def test_pages_that_change_their_types_have_a_remedy() -> None:
    cache = CacheConfig(kv_budget=1 << 20, kv_ladder=(("f16", "f16"), ("q4_0", "q4_0")))
    loop = degeneration([1] * 50)
    lines = [loop.line(cache, [3, 0]), loop.line(cache, [2, 4])]
    lines.append(loop.line(replace(cache, kv_ladder=(("q8_0", "q8_0"), ("q4_0", "q4_0"))), [3, 0]))
    assert ["--kv-budget" in line for line in lines] == [False, True, False]
    assert ["--kv-ladder" in line for line in lines] == [False, False, True]
    assert not any("-ctk" in line for line in lines)


def test_stats_of_a_text_that_loops(program: Program) -> None:
    arguments = ("complete", "-m", F16, "-p", "The king said", "--temp", "0", "-n", "600", "-q")
    looping = program(*arguments, "--ignore-eos", "--stats").err_lines
    assert any(line.startswith("degenerate:   the same 7 tokens ") for line in looping)
    whole = program("complete", "-m", F16, "-p", "One day", "-s", "1", "-q", "--stats").err_lines
    assert not any(line.startswith("degenerate") for line in whole)
