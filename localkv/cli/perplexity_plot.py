"""A sweep as a picture: divergence from f16 against the bits of a cached value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from localkv.cli.messages import note
from localkv.cli.perplexity_report import CacheResult
from localkv.cli.picture_file import save

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from localkv.arch.spec import ModelSpec

MOST_LABELS = 20
"""Points up to which every one gets its name; beyond, only those that no other beats do."""
LABEL_WIDTH, LABEL_HEIGHT = 90, 9
"""Of the longest name, in points."""
NEAR = 25
"""Points (of 1/72 inch) within which names go to opposite sides."""
Point = tuple[float, float, str]
"""Bits per value, KLD and name."""


def plot(results: Sequence[CacheResult], path: str, *, title: str, config: ModelSpec) -> None:
    """Draw mean KLD against bits per value, on log scales, where a divergence of 0 has no place.

    A pair is labelled K/V, and with one name where both are the same.
    """
    from matplotlib.figure import Figure

    from localkv.memory.plan import mean_bits

    points = []
    for result in results:
        assert result.divergence is not None
        name = result.cache.type_k
        if result.cache.type_v != name:
            name += f"/{result.cache.type_v}"
        if result.divergence.kld.value > 0:
            bits = mean_bits((result.cache.type_k, result.cache.type_v), config)
            points.append((bits, result.divergence.kld.value, name))
        else:
            note(f"{name} is not in the picture: its divergence is 0")
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title)
    axes.set_xlabel("bits per cached value (mean of K and V)")
    axes.set_ylabel("mean KL divergence from f16 (nats)")
    axes.grid(True, which="both", alpha=0.25)
    best = unbeaten(points)
    if points:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set_yscale("log")
        axes.plot([p[0] for p in best], [p[1] for p in best], color="tab:orange", zorder=1)
        axes.scatter([p[0] for p in points], [p[1] for p in points], s=18, zorder=2)
    axes.margins(x=0.1)
    figure.canvas.draw()  # places are known from now on
    for (
        bits,
        kld,
        name,
    ) in best:  # better pairs would lie at their lower left, so that place is free
        _label(axes, name, (bits, kld), (-4, -3), horizontal="right", vertical="top")
    if len(points) <= MOST_LABELS:
        _label_beside(axes, [point for point in points if point not in best])
    save(figure, path)


def _label_beside(axes: Axes, points: Sequence[Point]) -> None:
    """Names beside points, away from a neighbour, and lower where another name is in the way."""
    scale = 72 / axes.figure.dpi  # from pixels
    where = [axes.transData.transform(point[:2]) * scale for point in points]
    taken = list[tuple[bool, float, float]]()
    for (x, y), (bits, kld, name) in sorted(
        zip(where, points, strict=True), key=lambda item: -item[1][1]
    ):
        left = any(0 < px - x < NEAR and abs(py - y) < NEAR for px, py in where)
        goal = y
        for other_left, other_x, other_y in taken:  # from the top down
            near = left == other_left and abs(x - other_x) < LABEL_WIDTH
            if near and abs(goal - other_y) < LABEL_HEIGHT:
                goal = other_y - LABEL_HEIGHT
        taken.append((left, x, goal))
        side, horizontal = (-6, "right") if left else (6, "left")
        place = (bits, kld)
        _label(axes, name, place, (side, goal - y), horizontal=horizontal, vertical="center")


def _label(
    axes: Axes,
    name: str,
    place: tuple[float, float],
    offset: tuple[float, float],
    *,
    horizontal: str,
    vertical: str,
) -> None:
    axes.annotate(
        name,
        place,
        xytext=offset,
        textcoords="offset points",
        fontsize=7,
        horizontalalignment=horizontal,
        verticalalignment=vertical,
    )


def unbeaten(points: Sequence[Point]) -> list[Point]:
    """(bits, KLD, name) of those that no other has both fewer bits and less divergence than."""
    best: list[Point] = []
    for point in sorted(points):
        if not best or point[1] < best[-1][1]:
            best.append(point)
    return best
