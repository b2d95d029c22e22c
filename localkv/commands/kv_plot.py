"""K and V as a picture.

It has a row of panels each for magnitudes of channels, costs of types, and shifts of attention, as
far as they are known. A panel is a heat map: a table of numbers as colours on a log scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from localkv.cache.profile import OUTLIER, SideFacts
from localkv.commands.kv_view import KVView, Shift, outlier_runs
from localkv.commands.output import one_line
from localkv.commands.pictures import BLUE, INK, MUTED, ORANGE, ink, save, title, token_ticks
from localkv.errors import counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap, LogNorm
    from matplotlib.figure import Figure, SubFigure
    from matplotlib.image import AxesImage


WIDTH = 10
"""The picture's width, in inches."""
MOST_NAMES = 20
"""Outliers of one side that are named, the largest first."""
MOST_NUMBERS = 10
"""Layers, and heads, up to which cells have their numbers in them."""
MOST_COLUMNS = 128
"""Most columns of tokens; in a longer text a column is the mean of several."""
MOST_COST, MOST_SHIFT = 1e5, 50
"""The darkest colour's over the palest one's: what is smaller does not matter."""
_LINE, _LEAST_BAR = 11, 3
"""Points of a line of names, and of the mark of an outlier, at least."""


def draw(view: KVView, path: str) -> None:
    """Write the picture."""
    save(figure(view), path)


def figure(view: KVView) -> Figure:
    """The picture."""
    from matplotlib.figure import Figure

    n_rows = len(view.rows)
    parts: list[tuple[float, Any]] = [(1.5 + min(3.6, max(1.2, 0.32 * n_rows)), _channels)]
    if view.types:
        parts.append((1.3 + max(1.4, 0.2 * len(view.types)), _costs))
    if view.shift is not None:
        parts.append((1.3 + min(3.0, max(1.4, 0.28 * n_rows)), _shifts))
    heights = [height for height, _ in parts]
    whole = Figure(figsize=(WIDTH, sum(heights) + 0.3), layout="constrained", facecolor="white")
    heading = whole.suptitle(one_line(view.heading), fontsize=11, color=INK, x=0.01, ha="left")
    heading.set(fontweight="bold", parse_math=False)  # a name may have dollar signs
    panels = whole.subfigures(len(parts), 1, height_ratios=heights, squeeze=False)[:, 0]
    for panel, (_, fill) in zip(panels, parts, strict=True):
        panel.set_facecolor("white")
        fill(panel, view)
    whole.draw_without_rendering()
    for axes, of in zip(panels[0].axes, "kv", strict=False):  # once nothing moves any more
        _mark_outliers(axes, _sides(view, of))
    return whole


def _sides(view: KVView, of: str) -> list[SideFacts]:
    return [getattr(layer, of) for _, layer in view.rows]


def _channels(panel: SubFigure, view: KVView) -> None:
    """Layers by channels, the channels of a head side by side."""
    pair = panel.subplots(1, 2)
    tables = [channel_table(_sides(view, of)) for of in "kv"]
    norm = log_norm(tables)
    for axes, of, name, values in zip(pair, "kv", view.sides, tables, strict=True):
        image = heat_map(axes, values, norm, MAGNITUDES)
        title(axes, name)
        ticks(axes.yaxis, _names(view))
        axes.set_ylabel("layer")
        _head_ticks(axes, _sides(view, of))
    colour_bar(panel, image, pair, "largest |value|")
    found = any(side.outliers for of in "kv" for side in _sides(view, of))
    marked = f"; orange: channels above {OUTLIER:g} times the median of their head" if found else ""
    _heading(panel, f"Largest magnitude of each channel{marked}")


def _names(view: KVView) -> list[str]:
    """The names of the layers with rows."""
    return [str(i) for i, _ in view.rows]


def channel_table(sides: Sequence[SideFacts]) -> Floats:
    """float32 [layers, channels of all heads], not a number where a layer has fewer."""
    return _padded([side.channel_absmax.reshape(-1) for side in sides])


