"""A sweep as a picture: divergence from f16 against the bits of a cached value."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from localkv.cli.messages import note
from localkv.cli.perplexity_report import CacheResult
from localkv.cli.text_output import check_writable
from localkv.errors import UsageError

KINDS = (".png", ".svg", ".pdf")
MOST_LABELS = 20
"""Points up to which every one gets its name; beyond, only those that no other beats do."""


def check_plot(path: str) -> None:
    """Find out before anything is measured that no picture could be made.

    Raises:
        UsageError: matplotlib is missing, or the file can't be written.
    """
    if Path(path).suffix.lower() not in KINDS:
        raise UsageError(f"--plot {path}: no kind of picture", hint=f"end it in {', '.join(KINDS)}")
    check_writable(Path(path))
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib", hint="pip install 'localkv[plot]'")


def plot(results: Sequence[CacheResult], path: str, *, title: str, head_dim: int) -> None:
    """Draw mean KLD against bits per value, on log scales, where a divergence of 0 has no place.

    A pair is labelled K/V, and with one name where both are the same.
    """
    from matplotlib.figure import Figure

    from localkv.quality import bits_per_value

    points = []
    for result in results:
        assert result.divergence is not None
        name = result.cache.type_k
        if result.cache.type_v != name:
            name += f"/{result.cache.type_v}"
        if result.divergence.kld.value > 0:
            bits = bits_per_value(result.cache, head_dim)
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
    for point in points if len(points) <= MOST_LABELS else best:
        bits, kld, name = point
        # the lower left of the best is free, and the upper right of the others is where they go
        is_best = point in best
        axes.annotate(
            name,
            (bits, kld),
            xytext=(-4, -3) if is_best else (4, 3),
            textcoords="offset points",
            fontsize=7,
            horizontalalignment="right" if is_best else "left",
            verticalalignment="top" if is_best else "bottom",
        )
    figure.savefig(path, dpi=150)


def unbeaten(points: Sequence[tuple[float, float, str]]) -> list[tuple[float, float, str]]:
    """(bits, KLD, name) of those that no other has both fewer bits and less divergence than."""
    best: list[tuple[float, float, str]] = []
    for point in sorted(points):
        if not best or point[1] < best[-1][1]:
            best.append(point)
    return best
