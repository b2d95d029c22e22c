"""The options of `localkv bench` that hold lists and ranges, and the grid that they make.

With `--parallel` each point of the grid is measured with several sequences at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

import click

from localkv.bench.grid import Grid, int_range, prompt_and_generation
from localkv.commands.bench.tables import PARALLEL_FORMATS
from localkv.commands.cache_pairs import parse_pairs, require_cache_type
from localkv.commands.options import (
    DEFAULT_BATCH,
    DEFAULT_LOGICAL_BATCH,
    KV_CACHE,
    MAX_THREADS,
    RUN,
    Panel,
    preset_option,
    preset_or_given,
)
from localkv.errors import LocalKVError, UsageError
from localkv.quant_formats import KV_FORMATS

if TYPE_CHECKING:
    from localkv.bench.parallel import ParallelTest

_TESTS = Panel("Tests")


MOST_PARALLEL = 1024
"""Sequences of `--parallel`."""


class Listed(click.ParamType[Any]):
    """A value that stands for several; as an option is repeated, they add up."""

    name = "list"

    def __init__(self, parse: Callable[[str], Sequence[Any]]) -> None:
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return tuple(self._parse(value))
        except LocalKVError as error:
            hint = f"; {error.hint}" if error.hint else ""
            self.fail(f"{error.message}{hint}", param, ctx)

    def split_envvar_value(self, rv: str) -> Sequence[str]:
        return [rv]


def _numbers(least: int, most: int | None = None) -> Listed:
    def parse(text: str) -> list[int]:
        numbers = int_range(text, least)
        if most is not None and max(numbers) > most:
            raise UsageError(f"{max(numbers)} is more than {most}")
        return numbers

    return Listed(parse)


def _cache_types(text: str) -> list[str]:
    names = [name.strip().lower() for name in text.split(",")]
    for name in names:
        require_cache_type(name)
    return names


def _preset_or_listed(ctx: click.Context, param: click.Parameter, value: Any) -> Any:
    """The callback of `-ctk` and `-ctv`, as of other commands: a preset's type can win."""
    chosen = preset_or_given(ctx, param, value)
    return ((chosen,),) if isinstance(chosen, str) else chosen


def _list_option(
    panel: Panel, names: str, *, default: Sequence[str] = (), **attributes: Any
) -> Any:
    shown = bool(default)
    return panel.option(names, multiple=True, default=default, show_default=shown, **attributes)


def grid_options() -> list[click.Parameter]:
    """The options that make the grid; `grid` reads them."""
    return [
        _list_option(
            _TESTS,
            "-p --n-prompt",
            type=_numbers(0),
            default=("512",),
            metavar="N,...",
            help="Tokens of a prompt to evaluate (pp); 0 leaves these tests out.",
        ),
        _list_option(
            _TESTS,
            "-n --n-gen",
            type=_numbers(0),
            default=("128",),
            metavar="N,...",
            help="Tokens to generate (tg); 0 leaves these tests out.",
        ),
        _list_option(
            _TESTS,
            "-pg --n-prompt-gen",
            type=Listed(lambda text: [prompt_and_generation(text)]),
            metavar="PP,TG",
            help="Evaluate a prompt and generate after it, timed together; can be repeated.",
        ),
        _list_option(
            _TESTS,
            "-d --n-depth",
            type=_numbers(0),
            default=("0",),
            metavar="N,...",
            help="Tokens that are in the cache before a test: random ones, evaluated once per "
            "cache and depth, and not timed.",
        ),
        _list_option(
            _TESTS,
            "--parallel -npl",
            type=_numbers(1, MOST_PARALLEL),
            metavar="N,...",
            help="Sequences at the same time, each with a prompt of -p and -n generated tokens; "
            "columns as llama-batched-bench's.",
        ),
        _list_option(
            KV_CACHE,
            "-ctk --cache-type-k",
            type=Listed(_cache_types),
            default=("f16",),
            callback=_preset_or_listed,
            metavar="TYPE,...",
            help=f"The type of K in the cache: {', '.join(KV_FORMATS)}.",
        ),
        _list_option(
            KV_CACHE,
            "-ctv --cache-type-v",
            type=Listed(_cache_types),
            default=("f16",),
            callback=_preset_or_listed,
            metavar="TYPE,...",
            help="The type of V in the cache. Every type of K is tried with every type of V.",
        ),
        preset_option(),
        KV_CACHE.option(
            "--pairs",
            metavar="PAIRS",
            help="These pairs instead: K/V,K/V,... such as f16/f16,q8_0/q4_0, or pure (K as V), "
            "or all.",
        ),
        _list_option(
            RUN,
            "-b --batch-size",
            llama_env="BATCH",
            type=_numbers(1),
            default=(str(DEFAULT_LOGICAL_BATCH),),
            metavar="N,...",
            help="An upper bound on -ub, as in llama.cpp.",
        ),
        _list_option(
            RUN,
            "-ub --ubatch-size",
            llama_env="UBATCH",
            type=_numbers(1),
            default=(str(DEFAULT_BATCH),),
            metavar="N,...",
            help="Most prompt tokens evaluated at a time.",
        ),
        _list_option(
            RUN,
            "-t --threads",
            llama_env="THREADS",
            type=_numbers(1, MAX_THREADS),
            metavar="N,...",
            help="CPU threads. [default: one per core]",
        ),
        _list_option(
            RUN,
            "-tb --threads-batch",
            type=_numbers(1, MAX_THREADS),
            metavar="N,...",
            help="CPU threads where several tokens are evaluated at once, as in prompts. "
            "[default: as -t]",
        ),
    ]