def _padded(rows: Sequence[Floats]) -> Floats:
    """Rows of different lengths as one table."""
    values = np.full((len(rows), max(map(len, rows))), np.nan, np.float32)
    for row, found in zip(values, rows, strict=True):
        row[: len(found)] = found
    return values


def _mark_outliers(axes: Axes, sides: Sequence[SideFacts]) -> None:
    """A bar at each outlier, and the names of the largest beside them, none over another.

    To be called when nothing moves any more.
    """
    from matplotlib.patheffects import withStroke
    from matplotlib.transforms import Bbox

    found = [
        (run, row, run.head * side.n_channels)
        for row, side in enumerate(sides)
        for run in outlier_runs(side)
    ]
    taken = []
    points = 72 / axes.figure.dpi * axes.bbox.width / np.ptp(axes.get_xlim())  # of a channel
    for run, row, head in found:
        ends = head + run.first - 0.5, head + run.last + 0.5
        more = max(0.0, _LEAST_BAR / points - (ends[1] - ends[0])) / 2
        axes.plot(
            [ends[0] - more, ends[1] + more],
            [row - 0.42] * 2,
            color=ORANGE,
            linewidth=2,
            solid_capstyle="butt",
        )
        corners = [(ends[0], row + 0.5), (ends[1], row - 0.5)]
        taken.append(Bbox(axes.transData.transform(corners)))
    height = 72 / axes.figure.dpi * axes.bbox.height / len(sides)
    lines = range(max(1, int(height / _LINE)))
    found.sort(key=lambda item: -item[0].times)
    for run, row, head in found[:MOST_NAMES]:
        for line, way in ((line, way) for line in lines for way in (1, -1)):
            label = axes.annotate(
                run.name.replace("-", "\N{EN DASH}"),
                (head + (run.last + 0.5 if way > 0 else run.first - 0.5), row - 0.5),
                xytext=(2 * way, -1 - _LINE * line),
                textcoords="offset points",
                horizontalalignment="left" if way > 0 else "right",
                verticalalignment="top",
                fontsize=7,
                color=ink(ORANGE),
                path_effects=[withStroke(linewidth=2, foreground="white")],
            )
            box = label.get_window_extent()
            inside = axes.bbox.x0 <= box.x0 and box.x1 <= axes.bbox.x1
            if inside and not any(box.overlaps(other) for other in taken):
                taken.append(box)
                break
            label.remove()


def _costs(panel: SubFigure, view: KVView) -> None:
    """Types by layers."""
    pair = panel.subplots(1, 2)
    tables = [cost_table(view, of) for of in "kv"]
    norm = log_norm(tables, most=MOST_COST)
    for side, (axes, values) in enumerate(zip(pair, tables, strict=True)):
        image = heat_map(axes, values, norm, HARM)
        title(axes, view.sides[side])
        labels = [f"{name}  {view.bits_of(name):g}" for name in view.types]
        axes.set_yticks(range(len(labels)), labels)
        ticks(axes.xaxis, _names(view))
        axes.set_xlabel("layer")
        if side == 0:
            axes.set_ylabel("type and its bits per value")
        if len(view.rows) <= MOST_NUMBERS:
            numbers(axes, values, norm)
        _frame_chosen(axes, view, side)
    colour_bar(panel, image, pair, "mean KLD from f16 (nats)")
    chosen = f"; blue: types by layer of {view.chosen.bits:.3g} bits" if view.chosen else ""
    _heading(panel, f"KL divergence with one layer's K, or V, in a type{chosen}")


def cost_table(view: KVView, of: str) -> Floats:
    """float32 [types, layers with rows], not a number where a type was not measured."""
    return np.array(
        [
            [getattr(layer, of).kld.get(name, np.nan) for _, layer in view.rows]
            for name in view.types
        ],
        np.float32,
    )


def _frame_chosen(axes: Axes, view: KVView, side: int) -> None:
    """Frames around the types that a profile gives to layers where nobody says how many bits."""
    from matplotlib.patches import Rectangle

    chosen = view.chosen
    if chosen is None:
        return
    for column, (index, _) in enumerate(view.rows):
        pair = chosen.layers[index]
        if pair is not None and pair[side] in view.types:
            row = view.types.index(pair[side])
            place = column - 0.5, row - 0.5
            axes.add_patch(Rectangle(place, 1, 1, fill=False, ec=BLUE, linewidth=2, zorder=4))


