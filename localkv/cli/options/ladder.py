"""The options of a cache with a budget. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import click
from click.core import ParameterSource

from localkv.cache.ladder import DEFAULT_LADDER, Pair, ladder_text, parse_ladder
from localkv.cli.options import option
from localkv.cli.parsing.option_types import byte_size_of
from localkv.errors import UsageError

_TYPE_FLAGS = {
    "cache_type_k": "-ctk",
    "cache_type_v": "-ctv",
    "preset": "--preset",
    "kv_profile": "--kv-profile",
    "kv_bits": "--kv-bits",
}


def _budget(
    ctx: click.Context, param: click.Parameter, value: str | None
) -> int | Literal["auto"] | None:
    if value is not None and value.strip().lower() == "auto":
        return "auto"
    n_bytes = byte_size_of(ctx, param, value)
    if n_bytes == 0:
        raise UsageError("--kv-budget 0 has no room for anything", hint="use a size, or auto")
    return n_bytes


def _ladder(
    ctx: click.Context, param: click.Parameter, value: str | None
) -> tuple[Pair, ...] | None:
    return None if value is None else parse_ladder(value)


def ladder_options() -> list[click.Parameter]:
    """`--kv-budget` and `--kv-ladder`; `ladder_arguments` reads them."""
    return [
        option(
            "--kv-budget",
            panel="KV cache",
            metavar="SIZE",
            callback=_budget,
            help="The bytes that K and V take, such as 512MiB, or auto for what is free: when they "
            "are full, the oldest pages change to the next types of --kv-ladder, and the context "
            "goes on.",
        ),
        option(
            "--kv-ladder",
            panel="KV cache",
            metavar="PAIRS",
            callback=_ladder,
            help="The types that pages of a cache with a budget go through, pairs K/V with commas "
            f"between them. [default: {ladder_text(DEFAULT_LADDER)}]",
        ),
    ]


def ladder_arguments(values: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `LLM` that these options stand for; none without a budget.

    Raises:
        UsageError: there is a ladder without a budget, or types are named besides.
    """
    budget, ladder = values["kv_budget"], values["kv_ladder"]
    if budget is None:
        if ladder is not None:
            raise UsageError(
                "--kv-ladder says what pages change to within --kv-budget, and there is none",
                hint="add --kv-budget SIZE, or name the types with -ctk and -ctv",
            )
        return {}
    ctx = click.get_current_context()
    for name, flag in _TYPE_FLAGS.items():
        if ctx.get_parameter_source(name) not in (None, ParameterSource.DEFAULT):
            raise UsageError(
                f"--kv-budget takes the types of --kv-ladder, not those of {flag}",
                hint=f"leave out {flag}, and name the types with --kv-ladder",
            )
    return {
        "cache_type_k": None,
        "cache_type_v": None,
        "kv_budget": budget,
        "kv_ladder": ladder,
    }
