"""The speed of generation over depth as a picture: tokens per second, and the time per token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from localkv.bench.grid import Grid
from localkv.commands.output import note
from localkv.commands.pictures import (
    COLOURS,
    INK,
    MARKERS,
    check_plot,
    ink,
    name_ends,
    quiet,
    save,
    title,
    token_ticks,
)
from localkv.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from localkv.bench.result import Result


def check_bench_plot(path: str, grid: Grid) -> None:
    """Find out before anything is measured that no picture could be made.

    Raises:
        UsageError: nothing is generated, or as `check_plot`.
    """
    if not any(grid.n_gen):
        raise UsageError("--plot draws generation over depth", hint="add -n 128")
    check_plot(path)


@dataclass(frozen=True)
class Series:
    """One line of the picture: its difference from the others, and its points by depth.

    Attributes:
        label: "q8_0/q4_0", with whatever else was varied.
        depths: tokens of context that a token saw, on average.
        ms: milliseconds per token, of every repetition.
    """

    label: str
    depths: tuple[float, ...]
    ms: tuple[tuple[float, ...], ...]

    @property
    def mean_ms(self) -> list[float]:
        return [sum(samples) / len(samples) for samples in self.ms]


def series(results: Sequence[Result]) -> list[Series]:
    """The lines that the tests of generation alone make, in the order of the results."""
    tests = [r for r in results if r.test.n_gen and not r.test.n_prompt]
    facts = [_facts(result) for result in tests]
    varied = [len(set(column)) > 1 for column in zip(*facts, strict=True)]
    lines: dict[str, list[Result]] = {}
    for result, fact in zip(tests, facts, strict=True):
        # the pair is always named
        parts = [part for i, part in enumerate(fact) if varied[i] or i == 0]
        lines.setdefault(", ".join(parts), []).append(result)
    made = []
    for label, members in lines.items():
        members.sort(key=_mean_depth)
        ms = tuple(tuple(ns / 1e6 / r.test.n_gen for ns in r.samples_ns) for r in members)
        made.append(Series(label, tuple(map(_mean_depth, members)), ms))
    return made


def _facts(result: Result) -> tuple[str, ...]:
    setting = result.setting
    return (
        f"{setting.type_k}/{setting.type_v}",
        result.source.kind,
        result.threads.in_words(),
        f"-b {setting.n_batch}",
        f"-ub {setting.n_ubatch}",
        f"tg{result.test.n_gen}",
    )


def _mean_depth(result: Result) -> float:
    return result.test.n_before_gen + (result.test.n_gen + 1) / 2


@dataclass(frozen=True)
class Fit:
    """The straight line with the least squares: ms per token over depth.

    Attributes:
        intercept, slope: in ms, and ms per token of context.
        r2: the share of the variance that it explains.
        holds: it describes its points: it explains most of what varies between repetitions and
            depths, and it is never farther from a mean than the repetitions, or a little.
    """

    intercept: float
    slope: float
    r2: float
    holds: bool

    def at(self, depth: float) -> float:
        return self.intercept + self.slope * depth


LEAST_R2 = 0.9
NEAR = 0.02
"""The share of a mean within which a line may miss it."""


def fit(depths: Sequence[float], ms: Sequence[Sequence[float]]) -> Fit | None:
    """The line through all repetitions; None from one depth."""
    x = [depth for depth, samples in zip(depths, ms, strict=True) for _ in samples]
    y = [sample for samples in ms for sample in samples]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    variance = sum((a - mean_x) ** 2 for a in x)
    if variance == 0:
        return None
    slope = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / variance
    intercept = mean_y - slope * mean_x
    left = sum((b - intercept - slope * a) ** 2 for a, b in zip(x, y, strict=True))
    total = sum((b - mean_y) ** 2 for b in y)
    r2 = 1 - left / total if total else 1.0
    found = Fit(intercept, slope, r2, False)
    is_near = all(_is_near(found.at(x), samples) for x, samples in zip(depths, ms, strict=True))
    return replace(found, holds=r2 >= LEAST_R2 and is_near)


def _is_near(fitted: float, samples: Sequence[float]) -> bool:
    mean = sum(samples) / len(samples)
    slack = NEAR * mean
    return min(samples) - slack <= fitted <= max(samples) + slack


def draw(results: Sequence[Result], path: str) -> None:
    """Draw tokens per second, and milliseconds per token with a straight line where there is one.

    Bars span all repetitions. With one depth there is a row for each cache instead.
    """
    from matplotlib.figure import Figure

    lines = series(results)
    depths = {depth for line in lines for depth in line.depths}
    if len(depths) == 1:
        note("no slope is fitted through one depth; add some, as in -d 0-8192+2048")
        figure = Figure(figsize=(8, 1.5 + 0.3 * len(lines)), layout="constrained")
        _rows(figure.add_subplot(), lines, next(iter(depths)))
    else:
        figure = Figure(figsize=(12, 4.8), layout="constrained")
        speed, latency = figure.subplots(1, 2)
        _speed_panel(speed, lines)
        _latency_panel(latency, lines)
    figure.set_facecolor("white")
    figure.suptitle(_where(results), fontsize=11, color=INK, x=0.01, horizontalalignment="left")
    save(figure, path)


def _where(results: Sequence[Result]) -> str:
    machine = results[0].machine
    where = machine.gpu if machine.backend == "cuda" else machine.cpu
    kinds = dict.fromkeys(result.source.kind for result in results)
    threads = dict.fromkeys(result.threads for result in results)
    what = f"{', '.join(kinds)} on {where}"
    if machine.backend != "cuda" and len(threads) == 1:
        what += f", {next(iter(threads)).in_words()}"
    return f"Generation with {what}, by types of K/V"


def _rows(axes: Axes, lines: Sequence[Series], depth: float) -> None:
    """Tokens per second, a row for each line, the first one at the top."""
    spans = []
    for row, line in enumerate(lines):
        values = [1e3 / ms for ms in line.ms[0]]
        _mark(axes, row, _bar(values), COLOURS[0], MARKERS[0], sideways=True)
        spans += values
        axes.annotate(
            f"{sum(values) / len(values):#.3g}",
            (max(values), row),
            xytext=(8, 0),
            textcoords="offset points",
            fontsize=8.5,
            color=ink(COLOURS[0]),
            verticalalignment="center",
        )
    axes.set_yticks(range(len(lines)), [line.label for line in lines])
    axes.set_ylim(len(lines) - 0.5, -0.5)
    low, high = limits(spans)
    axes.set_xlim(low, high + 0.06 * (high - low))
    axes.set_xlabel(f"tokens per second after {depth:,.0f} tokens of context")
    quiet(axes, grid="x")


def _speed_panel(axes: Axes, lines: Sequence[Series]) -> None:
    ends = []
    for i, line in enumerate(lines):
        colour, marker = _look(i)
        per_second = [[1e3 / ms for ms in samples] for samples in line.ms]
        bars = [_bar(samples) for samples in per_second]
        for depth, bar in zip(line.depths, bars, strict=True):
            _mark(axes, depth, bar, colour, marker)
        axes.plot(line.depths, [bar[1] for bar in bars], color=colour, linewidth=1.3)
        ends.append((bars[-1][1], f"{line.label}  {bars[-1][1]:#.3g}", colour))
    title(axes, "tokens per second")
    _finish(axes, lines, [1e3 / ms for line in lines for some in line.ms for ms in some], ends)


def _latency_panel(axes: Axes, lines: Sequence[Series]) -> None:
    """A line through the points that lie on one; dashes between those that do not."""
    ends, has_line = [], False
    for i, line in enumerate(lines):
        colour, marker = _look(i)
        bars = [_bar(samples) for samples in line.ms]
        for depth, bar in zip(line.depths, bars, strict=True):
            _mark(axes, depth, bar, colour, marker)
        found = fit(line.depths, line.ms)
        name = f"{line.label}  {bars[-1][1]:#.3g}"
        if found is not None and found.holds:
            x = (0.0, max(line.depths))
            axes.plot(x, [found.at(depth) for depth in x], color=colour, linewidth=1.3)
            name, has_line = f"{line.label}  {_words(found)}", True
        else:
            axes.plot(
                line.depths,
                [bar[1] for bar in bars],
                color=colour,
                linewidth=1.1,
                linestyle=(0, (4, 3)),
            )
            if found is not None:
                note(f"{line.label}: no straight line describes its times (R2 {found.r2:.2f})")
        ends.append((bars[-1][1], name, colour))
    more = ", + per 1,000 tokens of context" if has_line else ""
    title(axes, f"milliseconds per token{more}")
    _finish(axes, lines, [ms for line in lines for some in line.ms for ms in some], ends)


def _words(found: Fit) -> str:
    sign = "+" if found.slope >= 0 else "\N{MINUS SIGN}"
    return f"{found.intercept:#.3g} {sign} {abs(found.slope) * 1e3:#.2g}"


def _look(i: int) -> tuple[str, str]:
    return COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)]


def _bar(samples: Sequence[float]) -> tuple[float, float, float]:
    """Least, mean and largest."""
    return min(samples), sum(samples) / len(samples), max(samples)


def _mark(
    axes: Axes,
    at: float,
    bar: tuple[float, float, float],
    colour: str,
    marker: str,
    *,
    sideways: bool = False,
) -> None:
    low, mean, high = bar
    spread = [[mean - low], [high - mean]]
    x, y = (mean, at) if sideways else (at, mean)
    axes.errorbar(
        [x],
        [y],
        xerr=spread if sideways else None,
        yerr=None if sideways else spread,
        color=colour,
        marker=marker,
        markersize=5,
        linestyle="none",
        elinewidth=1,
        capsize=2,
    )


def _finish(
    axes: Axes,
    lines: Sequence[Series],
    values: Sequence[float],
    ends: Sequence[tuple[float, str, str]],
) -> None:
    longest = max(max(line.depths) for line in lines)
    axes.set_xlabel("tokens of context")
    axes.set_xticks(*token_ticks(int(longest)))
    axes.set_xlim(-0.02 * longest, 1.02 * longest)
    bottom, top = limits(values)
    axes.set_ylim(bottom, top)
    quiet(axes)
    name_ends(axes, longest, ends, least=0.05 * (top - bottom))


def limits(values: Sequence[float]) -> tuple[float, float]:
    """The limits of an axis: from 0, unless that would leave more than half of it empty."""
    low, high = min(values), max(values)
    if low < high / 2:
        return 0.0, 1.06 * high
    room = max(0.12 * (high - low), 0.03 * high)
    return low - room, high + room