def _shifts(panel: SubFigure, view: KVView) -> None:
    """Layers by heads, then heads by tokens of the layer whose attention moves most."""
    shift = view.shift
    assert shift is not None
    left, right = pair = panel.subplots(1, 2, width_ratios=(1, 2.2))
    means, worst = 100 * head_table(shift), shift.by_layer[shift.worst]
    assert worst is not None
    columns, step = by_tokens(100 * worst)
    norm = log_norm([means, columns], most=MOST_SHIFT)
    heat_map(left, means, norm, HARM)
    title(left, "mean of all tokens")
    ticks(left.yaxis, [str(i) for i, moved in enumerate(shift.by_layer) if moved is not None])
    left.set_ylabel("layer")
    ticks(left.xaxis, list(map(str, range(means.shape[1]))), most=8)
    left.set_xlabel("head")
    if max(means.shape) <= MOST_NUMBERS:
        numbers(left, means, norm)
    image = heat_map(right, columns, norm, HARM)
    title(right, f"layer {shift.worst}, where attention moves most")
    ticks(right.yaxis, list(map(str, range(len(worst)))))
    right.set_ylabel("head")
    if worst.shape[1] < 2 * MOST_COLUMNS:
        ticks(right.xaxis, [str(step * i) for i in range(columns.shape[1])])
    else:
        marks = zip(*token_ticks(worst.shape[1]), strict=True)
        inside = [(place / step, name) for place, name in marks if place < worst.shape[1]]
        right.set_xticks([place for place, _ in inside], [name for _, name in inside])
    each = f", each column the mean of {step}" if step > 1 else ""
    right.set_xlabel(f"position of the token{each}")
    colour_bar(panel, image, pair, "change of attention's\noutput (% of its length)")
    _heading(panel, f"How far attention with {shift.types} is from that with f16")


def _heading(panel: SubFigure, text: str) -> None:
    panel.suptitle(text, fontsize=10, color=INK, x=0.01, ha="left")


def head_table(shift: Shift) -> Floats:
    """float32 [layers with attention, heads]: means of all tokens, not a number where a layer has
    fewer heads."""
    return _padded([moved.mean(1) for moved in shift.by_layer if moved is not None])


def by_tokens(moved: Floats) -> tuple[Floats, int]:
    """[heads, columns], each the mean of some tokens, and how many these are."""
    step = -(-moved.shape[1] // MOST_COLUMNS)
    starts = range(0, moved.shape[1], step)
    columns = [moved[:, at : at + step].mean(1) for at in starts]
    return np.stack(columns, 1), step


def _head_ticks(axes: Axes, sides: Sequence[SideFacts]) -> None:
    """Where heads begin and end, if all layers have the same."""
    shapes = {(side.n_heads, side.n_channels) for side in sides}
    if len(shapes) > 1:
        axes.set_xlabel("channel, head after head")
        return
    ((n_heads, n_channels),) = shapes
    if n_heads == 1:
        axes.set_xlabel("channel")
        return
    for head in range(1, n_heads):
        axes.axvline(head * n_channels - 0.5, color="white", linewidth=1.6 if n_heads < 16 else 0.5)
    middles = [(head + 0.5) * n_channels for head in range(n_heads)]
    ticks(axes.xaxis, list(map(str, range(n_heads))), middles)
    axes.tick_params(axis="x", length=0)
    axes.set_xlabel(f"KV head, {counted(n_channels, 'channel')} each")


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
"""The place of a colour, from 0 to 1, from which dark letters can't be read."""


def short(value: float) -> str:
    """A small number in few letters, "1.2e-3"."""
    if value == 0:
        return "0"
    number, _, exponent = f"{value:.1e}".partition("e")
    return f"{value:.2g}" if value >= 0.01 else f"{number.removesuffix('.0')}e{int(exponent)}"
