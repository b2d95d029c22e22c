"""The speed of generation over depth as a picture: tokens per second, and the time per token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from localkv.bench.grid import Grid
from localkv.cli.messages import note
from localkv.cli.picture_file import check_plot, save
from localkv.errors import UsageError

if TYPE_CHECKING:
    from localkv.bench.result import Result

# Okabe and Ito's colours, distinct with any colour vision, and a marker each
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "osD^vPX"


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
        f"{result.n_threads} threads",
        f"-b {setting.n_batch}",
        f"-ub {setting.n_ubatch}",
        f"tg{result.test.n_gen}",
    )


def _mean_depth(result: Result) -> float:
    return result.test.n_before_gen + (result.test.n_gen + 1) / 2


def fit(x: Sequence[float], y: Sequence[float]) -> tuple[float, float] | None:
    """(intercept, slope) of the straight line with the least squares; None from one place."""
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    variance = sum((a - mean_x) ** 2 for a in x)
    if variance == 0:
        return None
    slope = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / variance
    return mean_y - slope * mean_x, slope


def plot(results: Sequence[Result], path: str) -> None:
    """Draw tokens per second, and milliseconds per token with a straight line through them.

    Bars span all repetitions.
    """
    from matplotlib.figure import Figure

    lines = series(results)
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    speed, latency = figure.subplots(1, 2)
    machine = results[0].machine
    where = machine.gpu if machine.backend == "cuda" else machine.cpu
    kinds = dict.fromkeys(result.source.kind for result in results)
    threads = dict.fromkeys(result.n_threads for result in results)
    what = f"{', '.join(kinds)} on {where}"
    if machine.backend != "cuda" and len(threads) == 1:
        what += f", {next(iter(threads))} threads"
    figure.suptitle(what, fontsize=11)
    for i, line in enumerate(lines):
        style = {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[i % len(MARKERS)]}
        per_second = [[1e3 / ms for ms in samples] for samples in line.ms]
        _points(speed, line.depths, per_second, line.label, style, "-")
        found = fit(line.depths, line.mean_ms)
        label = line.label
        if found is not None:
            intercept, slope = found
            ends = [0.0, max(line.depths)]
            fitted = [intercept + slope * depth for depth in ends]
            latency.plot(ends, fitted, color=style["color"], linewidth=1)
            sign = "+" if slope >= 0 else "−"
            more = f"{sign} {abs(slope) * 1e3:#.2g} ms per 1,000 tokens"
            label = f"{line.label}: {intercept:.3g} ms {more}"
        _points(latency, line.depths, line.ms, label, style, "none")
    if all(fit(line.depths, line.mean_ms) is None for line in lines):
        note("no slope is fitted through one depth; add some, as in -d 0-8192+2048")
    for axes, title in ((speed, "tokens per second"), (latency, "milliseconds per token")):
        axes.set_title(title, loc="left", fontsize=10)
        axes.set_xlabel("tokens of context")
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.set_ylim(bottom=0)
        axes.margins(x=0.03)
        axes.grid(True, alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    speed.legend(title="K/V", fontsize=8, title_fontsize=8, frameon=False, loc="lower left")
    latency.legend(fontsize=8, frameon=False, loc="lower right")
    save(figure, path)


def _points(
    axes: Any,
    x: Sequence[float],
    samples: Sequence[Sequence[float]],
    label: str,
    style: dict[str, str],
    line: str,
) -> None:
    """Means, and bars from the least to the largest."""
    means = [sum(values) / len(values) for values in samples]
    below = [mean - min(values) for mean, values in zip(means, samples, strict=True)]
    above = [max(values) - mean for mean, values in zip(means, samples, strict=True)]
    axes.errorbar(
        x,
        means,
        yerr=[below, above],
        label=label,
        linestyle=line,
        linewidth=1.5,
        elinewidth=1,
        capsize=2,
        markersize=5,
        **style,
    )
