"""The figure of `quality.py`: divergence over bits per value, one panel for each model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from quality_table import MOST_BITS, Measured, Report

from localkv.cli.perplexity_plot import unbeaten

FEWEST_BITS = 4.2

INK, MUTED, GRID = "#222222", "#6b6b6b", "#e6e6e6"
INTEGERS, FLOATS, MIXED = "#0072b2", "#d55e00", "#b4b4b4"
"""Okabe and Ito's blue and vermillion, which no kind of colour blindness confuses."""

TICKS = (4.5, 5, 5.5, 6, 7, 8, 8.5)
LABEL_GAP = 0.034
"""Least distance of labels above one another, as a share of the panel's height."""


def draw(report: Report, path: Path) -> None:
    """Write the figure."""
    figure = Figure(figsize=(11.5, 5.6), layout="constrained", facecolor="white")
    panels = figure.subplots(1, len(report.models), sharey=True, squeeze=False)[0]
    shown = [r for r in report.results if r.bits_per_value <= MOST_BITS and r.kld.value > 0]
    low, high = (bound(r.kld.value for r in shown) for bound in (min, max))
    for axes, name in zip(panels, report.models, strict=True):
        axes.set_yscale("log")
        axes.set_ylim(low / 2.5, high * 2)
        axes.set_xlim(FEWEST_BITS, MOST_BITS)
        axes.set_xticks(TICKS, [f"{tick:g}" for tick in TICKS])
        axes.grid(axis="y", color=GRID, linewidth=0.8)
        axes.tick_params(color=MUTED, labelcolor=MUTED, labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(MUTED)
        axes.set_title(name, fontsize=11, color=INK, loc="left")
        _panel(axes, [result for result in shown if result.model == name])
    panels[0].set_ylabel("mean KL divergence from an f16 cache (nats)", fontsize=9, color=INK)
    figure.supxlabel("bits per cached value, mean of K and V", fontsize=9, color=INK)
    figure.legend(handles=_keys(), loc="outside upper center", ncols=6, fontsize=8.5, frameon=False)
    figure.savefig(path, dpi=110)


def _panel(axes: Axes, results: Sequence[Measured]) -> None:
    mixed = [r for r in results if r.type_k != r.type_v]
    axes.scatter(
        [r.bits_per_value for r in mixed], [r.kld.value for r in mixed], s=9, c=MIXED, zorder=2
    )
    best = unbeaten([(r.bits_per_value, r.kld.value, r.pair) for r in results])
    axes.plot([b[0] for b in best], [b[1] for b in best], color=INK, linewidth=1.1, zorder=1)
    columns: dict[float, list[tuple[float, str, str]]] = {}
    pure: dict[str, dict[str, Measured]] = {}
    for result in results:
        if result.type_k == result.type_v:
            pure.setdefault(result.type_k, {})[result.rotation] = result
    for name, by_rotation in pure.items():
        colour = FLOATS if name.startswith("fp8") else INTEGERS
        bits = next(iter(by_rotation.values())).bits_per_value
        klds = {rotation: result.kld.value for rotation, result in by_rotation.items()}
        axes.plot([bits] * len(klds), list(klds.values()), color=colour, linewidth=0.8, zorder=3)
        for rotation, kld in klds.items():
            face = colour if rotation == "on" else "white"
            axes.scatter([bits], [kld], s=24, c=face, edgecolors=colour, linewidths=1.2, zorder=4)
        columns.setdefault(bits, []).append((min(klds.values()), name, colour))
    for bits, kld, pair in best:
        if "/" in pair:
            columns.setdefault(bits, []).append((kld, pair, MUTED))
    for bits, labels in columns.items():
        _label(axes, bits, labels)


def _label(axes: Axes, bits: float, labels: Sequence[tuple[float, str, str]]) -> None:
    """Names beside the points of one column, moved up where they would overlap."""
    low, high = map(math.log, axes.get_ylim())
    leftwards = bits > 7.5  # where fp8 and q8_0 crowd, the room is to the left
    at = -math.inf
    for kld, name, colour in sorted(labels):
        at = max(at + LABEL_GAP, (math.log(kld) - low) / (high - low))
        axes.annotate(
            name.removeprefix("fp8_") if leftwards else name,
            (bits, math.exp(low + at * (high - low))),
            xytext=(-6 if leftwards else 6, 0),
            textcoords="offset points",
            fontsize=7.5,
            color=colour,
            horizontalalignment="right" if leftwards else "left",
            verticalalignment="center",
            zorder=5,
        )


def _keys() -> list[Line2D]:
    def dot(colour: str, label: str, *, face: str | None = None, size: float = 6) -> Line2D:
        return Line2D(
            [], [], marker="o", linestyle="", color=colour, markerfacecolor=face or colour,
            markersize=size, label=label,
        )  # fmt: skip

    return [
        dot(INTEGERS, "integer types"),
        dot(FLOATS, "8-bit floats"),
        dot(INK, "rotated"),
        dot(INK, "not rotated", face="white"),
        dot(MIXED, "another type for V than for K", size=4),
        Line2D([], [], color=INK, linewidth=1.1, label="frontier: least KLD for its bits"),
    ]
