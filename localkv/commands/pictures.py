"""Pictures: the file that `--plot` names, and the look of what is drawn in it.

All pictures have quiet axes, one palette, and names beside what they name. The colours are Okabe
and Ito's, which no kind of colour blindness confuses. The paper is white, in files of every kind,
so that a picture reads on dark pages, too.
"""

from __future__ import annotations

import importlib.util
import io
import zlib
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from localkv.cache.layout import PAGE_TOKENS
from localkv.commands.output import check_writable
from localkv.errors import UsageError
from localkv.system.files import write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Annotation


KINDS = (".png", ".svg", ".pdf")


def check_plot(path: str) -> None:
    """Find out before anything is measured that no picture could be made.

    Raises:
        UsageError: matplotlib is missing, or the file can't be written.
    """
    if Path(path).suffix.lower() not in KINDS:
        raise UsageError(
            f"--plot {path}: not a kind of picture", hint=f"end it in {', '.join(KINDS)}"
        )
    check_writable(Path(path))
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib", hint="pip install 'localkv[plot]'")


def save(figure: Figure, path: str) -> None:
    """Write a figure: the same figure, the same bytes."""
    from matplotlib import rc_context

    dates = {".svg": "Date", ".pdf": "CreationDate"}
    kind, picture = Path(path).suffix.lower(), io.BytesIO()
    with rc_context({"svg.hashsalt": "localkv"}):
        metadata = {dates[kind]: None} if kind in dates else None
        figure.savefig(picture, format=kind[1:], dpi=150, metadata=metadata)
    write_whole(path, _opaque(picture) if kind == ".png" else picture.getvalue())


def _opaque(png: io.BytesIO) -> bytes:
    """The picture without its channel of transparency, which is empty: fewer bytes."""
    from PIL import Image

    smaller = io.BytesIO()
    options = {"compress_level": 9, "compress_type": zlib.Z_DEFAULT_STRATEGY, "dpi": (150, 150)}
    Image.open(png).convert("RGB").save(smaller, "PNG", **options)
    return smaller.getvalue()


INK, MUTED, GRID, MIXED = "#222222", "#6b6b6b", "#e6e6e6", "#b4b4b4"
BLUE, ORANGE, GREEN, PINK = "#0072b2", "#d55e00", "#009e73", "#cc79a7"
COLOURS = (BLUE, ORANGE, GREEN, PINK, INK, "#b8860b", "#3a9bd6", MUTED)
"""For lines, in this order; yellow is darker than theirs, since names are written in it."""
MARKERS = "osD^vPX*"
INTEGERS, E4M3, E5M2 = BLUE, ORANGE, PINK
"""Families of cache types."""
TICKS = (2.5, 3, 3.5, 4, 4.5, 5, 5.5, 6, 7, 8, 8.5)
"""Bits per value that packed types have."""


