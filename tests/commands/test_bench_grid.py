"""Ranges, tests and the grid of `localkv bench`."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localkv.bench.grid import (
    MOST_VALUES,
    BenchTest,
    Grid,
    Setting,
    int_range,
    prompt_and_generation,
)
from localkv.errors import UsageError


@st.composite
def items(draw: st.DrawFn) -> tuple[str, list[int]]:
    """An item of a list and the numbers that it names, by another way of counting."""
    first = draw(st.integers(0, 5000))
    kind = draw(st.sampled_from(["number", "range", "step", "factor"]))
    if kind == "number":
        return str(first), [first]
    last = first + draw(st.integers(0, 200))
    if kind == "range":
        return f"{first}-{last}", list(range(first, last + 1))
    if kind == "step":
        step = draw(st.integers(1, 300))
        return f"{first}-{last}+{step}", list(range(first, last + 1, step))
    first, factor = max(first, 1), draw(st.integers(2, 5))
    last = first * factor ** draw(st.integers(0, 4)) + draw(st.integers(0, 3))
    return f"{first}-{last}*{factor}", [
        first * factor**i for i in range(20) if first * factor**i <= last
    ]


@given(st.lists(items(), min_size=1, max_size=5))
def test_a_list_names_what_its_items_name(parts: list[tuple[str, list[int]]]) -> None:
    text = ",".join(text for text, _ in parts)
    assert int_range(text) == [number for _, numbers in parts for number in numbers]


@given(st.text(alphabet="0123456789-+*, x", max_size=12))
def test_any_text_is_numbers_or_an_error(text: str) -> None:
    try:
        numbers = int_range(text, least=1)
    except UsageError:
        return
    assert 0 < len(numbers) <= MOST_VALUES
    assert min(numbers) >= 1


NO_RANGES = ("", ",", "1,", "x", "-1", "1-", "8-1", "1-8/2", "1.5", "1--2", "²")
ENDLESS = ("1-8+0", "0-8*2", "2-8*1", "0-100000")


@pytest.mark.parametrize("text", [*NO_RANGES, *ENDLESS])
def test_what_is_no_range_is_an_error(text: str) -> None:
    with pytest.raises(UsageError):
        int_range(text)


def test_a_number_can_be_too_small() -> None:
    assert int_range("1,2", least=1) == [1, 2]
    with pytest.raises(UsageError, match="0 is less than 1"):
        int_range("0-2", least=1)


def test_prompt_and_generation() -> None:
    assert prompt_and_generation("512,128") == (512, 128)
    for text in ("512", "512,", "1,2,3", "a,b", "-1,2"):
        with pytest.raises(UsageError):
            prompt_and_generation(text)


@pytest.mark.parametrize(
    ("test", "name"),
    [
        (BenchTest(512, 0, 0), "pp512"),
        (BenchTest(0, 128, 4096), "tg128 @ d4096"),
        (BenchTest(512, 128, 0), "pp512+tg128"),
        (BenchTest(512, 128, 16), "pp512+tg128 @ d16"),
    ],
)
def test_names_are_llama_benchs(test: BenchTest, name: str) -> None:
    assert test.name == name


def test_the_grid_is_every_setting_with_every_test() -> None:
    grid = Grid(
        n_batch=(256,),
        n_ubatch=(64, 128),
        pairs=(("f16", "f16"), ("q8_0", "q4_0")),
        n_threads=(1, 2),
        n_threads_batch=(3,),
        n_depth=(0, 512),
        n_prompt=(512, 0),
        n_gen=(128,),
        n_pg=((16, 4), (0, 0)),
    )
    settings = grid.settings()
    assert len(settings) == len(set(settings)) == 8
    # what is named first varies last, as in llama-bench: batches, types, then threads
    assert settings[:3] == [
        Setting(256, 64, "f16", "f16", 1, 3),
        Setting(256, 64, "f16", "f16", 2, 3),
        Setting(256, 64, "q8_0", "q4_0", 1, 3),
    ]
    assert grid.tests(512) == [
        BenchTest(512, 0, 512),
        BenchTest(0, 128, 512),
        BenchTest(16, 4, 512),
    ]
    assert grid.n_tests == 8 * 2 * 3


def test_the_default_grid_is_llama_benchs() -> None:
    assert Grid().settings() == [Setting(2048, 512, "f16", "f16", None)]
    assert [test.name for test in Grid().tests(0)] == ["pp512", "tg128"]
