"""`localkv bench`: how fast a model runs, with one cache or with many."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from localkv.cache.cache_checks import check_windows
from localkv.cache.profile import read_kv_scales, require_scales
from localkv.commands.bench.grid import grid as make_grid
from localkv.commands.bench.grid import grid_options, parallel_tests, shared_flag
from localkv.commands.bench.plot import check_bench_plot, draw
from localkv.commands.bench.tables import FORMATS, make_table, parallel_table
from localkv.commands.cache_pairs import fitting_pairs
from localkv.commands.completion import model_values
from localkv.commands.loading_options import (
    OFFLOAD,
    OVERRIDES,
    PLACEMENT,
    loading_options,
    offload_arguments,
    placement_arguments,
    preset_bits,
    window_settings,
)
from localkv.commands.model_file import model_file
from localkv.commands.options import MODEL, OUTPUT, RUN, model_options, say_preset
from localkv.commands.output import ProgressLine, TextOutput, note, say, warn
from localkv.commands.parsing import FILE, Choice, Command, Whole
from localkv.commands.process import INTERRUPTED
from localkv.config import CacheConfig, Overrides
from localkv.errors import UsageError, counted
from localkv.system.limits import before_model
from localkv.system.threads import place_caller, place_process

if TYPE_CHECKING:
    from localkv.bench.grid import Grid
    from localkv.bench.parallel import ParallelResult, ParallelTest
    from localkv.bench.result import Result
    from localkv.bench.run import Options
    from localkv.bench.source import Source


_SWA_TYPES = {"cache_type_k_swa": "-ctk-swa", "cache_type_v_swa": "-ctv-swa"}
"""Types of layers with a window, which no column shows."""
_CHECKPOINTS = ("ctx_checkpoints", "checkpoint_min_step")
_EXACT = ("kv_tail", "kv_sink")
_CACHE = (
    *_SWA_TYPES,
    "swa_full",
    "cache_type_k_rope",
    *_CHECKPOINTS,
    *_EXACT,
    "kv_rotation",
    "kv_scales",
    "kv_profile",
    "kv_bits",
)
_SHARED = (*_CACHE, *PLACEMENT, *OFFLOAD, *OVERRIDES, "device", "fit")
"""Options as other commands have them."""

_MODEL_OPTIONS: list[click.Parameter] = [
    MODEL.option(
        "-m --model",
        llama_env="MODEL",
        multiple=True,
        metavar="FILE,...",
        type=FILE,
        shell_complete=model_values,
        help="GGUF files (any part of a split one), or hf.co/ORG/REPO as -hf takes it.",
    ),
    *(param for param in model_options() if param.name != "model"),
    MODEL.option(
        "--synthetic",
        multiple=True,
        metavar="SHAPE:TYPE,...",
        help="Models of a well-known shape with random weights of a type, made in memory, "
        "such as llama-8b:q4_0. localkv plan --help-all lists all shapes.",
    ),
]

_RUN_OPTIONS: list[click.Parameter] = [
    RUN.option("-r --repetitions", type=Whole(1), default=5, help="Times each test is repeated."),
    RUN.flag("--no-warmup", help="Don't run each test once before it is timed."),
    OUTPUT.option(
        "output_format -o --output",
        type=Choice(FORMATS, case_sensitive=False),
        default="md",
        metavar="FORMAT",
        help=f"The format to print: {', '.join(FORMATS)}.",
    ),
    OUTPUT.option(
        "error_format -oe --output-err",
        type=Choice(FORMATS, case_sensitive=False),
        metavar="FORMAT",
        help="Also print in this format, on stderr.",
    ),
    OUTPUT.option(
        "plot_file --plot",
        metavar="FILE",
        help="Draw the speed of generation over depth as a picture (.png, .svg, .pdf).",
    ),
]


def _run(
    *,
    output_format: str,
    error_format: str | None,
    plot_file: str | None,
    repetitions: int,
    no_warmup: bool,
    **values: Any,
) -> int:
    """Run the grid; returns the exit code."""
    grid = make_grid(values)
    if values["pairs"] is None and values["kv_profile"] is None:
        types = {
            f"cache_type_{side}": ",".join(dict.fromkeys(pair[i] for pair in grid.pairs))
            for i, side in enumerate("kv")
        }
        say_preset({**values, **types})
    elif values["pairs"] and _given("cache_type_k", "cache_type_v", "preset"):
        raise UsageError("--pairs names the cache types", hint="leave out -ctk, -ctv and --preset")
    if values["prompt_shared"] and not values["parallel"]:
        raise UsageError("-pps is about --parallel", hint="as in --parallel 1,8 -pps")
    tests = (
        parallel_tests(
            grid, {**values, "formats": (output_format, error_format), "plot_file": plot_file}
        )
        if values["parallel"]
        else []
    )
    if plot_file is not None:
        check_bench_plot(plot_file, grid)
    if values["pairs"] is None or values["pairs"].lower() not in ("pure", "all"):
        names = [name for pair in grid.pairs for name in pair]
        names += [values[name] for name in _SWA_TYPES if values[name] is not None]
        require_scales(names, values["kv_scales"] is not None)
    cache = CacheConfig(kv_rotation=values["kv_rotation"], **window_settings(values))
    sources = _sources(values)
    cache, grid = with_profile(values, sources, cache, grid)
    jobs = [(source, _fitted(grid, source, values)) for source in sources]
    for source, _ in jobs:
        check_windows(cache, source.config.groups)
    n_tests = sum(
        len(fitted.settings()) * len(tests) if tests else fitted.n_tests for _, fitted in jobs
    )
    if values["kv_scales"] is not None:
        cache = replace(cache, kv_scales=read_kv_scales(values["kv_scales"]))
    if said := [f"{flag} {values[name]}" for name, flag in _SWA_TYPES.items() if values[name]]:
        say(f"all with {' '.join(said)}")
    placement = placement_arguments(values)
    place_process(placement["cpus"], strict=placement["cpu_strict"])
    place_caller()
    before_model()
    from localkv.bench.run import Options

    results: list[Any] = []
    interrupted = False
    with TextOutput(None) as out, ProgressLine() as progress:
        pairs = dict.fromkeys(pair for _, fitted in jobs for pair in fitted.pairs)
        whole = replace(grid, pairs=tuple(pairs))
        tables = _Tables(output_format, error_format, whole, out, parallel=bool(tests))
        options = Options(
            repetitions,
            warm_up=not no_warmup,
            device=values["device"],
            offload=offload_arguments(values),
            cache=cache,
            on_progress=lambda text: progress.show(f"test {len(results) + 1} of {n_tests}: {text}"),
        )
        try:
            for result in _results(jobs, tests, options, values["fit"], progress):
                progress.clear()
                results.append(result)
                tables.add(result)
        except KeyboardInterrupt:
            interrupted = True
        finally:
            progress.clear()
            tables.end()
    if interrupted:
        note(f"interrupted after {len(results)} of {counted(n_tests, 'test')}")
    if plot_file is not None and any(r.test.n_gen and not r.test.n_prompt for r in results):
        draw(results, plot_file)
    return INTERRUPTED if interrupted else 0


def _given(*names: str) -> bool:
    ctx = click.get_current_context()
    return any(ctx.get_parameter_source(name) == ParameterSource.COMMANDLINE for name in names)


def _sources(values: dict[str, Any]) -> list[Source]:
    """The models and settings to measure; a model that is not here is fetched.

    Raises:
        UsageError: none is named, or they are named in two ways.
        ModelFileError: a file is missing, or no model.
    """
    from localkv.bench.source import file_source, synthetic_source

    named, overrides = _given("model", "hf_repo"), Overrides.of(values)
    if values["synthetic"] and (_given("synthetic") or not named):
        if named:
            raise UsageError("--synthetic takes the place of a file", hint="leave out -m and -hf")
        if overrides:
            raise UsageError(
                "--synthetic has no file whose keys --rope-scale, --override-kv and others replace",
                hint="name a file with -m",
            )
        shapes = ",".join(values["synthetic"]).split(",")
        return [synthetic_source(name.strip()) for name in shapes]
    files: list[str | None] = []
    for item in values["model"]:
        files += [item] if Path(item).exists() else filter(None, item.split(","))
    return [
        file_source(model_file({**values, "model": name}), overrides) for name in files or [None]
    ]


def _fitted(grid: Grid, source: Source, values: dict[str, Any]) -> Grid:
    """The grid with the pairs of `--pairs` that the model can have."""
    if values["pairs"] is None:
        return grid
    has_scales = values["kv_scales"] is not None
    pairs = fitting_pairs(values["pairs"], source.config, has_scales, "--pairs")
    return replace(grid, pairs=tuple(pairs))


def _results(
    jobs: list[tuple[Source, Grid]],
    tests: list[ParallelTest],
    options: Options,
    fit: str,
    progress: ProgressLine,
) -> Iterator[Result | ParallelResult]:
    """The results of all models. One is gone from memory before the next is loaded."""
    from localkv.bench.fit import check_grid, check_parallel
    from localkv.bench.parallel import run_parallel
    from localkv.bench.run import run
    from localkv.bench.source import load

    for source, grid in jobs:
        warnings: list[str] = []
        if fit == "on":
            check = partial(check_parallel, tests) if tests else check_grid
            warnings += check(source, grid, options.device, options.cache, options.offload)
        progress.show(f"loading {source.name}")
        subject = load(source, options.device, fit, options.offload)
        progress.clear()
        warnings += subject.warnings
        for line in dict.fromkeys(warnings):
            warn(line)
        if tests:
            yield from run_parallel(subject, grid, tests, options)
        else:
            yield from run(subject, grid, options)
        del subject


class _Tables:
    """The table on stdout, and the one on stderr if there is one."""

    def __init__(
        self, name: str, error_name: str | None, grid: Grid, out: TextOutput, *, parallel: bool
    ) -> None:
        def make(name: str) -> Any:
            return parallel_table(name) if parallel else make_table(name, grid)

        self._outputs: list[tuple[Any, Any]] = [(make(name), out)]
        if error_name is not None and sys.stderr is not None:
            self._outputs.append((make(error_name), sys.stderr))
        self._begun = False

    def add(self, result: Result | ParallelResult) -> None:
        for table, out in self._outputs:
            if not self._begun:
                out.write(table.header(result))
            out.write(table.row(result))
        self._begun = True

    def end(self) -> None:
        for table, out in self._outputs:
            out.write(table.footer())


_TYPES = ("cache_type_k", "cache_type_v", "cache_type_k_swa", "cache_type_v_swa", "pairs")


def with_profile(
    values: Mapping[str, Any], sources: Sequence[Source], cache: CacheConfig, grid: Grid
) -> tuple[CacheConfig, Grid]:
    """The cache and the grid with the types of a profile, if one is named.

    Raises:
        UsageError: types are named as well, or several models, or there is no such profile.
    """
    name, bits, preset = values["kv_profile"], values["kv_bits"], values["preset"]
    if name is None and bits is None:
        return cache, grid
    from localkv.cache.profile import profiled
    from localkv.loader.chosen_cache import model_profile
    from localkv.loader.gguf_file import open_gguf
    from localkv.loader.model_header import with_overrides

    ctx = click.get_current_context()
    named = [one for one in _TYPES if ctx.get_parameter_source(one) == ParameterSource.COMMANDLINE]
    if named:
        raise UsageError(
            "--kv-profile names the cache types", hint="leave out -ctk, -ctv and --pairs"
        )
    if preset is not None and bits is not None:
        raise UsageError(
            "--kv-bits and --preset both choose the types", hint="leave out one of them"
        )
    if len(sources) > 1 or sources[0].path is None:
        raise UsageError("--kv-profile is for one model in a file", hint="name one with -m")
    gguf = with_overrides(open_gguf(sources[0].path), sources[0].overrides)
    profile = model_profile(gguf, name or "auto")
    if preset is not None:
        bits = preset_bits(preset)
    n_ctx = max(test.n_ctx for depth in grid.n_depth for test in grid.tests(depth))
    chosen = profiled(
        replace(cache, n_ctx=n_ctx),
        profile,
        bits,
        names_types=False,
        groups=sources[0].config.groups,
        n_batch=max(setting.n_evaluated for setting in grid.settings()),
    )
    assert chosen.types is not None
    for line in chosen.warnings:
        warn(line)
    say(f"KV profile: {chosen.types.in_words(chosen.cache.kv_tail)}")
    cache = replace(chosen.cache, kv_scales=chosen.scales)
    return cache, replace(grid, pairs=(cache.shown_types,))


bench = Command(
    "bench",
    examples=[
        ("Prompts of 512 tokens, and 128 tokens generated", "localkv bench -m model.gguf"),
        (
            "Generation at several depths, for two caches, as a picture",
            "localkv bench -m model.gguf -p 0 -d 0,8192 --pairs f16/f16,q8_0/q4_0 --plot speed.png",
        ),
        (
            "Eight sequences at the same time, beside one",
            "localkv bench -m model.gguf -p 256 -n 64 --parallel 1,8",
        ),
        ("A shape without a file", "localkv bench --synthetic llama-8b:q4_0"),
    ],
    essentials="-m -hf --synthetic -p -n -d -ctk -ctv --pairs -t -dev -r -o --plot",
    params=[
        *_MODEL_OPTIONS,
        *grid_options(),
        shared_flag(),
        *(param for param in loading_options() if param.name in _SHARED),
        *_RUN_OPTIONS,
    ],
    callback=_run,
    help="Measure how fast a model evaluates prompts (pp) and generates (tg).\n\n"
    "Numbers can be lists and ranges (512,1024 or 1-8 or 0-4096+1024 or 512-4096*2); every "
    "combination is measured, as llama-bench does, and the columns bear llama-bench's names.",
)