def quiet(axes: Axes, *, grid: str = "both") -> None:
    """Only what helps to read values: no box, a light grid, muted numbers."""
    axes.grid(axis=grid, color=GRID, linewidth=0.8)  # type: ignore[arg-type]
    axes.set_axisbelow(True)
    axes.tick_params(color=MUTED, labelcolor=MUTED, labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(MUTED)
    for label in (axes.xaxis.label, axes.yaxis.label):
        label.set_color(INK)
        label.set_fontsize(9)


def title(axes: Axes, text: str) -> None:
    axes.set_title(text, loc="left", fontsize=11, color=INK)


def name_ends(
    axes: Axes, x: float, ends: Sequence[tuple[float, str, str]], *, least: float
) -> None:
    """Names right of the ends of lines, none over another.

    Args:
        ends: y, name and colour.
        least: between two names, in units of y.
    """
    places = apart([end[0] for end in ends], least)
    above = max(0.0, max(places) + least / 2 - axes.get_ylim()[1])  # where the title is
    for y, (_, name, colour) in zip(places, ends, strict=True):
        axes.annotate(
            name,
            (x, y - above),
            xytext=(8, 0),
            textcoords="offset points",
            color=ink(colour),
            fontsize=8.5,
            verticalalignment="center",
            annotation_clip=False,
        )


def ink(colour: str) -> str:
    """A colour for text: the same, dark enough to be read on white."""
    channels = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{int(0.78 * channel):02x}" for channel in channels)


def apart(values: Sequence[float], least: float) -> list[float]:
    """Places of labels at these values, moved where they would be nearer than `least`.

    Labels that are in each other's way make a block around the middle of their values.
    """
    order = sorted(range(len(values)), key=values.__getitem__)
    blocks: list[list[float]] = []  # sum of places wanted by the first label, labels
    for rank, i in enumerate(order):
        blocks.append([values[i] - least * rank, 1])
        while len(blocks) > 1 and blocks[-2][0] / blocks[-2][1] > blocks[-1][0] / blocks[-1][1]:
            total, n = blocks.pop()
            blocks[-1][0] += total
            blocks[-1][1] += n
    placed, rank = list(values), 0
    for total, n in blocks:
        for _ in range(int(n)):
            placed[order[rank]] = total / n + least * rank
            rank += 1
    return placed


def token_ticks(n_tokens: int) -> tuple[list[int], list[str]]:
    """Places and names on an axis of tokens: up to nine, by powers of two."""
    step = PAGE_TOKENS
    while n_tokens / step > 8:
        step *= 2
    places = list(range(0, n_tokens + 1, step))
    return places, [f"{n // 1024}k" if step % 1024 == 0 and n else str(n) for n in places]


def family_colour(cache_type: str) -> str:
    if not cache_type.startswith("fp8"):
        return INTEGERS
    return E4M3 if "e4m3" in cache_type else E5M2


def family_marker(cache_type: str) -> str:
    """A circle for a type without scales of its own, or with blocks; fp8's show their scales."""
    return {"head": "^", "token": "s"}.get(cache_type.rsplit("_", 1)[-1], "o")


_PLACES = (
    ((-5, -6), "right", "top"),
    ((6, 0), "left", "center"),
    ((-6, 0), "right", "center"),
    ((5, 6), "left", "bottom"),
    ((0, -8), "center", "top"),
    ((0, 8), "center", "bottom"),
    ((5, -6), "left", "top"),
    ((-5, 6), "right", "bottom"),
)
"""Where a name may stand beside its point, in order of preference."""


def name_points(
    axes: Axes,
    points: Sequence[tuple[float, float, str, str]],
    *,
    others: Sequence[tuple[float, float]] = (),
    line: Sequence[tuple[float, float]] = (),
) -> None:
    """Names beside points, where they hide no point, no line and no other name.

    Names for which there is no room are left out, so the most important points come first.

    Args:
        points: x, y, name and colour. The axes' limits must be final.
        others: points without a name.
        line: the corners of a line.
    """
    figure = axes.get_figure(root=True)
    assert figure is not None
    figure.canvas.draw()  # places are known from now on
    scale = figure.dpi / 72
    places = [axes.transData.transform(point[:2]) for point in (*points, *others)]
    taken = [_square(x, y, 4 * scale) for x, y in places]
    corners = [axes.transData.transform(corner) for corner in line]
    for (ax, ay), (bx, by) in pairwise(corners):
        n_steps = max(1, int(max(abs(bx - ax), abs(by - ay)) / (3 * scale)))
        for i in range(n_steps + 1):
            share = i / n_steps
            taken.append(_square(ax + share * (bx - ax), ay + share * (by - ay), scale))
    frame = axes.get_window_extent()
    for x, y, name, colour in points:
        for offset, horizontal, vertical in _PLACES:
            label = _label(axes, (x, y), name, ink(colour), offset, horizontal, vertical)
            box = label.get_window_extent()
            place = (box.x0, box.y0, box.x1, box.y1)
            inside = frame.x0 <= box.x0 and box.x1 <= frame.x1
            inside &= frame.y0 <= box.y0 and box.y1 <= frame.y1
            if inside and not any(_overlap(place, other) for other in taken):
                taken.append(place)
                break
            label.remove()


def _label(
    axes: Axes,
    place: tuple[float, float],
    name: str,
    colour: str,
    offset: tuple[float, float],
    horizontal: str,
    vertical: str,
) -> Annotation:
    return axes.annotate(
        name,
        place,
        xytext=offset,
        textcoords="offset points",
        fontsize=8,
        color=colour,
        horizontalalignment=horizontal,
        verticalalignment=vertical,
        annotation_clip=False,
        zorder=5,
    )


Box: TypeAlias = tuple[float, float, float, float]
"""Left, bottom, right and top, in pixels."""


def _square(x: float, y: float, half: float) -> Box:
    return x - half, y - half, x + half, y + half


def _overlap(a: Box, b: Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
