"""A sweep as a picture: divergence from f16 against the bits of a cached value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from localkv.cli.output.messages import note
from localkv.cli.output.picture_file import save
from localkv.cli.output.plot_style import (
    INK,
    MIXED,
    MUTED,
    TICKS,
    family_colour,
    family_marker,
    name_points,
    quiet,
    title,
)
from localkv.cli.perplexity.report import CacheResult
from localkv.errors import counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from localkv.arch.spec import ModelSpec

PACKED_BITS = 9.0
"""Types to choose between have fewer; f16, bf16 and f32 would take most of the picture."""
FEW = 3
"""Points that are worth a picture of their own."""
MOST_BEYOND = 4
"""Points outside the axes that are listed."""
MOST_LABELS = 40
"""Points up to which every one gets its name; beyond, only single types and those that no other
beats do."""

Point = tuple[float, float, str]
"""Bits per value, KLD and name."""


def plot(results: Sequence[CacheResult], path: str, *, heading: str, config: ModelSpec) -> None:
    """Draw mean KLD on a log scale, where a divergence of 0 has no place, against bits per value.

    A pair is labelled K/V, and with one name where both are the same.
    """
    from matplotlib.figure import Figure

    points = _points(results, config)
    shown, beyond = cut(points)
    figure = Figure(figsize=(8, 5), layout="constrained", facecolor="white")
    axes = figure.add_subplot()
    title(axes, heading)
    axes.set_xlabel("bits per cached value, mean of K and V")
    axes.set_ylabel("mean KL divergence from f16 (nats)")
    quiet(axes, grid="y")
    if shown:
        _draw(axes, shown)
    if beyond:
        axes.annotate(
            _beyond_words(beyond), (0.015, 0.02), xycoords="axes fraction", fontsize=8, color=MUTED
        )
    save(figure, path)


def _beyond_words(points: Sequence[Point]) -> str:
    in_order = sorted(points, key=lambda point: ("/" in point[2], point))
    lines = [f"{name}: {kld:.1g}" for _, kld, name in in_order[:MOST_BEYOND]]
    more = len(points) - len(lines)
    lines += [f"and {counted(more, 'pair')} more"] if more else []
    return "\n".join([f"with more than {PACKED_BITS:g} bits", *lines])


def _points(results: Sequence[CacheResult], config: ModelSpec) -> list[Point]:
    from localkv.memory.kv_bytes import mean_bits

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
    return points


def cut(points: Sequence[Point]) -> tuple[list[Point], list[Point]]:
    """Points that the axes show, and the others, if those of packed types are enough."""
    packed = [point for point in points if point[0] < PACKED_BITS]
    if len(packed) < FEW:
        return list(points), []
    return packed, [point for point in points if point[0] >= PACKED_BITS]


def _draw(axes: Axes, points: Sequence[Point]) -> None:
    best = unbeaten(points)
    least, most = min(p[1] for p in points), max(p[1] for p in points)
    axes.set_yscale("log")
    axes.set_ylim(least / 2, most * 2)
    bits = [p[0] for p in points]
    if max(bits) < PACKED_BITS:
        axes.set_xticks(TICKS, [f"{tick:g}" for tick in TICKS])
    room = 0.12 * max(1.0, max(bits) - min(bits))
    axes.set_xlim(min(bits) - room, max(bits) + room)
    axes.plot([p[0] for p in best], [p[1] for p in best], color=INK, linewidth=1.1, zorder=1)
    for x, kld, name in sorted(points, key=lambda point: "/" not in point[2]):
        axes.scatter(
            [x], [kld], s=26, c=_colour(name), marker=_marker(name), linewidths=0, zorder=3
        )
    rest = sorted(set(points) - set(best), key=lambda point: ("/" in point[2], -point[1]))
    if len(points) > MOST_LABELS:
        rest = [point for point in rest if "/" not in point[2]]
    named = [
        (x, kld, name, MUTED if "/" in name else _colour(name)) for x, kld, name in (*best, *rest)
    ]
    corners = [point[:2] for point in best]
    name_points(axes, named, others=[point[:2] for point in points], line=corners)


def _colour(name: str) -> str:
    return MIXED if "/" in name else family_colour(name)


def _marker(name: str) -> str:
    return "o" if "/" in name else family_marker(name)


def unbeaten(points: Sequence[Point]) -> list[Point]:
    """(bits, KLD, name) of those that no other has both fewer bits and less divergence than."""
    best: list[Point] = []
    for point in sorted(points):
        if not best or point[1] < best[-1][1]:
            best.append(point)
    return best
