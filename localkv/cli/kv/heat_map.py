"""Tables of numbers as colours, on log scales."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from localkv.cli.output.plot_style import BLUE, INK, MUTED, ORANGE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap, LogNorm
    from matplotlib.figure import SubFigure
    from matplotlib.image import AxesImage

Floats = NDArray[np.float32]

MAGNITUDES = ("#f5f8fb", "#c6dcee", "#6aaed6", BLUE, "#00294a")
HARM = ("#fdf6ef", "#fbd9b5", "#f19a4b", ORANGE, "#5c1f00")
"""Colours from small to large."""
NONE = "#ececec"
"""Where there is no number."""
MOST_TICKS = 16


def heat_map(axes: Axes, values: Floats, norm: LogNorm, colours: Sequence[str]) -> AxesImage:
    """A cell for each number of [rows, columns], the first row at the top."""
    image = axes.imshow(
        np.ma.masked_invalid(values),
        cmap=_colour_map(colours),
        norm=norm,
        aspect="auto",
        interpolation="nearest",
    )
    axes.tick_params(color=MUTED, labelcolor=MUTED, labelsize=8, length=2)
    axes.spines[:].set_visible(False)
    for label in (axes.xaxis.label, axes.yaxis.label):
        label.set_color(INK)
        label.set_fontsize(9)
    return image


def _colour_map(colours: Sequence[str]) -> Colormap:
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("", list(colours)).with_extremes(bad=NONE)


def log_norm(tables: Sequence[Floats], *, most: float = 1e9) -> LogNorm:
    """From the smallest of all numbers above 0 to the largest.

    Args:
        most: the latter over the former, at most; what is smaller looks like the smallest.
    """
    from matplotlib.colors import LogNorm

    values = np.concatenate([table[np.isfinite(table) & (table > 0)] for table in tables])
    high = float(values.max(initial=0)) or 1.0
    low = float(values.min(initial=high))
    return LogNorm(min(max(low, high / most), high / 1.01), high, clip=True)


def colour_bar(panel: SubFigure, image: Any, pair: Any, label: str) -> None:
    """The scale of colours, right of the axes."""
    from matplotlib.ticker import LogLocator, NullLocator

    bar = panel.colorbar(image, ax=list(pair), aspect=18, pad=0.01, fraction=0.03)
    bar.set_label(label, fontsize=9, color=INK)
    bar.ax.tick_params(color=MUTED, labelcolor=MUTED, labelsize=8)
    steps = (1, 2, 5) if image.norm.vmax < 2000 * image.norm.vmin else (1,)
    bar.ax.yaxis.set_major_locator(LogLocator(subs=steps, numticks=9))
    bar.ax.yaxis.set_minor_locator(NullLocator())
    bar.ax.yaxis.set_major_formatter(
        lambda value, _: f"{value:g}" if value >= 0.01 else short(value)
    )
    bar.outline.set_visible(False)


def ticks(
    axis: Any,
    names: Sequence[str],
    places: Sequence[float] | None = None,
    *,
    most: int = MOST_TICKS,
) -> None:
    """A tick for each name, or for every second, fifth and so on.

    Args:
        places: of the names; None for 0, 1, 2 and so on.
        most: ticks.
    """
    step = next(n for n in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000) if len(names) <= n * most)
    axis.set_ticks((places or range(len(names)))[::step], list(names[::step]))


def numbers(axes: Axes, values: Floats, norm: LogNorm) -> None:
    """Write the numbers into the cells of a heat map."""
    shares = np.ma.getdata(norm(values))
    for row, column in np.argwhere(np.isfinite(values)).tolist():
        colour = "white" if shares[row, column] > _DARK else INK
        text = short(float(values[row, column]))
        axes.text(column, row, text, fontsize=7, color=colour, ha="center", va="center")


_DARK = 0.62
"""Of a colour's place, from 0 to 1, where dark letters can't be read any more."""


def short(value: float) -> str:
    """A small number in few letters, "1.2e-3"."""
    if value == 0:
        return "0"
    number, _, exponent = f"{value:.1e}".partition("e")
    return f"{value:.2g}" if value >= 0.01 else f"{number.removesuffix('.0')}e{int(exponent)}"
