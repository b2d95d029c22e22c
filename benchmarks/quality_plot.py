"""The figure of `quality.py`: divergence over bits per value, one panel for each model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from quality_table import MOST_BITS, Measured, Report

from localkv.cli.perplexity_plot import unbeaten
from localkv.cli.plot_style import (
    E4M3,
    E5M2,
    INK,
    INTEGERS,
    MIXED,
    MUTED,
    TICKS,
    family_colour,
    family_marker,
    quiet,
)

FEWEST_BITS = 3.9
"""Where the axis begins: left of the smallest types there is room for their names."""

NO_SCALE, HEAD_SCALE, TOKEN_SCALE = "o", "^", "s"
DODGE = {"iq4_nl": -0.1, "q4_0": 0.1, "fp8_e4m3_head": -0.08, "fp8_e5m2_head": -0.08}
"""Bits to the side, where types of equal bits would hide one another."""


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
        quiet(axes, grid="y")
        title = "the model" if name == report.models[0] else f"outlier twin, {name}"
        axes.set_title(title, fontsize=11, color=INK, loc="left")
        _panel(axes, [result for result in shown if result.model == name])
    panels[0].set_ylabel("mean KL divergence from an f16 cache (nats)", fontsize=9, color=INK)
    figure.supxlabel("bits per cached value, mean of K and V", fontsize=9, color=INK)
    figure.legend(handles=_keys(), loc="outside upper center", ncols=5, fontsize=8.5, frameon=False)
    figure.savefig(path, dpi=110)


def _panel(axes: Axes, results: Sequence[Measured]) -> None:
    mixed = [r for r in results if r.type_k != r.type_v]
    axes.scatter(
        [r.bits_per_value for r in mixed], [r.kld.value for r in mixed], s=9, c=MIXED, zorder=2
    )
    best = unbeaten([(r.bits_per_value, r.kld.value, r.pair) for r in results])
    axes.plot([b[0] for b in best], [b[1] for b in best], color=INK, linewidth=1.1, zorder=1)
    for bits, kld, pair in best:
        if "/" in pair:
            _label(axes, bits, kld, pair, MUTED)
    pure: dict[str, list[Measured]] = {}
    for result in results:
        if result.type_k == result.type_v:
            pure.setdefault(result.type_k, []).append(result)
    for name, rotations in pure.items():
        bits = rotations[0].bits_per_value + DODGE.get(name, 0)
        klds = [result.kld.value for result in rotations]
        colour = family_colour(name)
        axes.plot([bits] * len(klds), klds, color=colour, linewidth=0.8, zorder=3)
        for result in rotations:
            axes.scatter(
                [bits],
                [result.kld.value],
                s=24,
                c=colour if result.rotation == "on" else "white",
                marker=family_marker(name),
                edgecolors=colour,
                linewidths=1.2,
                zorder=4,
            )
        if colour == INTEGERS:
            is_best = any(pair == name for _, _, pair in best)
            _label(axes, bits, min(klds) if is_best else max(klds), name, colour, above=not is_best)


def _label(
    axes: Axes, bits: float, kld: float, name: str, colour: str, *, above: bool = False
) -> None:
    """A name below and left of a point, where the frontier, which falls, leaves room; or above."""
    axes.annotate(
        name,
        (bits, kld),
        xytext=(3, 4) if above else (-4, -4),
        textcoords="offset points",
        fontsize=7.5,
        color=colour,
        rotation=40,
        rotation_mode="anchor",
        horizontalalignment="left" if above else "right",
        verticalalignment="center",
        zorder=5,
    )


def _keys() -> list[Line2D]:
    def dot(
        colour: str, label: str, *, face: str | None = None, size: float = 6, marker: str = NO_SCALE
    ) -> Line2D:
        return Line2D(
            [],
            [],
            marker=marker,
            linestyle="",
            color=colour,
            markerfacecolor=face or colour,
            markersize=size,
            label=label,
        )

    return [  # a column each two
        dot(INTEGERS, "q8_0 ... q4_0, iq4_nl"),
        dot(MIXED, "another type for V than for K", size=4),
        dot(E4M3, "fp8_e4m3"),
        dot(E5M2, "fp8_e5m2"),
        dot(MUTED, "fp8 scaled by head", marker=HEAD_SCALE, face="white"),
        dot(MUTED, "fp8 scaled by token", marker=TOKEN_SCALE, face="white"),
        dot(INK, "rotated"),
        dot(INK, "not rotated", face="white"),
        Line2D([], [], color=INK, linewidth=1.1, label="frontier: least KLD for its bits"),
    ]
