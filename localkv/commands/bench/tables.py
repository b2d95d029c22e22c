"""The output of `localkv bench` in llama-bench's formats: md, csv, json, jsonl, sql.

A table is written row by row, so that finished rows remain when a run is interrupted.
"""

from __future__ import annotations

import csv
import io
import json
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from localkv.bench.grid import Grid
from localkv.errors import counted

if TYPE_CHECKING:
    from localkv.bench.parallel import ParallelResult
    from localkv.bench.result import Result


MIB, GIB = 1 << 20, 1 << 30


class Table(ABC):
    """The pieces of text that make a table: a header, rows, a footer."""

    def header(self, first: Any) -> str:
        """The lines before the rows; `first` is a row, for the columns."""
        return ""

    @abstractmethod
    def row(self, result: Any) -> str: ...

    def footer(self) -> str:
        return ""


Values = Callable[[Any], dict[str, Any]]
"""A result as names and values."""


def _values(result: Result) -> dict[str, Any]:
    return {**result.llama_bench_values(), **result.own_values()}


def _object(result: Result) -> dict[str, Any]:
    """A result as JSON, with every sample, which the other formats have no place for."""
    samples = {"samples_ns": list(result.samples_ns), "samples_ts": result.samples_ts}
    return {**result.llama_bench_values(), **samples, **result.own_values()}


@dataclass(frozen=True)
class Column:
    """Title and width of a column, which is flush left where the width is negative."""

    title: str
    width: int
    cell: Callable[[Result], str]

    def line(self, text: str) -> str:
        return text.ljust(-self.width) if self.width < 0 else text.rjust(self.width)

    @property
    def rule(self) -> str:
        dashes = "-" * (abs(self.width) - 1)
        return f"{dashes}-" if self.width < 0 else f"{dashes}:"


class MarkdownTable(Table):
    """llama-bench's columns, some of them only where they are not the default, then ours."""

    def __init__(self, grid: Grid) -> None:
        self._columns = _columns(grid)
        self._kernels: list[str] = []
        self._bandwidths: list[str] = []

    def header(self, first: Result) -> str:
        titles = [column.line(column.title) for column in self._columns]
        rules = [column.rule for column in self._columns]
        return _line(titles) + _line(rules)

    def row(self, result: Result) -> str:
        machine = result.machine
        self._note(self._kernels, f"attention: {machine.attention}")
        self._note(self._kernels, f"products: {machine.linear}")
        how = (
            "a copy"
            if machine.backend == "cuda"
            else f"a read by {counted(result.threads.one, 'thread')}"
        )
        self._note(self._bandwidths, f"{result.bandwidth / 1e9:.1f} GB/s ({how})")
        self._note(self._kernels, machine.gpu if machine.backend == "cuda" else machine.cpu, 0)
        return _line([column.line(column.cell(result)) for column in self._columns])

    def footer(self) -> str:
        if not self._kernels:
            return ""
        bandwidth = f"bandwidth of the memory: {', '.join(self._bandwidths)}"
        return "\n" + "".join(f"{line}\n" for line in (*self._kernels, bandwidth))

    def _note(self, lines: list[str], line: str, at: int | None = None) -> None:
        if line not in lines:
            lines.insert(len(lines) if at is None else at, line)


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |\n"


def _columns(grid: Grid) -> list[Column]:
    default = Grid()
    columns = [
        Column("model", -20, lambda r: r.source.kind),
        Column("size", 10, lambda r: _size(r.source.n_bytes)),
        Column("params", 9, lambda r: _count(r.source.n_params)),
        Column("backend", -7, lambda r: r.machine.backend.upper()),
        Column("threads", 7, lambda r: str(r.threads)),
    ]
    if grid.n_batch != default.n_batch:
        columns.append(Column("n_batch", 7, lambda r: str(r.setting.n_batch)))
    if grid.n_ubatch != default.n_ubatch:
        columns.append(Column("n_ubatch", 8, lambda r: str(r.setting.n_ubatch)))
    if grid.pairs != default.pairs:
        width = max(6, *(len(name) for pair in grid.pairs for name in pair))
        columns.append(Column("type_k", width, lambda r: r.setting.type_k))
        columns.append(Column("type_v", width, lambda r: r.setting.type_v))
    return [
        *columns,
        Column("test", 15, lambda r: r.test.name),
        Column("t/s", 19, lambda r: f"{r.avg_ts:.2f} ± {r.stddev_ts:.2f}"),
        Column("KV MiB", 8, lambda r: f"{r.kv_bytes / MIB:.2f}"),
        Column("peak MiB", 8, lambda r: f"{r.peak_bytes / MIB:.0f}"),
        Column("MB/token", 8, lambda r: f"{r.bytes_per_token / 1e6:.2f}"),
        Column("roofline", 8, lambda r: f"{100 * r.roofline:.0f} %"),
    ]


def _size(n_bytes: int) -> str:
    return f"{n_bytes / MIB:.2f} MiB" if n_bytes < GIB else f"{n_bytes / GIB:.2f} GiB"


