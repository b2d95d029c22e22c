"""`localkv bench --parallel`: many sequences at the same time, in llama-batched-bench's columns."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import click

from localkv.bench.grid import Grid
from localkv.cli.options import flag
from localkv.errors import UsageError

if TYPE_CHECKING:
    from localkv.bench.parallel import ParallelResult, ParallelTest

FORMATS = ("md", "json", "jsonl", "csv")
"""Those of `-o` that such a table can be printed in."""

MIB = 1 << 20


def shared_flag() -> click.Parameter:
    """The option that gives all sequences one prompt."""
    return flag(
        "--prompt-shared",
        "-pps",
        panel="Tests",
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
        if name not in (None, *FORMATS):
            raise UsageError(
                f"format {name} does not go with --parallel", hint=f"use {', '.join(FORMATS)}"
            )
    if 0 in (*grid.n_prompt, *grid.n_gen):
        raise UsageError(
            "with --parallel each sequence has a prompt and generates",
            hint="use -p and -n of at least 1",
        )
    from localkv.bench.parallel import parallel_tests as tests_of

    numbers = [n for part in values["parallel"] for n in part]
    return tests_of(grid, numbers, is_shared=values["prompt_shared"])


class ParallelTable:
    """The pieces of text that make a table: a header, rows, a footer."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._between = ""
        self._notes = list[str]()

    def header(self, first: ParallelResult) -> str:
        """The lines before the rows; `first` is a row, for the columns."""
        if self._name == "md":
            return _line(title.rjust(width) for title, width, *_ in _COLUMNS) + _line(
                "-" * (width - 1) + ":" for _, width, *_ in _COLUMNS
            )
        return {"csv": ",".join(first.values()) + "\n", "json": "[\n"}.get(self._name, "")

    def row(self, result: ParallelResult) -> str:
        values = result.values()
        if self._name == "jsonl":
            return json.dumps(values, ensure_ascii=False) + "\n"
        if self._name == "json":
            text = f"{self._between}  {json.dumps(values, ensure_ascii=False)}"
            self._between = ",\n"
            return text
        if self._name == "csv":
            line = io.StringIO()
            csv.writer(line, quoting=csv.QUOTE_ALL, lineterminator="\n").writerow(values.values())
            return line.getvalue()
        self._note(result)
        shown = {**values, "kv_mib": result.kv_bytes / MIB}
        return _line(f"{shown[key]:>{width}{form}}" for _, width, key, form in _COLUMNS)

    def footer(self) -> str:
        if self._name == "json":
            return "\n]\n" if self._between else "[]\n"
        return "".join(f"{line}\n" for line in ["", *self._notes]) if self._notes else ""

    def _note(self, result: ParallelResult) -> None:
        machine = result.machine
        for line in (
            f"{result.source.kind}, {machine.gpu or machine.cpu}, {result.threads} threads",
            f"attention: {machine.attention}",
            f"products: {machine.linear}",
        ):
            if line not in self._notes:
                self._notes.append(line)


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |\n"


_COLUMNS = (
    ("type_k", 6, "type_k", ""),
    ("type_v", 6, "type_v", ""),
    ("PP", 6, "pp", "d"),
    ("TG", 6, "tg", "d"),
    ("B", 4, "pl", "d"),
    ("N_KV", 6, "n_kv", "d"),
    ("T_PP s", 8, "t_pp", ".3f"),
    ("S_PP t/s", 8, "speed_pp", ".2f"),
    ("T_TG s", 8, "t_tg", ".3f"),
    ("S_TG t/s", 8, "speed_tg", ".2f"),
    ("T s", 8, "t", ".3f"),
    ("S t/s", 8, "speed", ".2f"),
    ("KV MiB", 8, "kv_mib", ".2f"),
)
"""Title, width, key and format: the types, llama-batched-bench's, and the memory of K and V."""
