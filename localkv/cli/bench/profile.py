"""`--kv-profile` for `localkv bench`: one model, whose layers have types of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from localkv.cli.options.profile import preset_bits
from localkv.cli.output.messages import say, warn
from localkv.errors import UsageError

if TYPE_CHECKING:
    from localkv.bench.grid import Grid
    from localkv.bench.source import Source
    from localkv.config import CacheConfig

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
    from localkv.cache.profiled import profiled
    from localkv.loader.found_profile import model_profile
    from localkv.loader.gguf_file import open_gguf

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
    profile = model_profile(open_gguf(sources[0].path), name or "auto")
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