def _count(n: int) -> str:
    return f"{n / 1e6:.2f} M" if n < 1e9 else f"{n / 1e9:.2f} B"


class CsvTable(Table):
    """The names of the columns, then rows whose values are all quoted."""

    def __init__(self, values: Values = _values) -> None:
        self._values = values

    def header(self, first: Any) -> str:
        return ",".join(self._values(first)) + "\n"

    def row(self, result: Any) -> str:
        line = io.StringIO()
        values = [_number(value) for value in self._values(result).values()]
        csv.writer(line, quoting=csv.QUOTE_ALL, lineterminator="\n").writerow(values)
        return line.getvalue()


def _number(value: Any) -> Any:
    """True and false as llama-bench has them where it can't say them: 1 and 0."""
    return int(value) if isinstance(value, bool) else value


class JsonTable(Table):
    """An array with one object per test, of several lines if `indent` is a number."""

    def __init__(self, values: Values = _object, indent: int | None = 2) -> None:
        self._values, self._indent = values, indent
        self._between = ""

    def header(self, first: Any) -> str:
        return "[\n"

    def row(self, result: Any) -> str:
        text = json.dumps(self._values(result), indent=self._indent, ensure_ascii=False)
        text = self._between + "\n".join(f"  {line}" for line in text.splitlines())
        self._between = ",\n"
        return text

    def footer(self) -> str:
        return "\n]\n" if self._between else "[]\n"


class JsonLines(Table):
    """One object per test and line."""

    def __init__(self, values: Values = _object) -> None:
        self._values = values

    def row(self, result: Any) -> str:
        return json.dumps(self._values(result), ensure_ascii=False) + "\n"


_SQL_TYPES = {bool: "INTEGER", int: "INTEGER", float: "REAL", str: "TEXT"}


class SqlTable(Table):
    """Statements that make the table `llama_bench` and fill it."""

    def header(self, first: Result) -> str:
        columns = [f"  {name} {_SQL_TYPES[type(v)]}" for name, v in _values(first).items()]
        return "CREATE TABLE IF NOT EXISTS llama_bench (\n" + ",\n".join(columns) + "\n);\n\n"

    def row(self, result: Result) -> str:
        values = _values(result)
        literals = ", ".join(map(self._literal, values.values()))
        return f"INSERT INTO llama_bench ({', '.join(values)}) VALUES ({literals});\n"

    @staticmethod
    def _literal(value: Any) -> str:
        if isinstance(value, str):
            return "'" + value.replace("'", "''") + "'"
        return repr(_number(value))


def make_table(name: str, grid: Grid) -> Table:
    """The table of a format in `FORMATS`."""
    return MarkdownTable(grid) if name == "md" else _BY_NAME[name]()


_BY_NAME: dict[str, Callable[[], Table]] = {
    "csv": CsvTable,
    "json": JsonTable,
    "jsonl": JsonLines,
    "sql": SqlTable,
}
FORMATS = ("md", *_BY_NAME)


class ParallelMarkdown(Table):
    """The table of `--parallel`: the types, llama-batched-bench's columns, and the memory of K and
    V; then what ran where."""

    def __init__(self) -> None:
        self._notes = list[str]()

    def header(self, first: ParallelResult) -> str:
        columns = [(title, width) for title, width, *_ in _PARALLEL_COLUMNS]
        rules = ["-" * (width - 1) + ":" for _, width in columns]
        return _line([title.rjust(width) for title, width in columns]) + _line(rules)

    def row(self, result: ParallelResult) -> str:
        machine = result.machine
        for line in (
            f"{result.source.kind}, {machine.gpu or machine.cpu}, {result.threads} threads",
            f"attention: {machine.attention}",
            f"products: {machine.linear}",
        ):
            if line not in self._notes:
                self._notes.append(line)
        shown = {**result.values(), "kv_mib": result.kv_bytes / MIB}
        return _line([f"{shown[key]:>{width}{form}}" for _, width, key, form in _PARALLEL_COLUMNS])

    def footer(self) -> str:
        return "".join(f"{line}\n" for line in ["", *self._notes]) if self._notes else ""


_PARALLEL_COLUMNS = (
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
"""Title, width, key and format."""


def _parallel_values(result: ParallelResult) -> dict[str, Any]:
    return {**result.values()}


_PARALLEL: dict[str, Callable[[], Table]] = {
    "md": ParallelMarkdown,
    "json": lambda: JsonTable(_parallel_values, indent=None),
    "jsonl": lambda: JsonLines(_parallel_values),
    "csv": lambda: CsvTable(_parallel_values),
}
PARALLEL_FORMATS = tuple(_PARALLEL)
"""The formats of `-o` that the table of `--parallel` can be printed in."""


def parallel_table(name: str) -> Table:
    """The table of `--parallel` in a format of `PARALLEL_FORMATS`."""
    return _PARALLEL[name]()