def grid(values: Mapping[str, Any]) -> Grid:
    """The grid that the values of `grid_options` stand for.

    With `--pairs pure` and `all` its pairs depend on the model (`cache_pairs.fitting_pairs`).

    Raises:
        UsageError: it is empty, or `--pairs` names no pairs.
    """

    def joined(name: str) -> tuple[Any, ...]:
        return tuple(item for part in values[name] for item in part)

    if values["pairs"] is None:
        pairs = tuple(product(joined("cache_type_k"), joined("cache_type_v")))
    else:
        pairs = tuple(parse_pairs(values["pairs"], "--pairs"))
    made = Grid(
        n_batch=joined("batch_size"),
        n_ubatch=joined("ubatch_size"),
        pairs=pairs,
        n_threads=joined("threads") or (None,),
        n_threads_batch=joined("threads_batch") or (None,),
        n_depth=joined("n_depth"),
        n_prompt=joined("n_prompt"),
        n_gen=joined("n_gen"),
        n_pg=joined("n_prompt_gen"),
    )
    if made.n_tests == 0:
        raise UsageError("-p 0 and -n 0 leave nothing to measure", hint="as in -p 512 -n 128")
    return made


def shared_flag() -> click.Parameter:
    """The option that gives all sequences one prompt."""
    return _TESTS.flag(
        "--prompt-shared -pps",
        help="With --parallel: all sequences have one prompt, which is evaluated once.",
    )


def parallel_tests(grid: Grid, values: dict[str, Any]) -> list[ParallelTest]:
    """The tests that `--parallel` asks for.

    Raises:
        UsageError: another option makes no sense beside it.
    """
    for name, flag_name in (("n_prompt_gen", "-pg"), ("plot_file", "--plot")):
        if values[name]:
            raise UsageError(
                f"{flag_name} does not go with --parallel",
                hint="as in -p 512 -n 128 --parallel 1,8",
            )
    if any(grid.n_depth):
        raise UsageError(
            "-d does not go with --parallel", hint="sequences begin with a prompt: as in -p 1024"
        )
    for name in values["formats"]:
        if name not in (None, *PARALLEL_FORMATS):
            raise UsageError(
                f"format {name} does not go with --parallel",
                hint=f"use {', '.join(PARALLEL_FORMATS)}",
            )
    if 0 in (*grid.n_prompt, *grid.n_gen):
        raise UsageError(
            "with --parallel each sequence has a prompt and generates",
            hint="use -p and -n of at least 1",
        )
    from localkv.bench.parallel import parallel_tests as tests_of

    numbers = [n for part in values["parallel"] for n in part]
    return tests_of(grid, numbers, is_shared=values["prompt_shared"])
