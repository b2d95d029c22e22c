"""The figure of `quality.py`: divergence over bits per value, one panel for each model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from quality_bits import LENGTHS
from quality_caches import EQUAL_TAIL, FLOATS
from quality_report import Measured, Report
from quality_table import MOST_BITS, default_sink, is_auto

from localkv.commands.perplexity import Point, unbeaten
from localkv.commands.pictures import (
    BLUE,
    GREEN,
    INK,
    MIXED,
    MUTED,
    ORANGE,
    PINK,
    name_points,
    quiet,
)
from localkv.quant_formats import KV_FORMATS

SHORT, LONG = LENGTHS
TICKS = (2.5, 3, 4, 5, 6, 7, 8)
INTEGERS, BY_CHANNEL, CODEBOOKS, FLOAT, BY_LAYER = BLUE, GREEN, PINK, ORANGE, INK
COLOURS = {
    INTEGERS: "integers, a scale for a token's 32 values or for all",
    BY_CHANNEL: "K by channel, over 32 tokens",
    CODEBOOKS: "codebooks, outliers apart",
    FLOAT: "8-bit floats",
}


def draw(report: Report, path: Path) -> None:
    """Write the figure."""
    figure = Figure(figsize=(15, 8), layout="constrained", facecolor="white")
    panels = figure.subplots(1, len(report.models), sharey=True, squeeze=False)[0]
    shown = [one for one in report.results if is_shown(one)]
    low, high = (bound(one.kld.value for one in shown) for bound in (min, max))
    figure.legend(handles=keys(), loc="outside upper center", ncols=4, fontsize=9, frameon=False)
    panels[0].set_ylabel("mean KL divergence from an f16 cache (nats)", fontsize=10, color=INK)
    figure.supxlabel(
        f"bits per cached value after {LONG:,} tokens: K and V, with scales, tail and sink; a line "
        f"leads to those after {SHORT:,}",
        fontsize=10,
        color=INK,
    )
    for axes, name in zip(panels, report.models, strict=True):
        axes.set_yscale("log")
        axes.set_ylim(low / 2, high * 2)
        axes.set_xlim(min(one.bits_after[LONG] for one in shown) - 0.4, MOST_BITS)
        axes.set_xticks(TICKS, [f"{tick:g}" for tick in TICKS])
        quiet(axes, grid="y")
        title = "the model" if name == report.models[0] else f"outlier twin, {name}"
        axes.set_title(title, fontsize=12, color=INK, loc="left")
    figure.canvas.draw()
    for axes, name in zip(panels, report.models, strict=True):
        panel(axes, [one for one in shown if one.model == name])
    figure.savefig(path, dpi=100)


def is_shown(one: Measured) -> bool:
    """Pairs for both sides as they are rotated by themselves, without a tail or with one; of single
    types those that are not rotated, too; and types by layer."""
    if one.variant or not one.kld.value or one.bits_after[LONG] > MOST_BITS:
        return False
    if one.layers:
        return True
    rotated_as_used = is_auto(one) or (one.type_k == one.type_v and not has_tail(one))
    if one.type_k == one.type_v and one.type_k in FLOATS and not is_auto(one):
        return False
    usual = not one.smoothed and one.sink == default_sink(one)
    return usual and rotated_as_used and one.tail in (0, EQUAL_TAIL) and "f16" not in pair_of(one)


def pair_of(one: Measured) -> tuple[str, str]:
    return one.type_k, one.type_v


def has_tail(one: Measured) -> bool:
    return one.tail > 0


def panel(axes: Axes, found: Sequence[Measured]) -> None:
    by_layer = [one for one in found if one.layers]
    pairs = [one for one in found if not one.layers]
    for one in pairs:
        dot(axes, one)
    without = frontier(one for one in pairs if not has_tail(one))
    with_tail = frontier(one for one in pairs if has_tail(one))
    line(axes, without, "-")
    line(axes, with_tail, (0, (5, 3)))
    for is_tailed in (False, True):
        line(axes, points(one for one in by_layer if has_tail(one) == is_tailed), (0, (1, 2)))
    axes.scatter(
        *zip(*[point[:2] for point in points(by_layer)], strict=True),
        marker="*",
        s=46,
        color=BY_LAYER,
        linewidths=0,
        zorder=5,
    )
    best = list(dict.fromkeys((*without, *with_tail)))
    single = [one for one in pairs if one.type_k == one.type_v and not has_tail(one)]
    others = [
        (x, y, name)
        for (x, y, name), one in zip(points(single), single, strict=True)
        if is_auto(one) and (x, y, name) not in best
    ]
    named = [(*point, MUTED if "/" in point[2] else colour(point[2])) for point in (*best, *others)]
    name_points(
        axes,
        named,
        others=[point[:2] for point in points(found)],
        line=[point[:2] for point in without],
    )


def dot(axes: Axes, one: Measured) -> None:
    """A filled dot as used, a hollow one if that would be rotated, a ring around it with a tail;
    a line to the bits of a short text."""
    x, y = one.bits_after[LONG], one.kld.value
    if has_tail(one):
        axes.plot([x, one.bits_after[SHORT]], [y, y], color=MIXED, linewidth=0.6, zorder=1)
    tint = colour(one.pair)
    axes.scatter(
        [x],
        [y],
        s=22 if one.type_k == one.type_v else 12,
        c=tint if is_auto(one) else "white",
        edgecolors=INK if has_tail(one) else tint,
        linewidths=0.9,
        zorder=3,
    )


def colour(pair: str) -> str:
    """By the type of K; grey for pairs of two families."""
    k, _, v = pair.partition("/")
    of_k, of_v = family(k), family(v or k)
    if of_k == BY_CHANNEL:
        return of_k
    return of_k if of_k == of_v else MIXED


def family(name: str) -> str:
    fmt = KV_FORMATS[name]
    if name in FLOATS:
        return FLOAT
    if fmt.group_tokens > 1:
        return BY_CHANNEL
    return CODEBOOKS if fmt.n_centroids else INTEGERS


def points(found: Iterable[Measured]) -> list[Point]:
    return [(one.bits_after[LONG], one.kld.value, one.pair) for one in found]


def frontier(found: Iterable[Measured]) -> list[Point]:
    """The caches that are rotated as used, and that no other one beats."""
    best: list[Point] = unbeaten(points(one for one in found if is_auto(one)))
    return best


def line(axes: Axes, found: Sequence[Point], style: object) -> None:
    axes.plot(
        [point[0] for point in found],
        [point[1] for point in found],
        color=INK,
        linewidth=1.1,
        linestyle=style,  # type: ignore[arg-type]
        zorder=2,
    )


def keys() -> list[Line2D]:
    def key(label: str, face: str, edge: str, marker: str = "o", size: float = 6) -> Line2D:
        return Line2D(
            [],
            [],
            marker=marker,
            linestyle="",
            markerfacecolor=face,
            markeredgecolor=edge,
            markersize=size,
            label=label,
        )

    def stroke(label: str, style: object) -> Line2D:
        return Line2D([], [], color=INK, linewidth=1.1, linestyle=style, label=label)  # type: ignore[arg-type]

    return [
        *(key(label, tint, tint) for tint, label in COLOURS.items()),
        key("K and V of two kinds", MIXED, MIXED, size=4),
        key("not rotated, where others are", "white", INTEGERS),
        key(f"with a tail of {EQUAL_TAIL} tokens", MIXED, INK),
        key("types by layer, smoothed", BY_LAYER, BY_LAYER, "*", 8),
        stroke("least divergence without a tail", "-"),
        stroke("with a tail", (0, (5, 3))),
    ]
