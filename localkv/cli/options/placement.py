"""The options that say on which CPUs threads run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import click

from localkv.cli.options import option
from localkv.cli.parsing.option_types import Choice
from localkv.errors import UsageError
from localkv.system.cpu_list import cpus_of_mask, cpus_of_range
from localkv.system.placement import check_cpus

PLACEMENT = ("cpu_mask", "cpu_range", "cpu_strict")


def placement_options() -> list[click.Parameter]:
    """`placement_arguments` reads them."""
    return [
        option(
            "-C",
            "--cpu-mask",
            panel="Model",
            metavar="MASK",
            help="CPUs that this process may use, as a hexadecimal mask: f is the first four. "
            "[default: all that taskset or a container leaves]",
        ),
        option(
            "-Cr",
            "--cpu-range",
            panel="Model",
            metavar="LOW-HIGH",
            help="The same as a range; both together name all that either does.",
        ),
        option(
            "--cpu-strict",
            panel="Model",
            type=Choice(("0", "1")),
            default="0",
            show_default=True,
            metavar="0|1",
            help="1: each thread of the kernels has one of these CPUs for itself.",
        ),
    ]


def placement_arguments(values: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `LLM` that their values stand for.

    Raises:
        UsageError: a CPU does not exist, or may not be used.
    """
    found = set[int]()
    for name, text in (("-C", values["cpu_mask"]), ("-Cr", values["cpu_range"])):
        if text is None:
            continue
        try:
            last = (os.cpu_count() or 1) - 1
            cpus = cpus_of_mask(text) if name == "-C" else cpus_of_range(text, last)
            check_cpus(cpus)
        except UsageError as error:
            raise UsageError(f"{name} {text}: {error.message}", hint=error.hint) from None
        found |= cpus
    return {"cpus": sorted(found) or None, "cpu_strict": values["cpu_strict"] == "1"}
