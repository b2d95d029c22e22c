#!/usr/bin/env python3
"""Draw the documentation's drawings, as SVG: `python docs/make_drawings.py`.

The charts are of measured figures: docs/cpu-speed.json, and benchmarks/results/memory.json. A test
compares the files with what this program draws.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from html import escape
from itertools import pairwise
from pathlib import Path

DOCS = Path(__file__).resolve().parent
FONT = "font-family='Helvetica, Arial, sans-serif'"
INK, GREY, PALE = "#22303c", "#6b7a86", "#f3f5f7"
BLUE, GREEN, PINK, SAND = "#cfe3f7", "#d3ecd6", "#f6d6e2", "#f7e7c4"


class Drawing:
    """An SVG of a size, drawn from back to front."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._parts = [
            f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' "
            f"width='{width}' height='{height}' role='img' aria-label='{escape(title)}' {FONT}>",
            "<defs><marker id='tip' viewBox='0 0 8 8' refX='7' refY='4' markerWidth='7' "
            f"markerHeight='7' orient='auto'><path d='M0 0 8 4 0 8z' fill='{GREY}'/>"
            "</marker></defs>",
            f"<rect width='{width}' height='{height}' rx='8' fill='white'/>",
        ]

    def text(
        self, x: float, y: float, text: str, *, size: int = 13, at: str = "middle", ink: str = INK
    ) -> None:
        """A line of text; `at` is its anchor, `y` its base line."""
        self._parts.append(
            f"<text x='{x:g}' y='{y:g}' font-size='{size}' text-anchor='{at}' fill='{ink}'>"
            f"{escape(text)}</text>"
        )

    def box(
        self, x: float, y: float, width: float, height: float, lines: Sequence[str], fill: str
    ) -> None:
        """A box with lines of text in its middle; all but the first are small."""
        self._parts.append(
            f"<rect x='{x:g}' y='{y:g}' width='{width:g}' height='{height:g}' rx='4' "
            f"fill='{fill}' stroke='{GREY}' stroke-width='1'/>"
        )
        top = y + height / 2 + 5 - 8 * (len(lines) - 1)
        for number, line in enumerate(lines):
            small = number > 0
            self.text(x + width / 2, top + 16 * number, line, size=11 if small else 13)

    def arrow(self, *points: tuple[float, float], is_dashed: bool = False) -> None:
        """A line through points, with a tip at its end."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        dashes = " stroke-dasharray='4 3'" if is_dashed else ""
        self._parts.append(
            f"<polyline points='{path}' fill='none' stroke='{GREY}' stroke-width='1.4'"
            f"{dashes} marker-end='url(#tip)'/>"
        )

    def rule(self, x: float, y: float, width: float) -> None:
        """A pale line across, behind a chart's lines."""
        self._parts.append(f"<path d='M{x:g} {y:.1f}h{width:g}' stroke='#dde3e8'/>")

    def line(self, points: Sequence[tuple[float, float]], ink: str, *, is_dashed: bool) -> None:
        """A line of a chart, with a dot at each point."""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        dashes = " stroke-dasharray='6 4'" if is_dashed else ""
        self._parts.append(
            f"<polyline points='{path}' fill='none' stroke='{ink}' stroke-width='2'{dashes}/>"
        )
        for x, y in points:
            self._parts.append(f"<circle cx='{x:.1f}' cy='{y:.1f}' r='3' fill='{ink}'/>")

    def svg(self) -> str:
        return "\n".join([*self._parts, "</svg>", ""])


def cache_pages() -> str:
    """Two texts that share pages; the segments of a text; the planes of a page."""
    d = Drawing(900, 560, "Pages, segments and planes of the cache")
    d.text(24, 34, "Two texts share pages", size=16, at="start")
    tables = {"text A": (3, 7, 1, 4), "text B": (3, 7, 9)}
    colours = {3: GREEN, 7: GREEN, 1: BLUE, 4: BLUE, 9: PINK}
    for row, (name, pages) in enumerate(tables.items()):
        y = 52 + 42 * row
        d.text(24, y + 20, name, at="start")
        for column, page in enumerate(pages):
            d.box(90 + 74 * column, y, 70, 30, [f"page {page}"], colours[page])
    d.text(410, 72, "Each box is 256 tokens. Both texts begin alike, so they hold", at="start")
    d.text(410, 92, "the same pages. Whoever stores a row in a shared page", at="start")
    d.text(410, 112, "copies the page first.", at="start")
    d.text(24, 176, "the pool", at="start")
    for page in range(11):
        x = 90 + 72 * page
        d.box(x, 156, 68, 32, [str(page)], colours.get(page, PALE))
    d.text(
        90,
        208,
        "green: shared    blue: text A's    pink: text B's    grey: free",
        at="start",
        ink=GREY,
    )

    d.text(24, 256, "A text has segments, each in its own types", size=16, at="start")
    segments = (
        (90, 60, ["sink", "4, f16"], SAND),
        (154, 496, ["packed", "K in q4_1c, V in q4_0"], BLUE),
        (654, 110, ["tail", "64, f16"], SAND),
    )
    for x, width, lines, fill in segments:
        d.box(x, 274, width, 44, lines, fill)
    d.arrow((90, 332), (764, 332))
    d.text(427, 350, "position of a token", ink=GREY)
    d.text(
        90,
        374,
        "Attention runs once for each segment and merges the results by their log-sum-exp.",
        at="start",
    )

    d.text(24, 420, "A page of one layer is planes, not blocks", size=16, at="start")
    for row, (side, codes) in enumerate(
        (("K", "codes: 4 bits a value"), ("V", "codes: 4 bits a value"))
    ):
        y = 438 + 50 * row
        d.text(64, y + 24, side)
        d.box(90, y, 430, 38, [codes], BLUE)
        d.box(526, y, 238, 38, ["scales (and minima): fp16"], SAND)
    d.text(
        90,
        546,
        "Kernels read a tile of codes and its scales, and decode it in registers.",
        at="start",
    )
    return d.svg()


def token_way() -> str:
    """A token's way through the parts of localkv."""
    d = Drawing(900, 620, "The way of a token")
    left, width = 250, 270

    def step(y: float, lines: Sequence[str], fill: str, note: str) -> None:
        d.box(left, y, width, 40, lines, fill)
        d.text(left + width + 40, y + 25, note, at="start", size=12, ink=GREY)

    d.box(left - 24, 196, width + 48, 290, [], PALE)
    d.text(left - 14, 214, "each layer", at="start", ink=GREY)
    steps = (
        (24, ["text"], "white", "llm.py, loader/tokenizer.py"),
        (
            82,
            ["ids", "a step: which texts, which tokens"],
            GREEN,
            "engine/scheduler.py, engine/step_runner.py",
        ),
        (140, ["embedding"], BLUE, "model.py, kernels/backend.py"),
        (226, ["norm, q, k, v, RoPE"], BLUE, "one chain (CPU) or one launch (GPU)"),
        (278, ["pack and store the new row"], SAND, "quant_formats/<type>, cache/kv_cache.py"),
        (
            330,
            ["attention reads packed pages"],
            SAND,
            "kernels/cpu/attention, kernels/gpu/attention",
        ),
        (382, ["output matrix, add"], BLUE, "kernels/cpu/linear, kernels/gpu/products"),
        (434, ["feed-forward block or experts, add"], BLUE, "kernels/cpu/moe, kernels/gpu/moe.py"),
        (500, ["last norm, logits"], BLUE, "model.py"),
        (556, ["sampler: the next id"], GREEN, "sampling/"),
    )
    for y, lines, fill, note in steps:
        step(y, lines, fill, note)
    for (y, *_), (below, *_) in pairwise(steps):
        d.arrow((left + width / 2, y + 40), (left + width / 2, below - 1))
    d.box(24, 292, 130, 64, ["the cache", "pages of packed", "K and V"], SAND)
    d.arrow((left, 298), (156, 312))
    d.arrow((154, 338), (left - 1, 350))
    d.arrow((left, 576), (200, 576), (200, 102), (left - 1, 102), is_dashed=True)
    d.text(192, 150, "again", at="end", ink=GREY)
    return d.svg()


Points = Sequence[tuple[float, float]]


def chart(
    d: Drawing,
    corner: tuple[float, float],
    size: tuple[float, float],
    lines: Mapping[str, tuple[Points, str, bool]],
    ticks: tuple[Sequence[float], Sequence[float]],
) -> None:
    """Lines over two linear axes that begin at 0.

    Args:
        corner, size: of the axes, in the drawing's units; the corner is the lower left one.
        lines: name, points, ink, and whether the line is dashed. A name stands at its line's end,
            moved down where it would cover another one.
        ticks: marked values of x and of y; the last ones end the axes.
    """
    (left, bottom), (width, height) = corner, size
    (across, up), names = ticks, []

    def place(x: float, y: float) -> tuple[float, float]:
        return left + width * x / across[-1], bottom - height * y / up[-1]

    for y in up:
        at = place(0, y)[1]
        d.rule(left, at, width)
        d.text(left - 6, at + 4, f"{y:g}", size=11, at="end", ink=GREY)
    for x in across:
        d.text(place(x, 0)[0], bottom + 17, f"{x:,g}", size=11, ink=GREY)
    for name, (points, ink, is_dashed) in lines.items():
        placed = [place(*point) for point in points]
        d.line(placed, ink, is_dashed=is_dashed)
        names.append((placed[-1][1], placed[-1][0], name, ink))
    last = float("-inf")
    for y, x, name, ink in sorted(names):
        last = max(y + 4, last + 14)
        d.text(x + 8, last, name, size=11, at="start", ink=ink)


def speed_depth() -> str:
    """Tokens per second over the depth of the context, from the table `depth`."""
    inks = {"localkv": "#1f6fb2", "llama.cpp": "#b0413e", "ik_llama.cpp": "#3f8f4f"}
    facts = json.loads((DOCS / "cpu-speed.json").read_text())
    figures = [one for one in facts["figures"] if one["table"] == "depth" and one["values"]]
    lines: dict[str, tuple[Points, str, bool]] = {}
    for program, ink in inks.items():
        for pair, shown in (("f16", "f16/f16"), ("q8_0/q4_0", "q8_0/q4_0")):
            best: dict[int, float] = {}
            for one in figures:
                if one["pair"] == pair and one["program"].partition(" ")[0] == program:
                    speed = statistics.median(one["values"])
                    best[one["depth"]] = max(speed, best.get(one["depth"], 0.0))
            lines[f"{program} {shown}"] = (sorted(best.items()), ink, pair != "f16")
    d = Drawing(900, 400, "Tokens per second over the depth of the context")
    d.text(24, 34, "Writing a text, tokens per second", size=16, at="start")
    d.text(
        24, 54, f"{facts['cpu']}, 2 cores, a Llama of 1.1B in Q4_0", size=11, at="start", ink=GREY
    )
    chart(d, (64, 350), (640, 270), lines, ((0, 8192, 16384, 24576, 32768), (0, 20, 40, 60, 80)))
    d.text(384, 388, "tokens before it", size=11, ink=GREY)
    return d.svg()


def memory_context() -> str:
    """Memory of K and V over the context, as `localkv plan` counts it."""
    inks = {"f16/f16": "#b0413e", "q8_0/q4_0": "#3f8f4f", "q4_1c/q4_0": "#1f6fb2"}
    titles = ("SmolLM2 135M", "Gemma 3 270M (windows of 512)", "Llama 3.1 8B")
    units = (("MiB", 2**20, 45), ("MiB", 2**20, 30), ("GiB", 2**30, 4))
    facts = json.loads((DOCS.parent / "benchmarks" / "results" / "memory.json").read_text())
    d = Drawing(1080, 350, "Memory of K and V over the length of the context")
    d.text(24, 34, "K and V in memory, by context", size=16, at="start")
    for number, (one, title) in enumerate(zip(facts["models"], titles, strict=True)):
        left, (unit, n_bytes, step) = 64 + 355 * number, units[number]
        lines: dict[str, tuple[Points, str, bool]] = {
            pair: ([(n_ctx, n / n_bytes) for n_ctx, n in one["bytes"][pair]], ink, False)
            for pair, ink in inks.items()
        }
        across = [one["n_ctx_train"] * i // 4 for i in range(5)]
        most = max(y for points, *_ in lines.values() for _, y in points)
        up = [step * i for i in range(int(most / step) + 1 + (most % step > 0))]
        d.text(left, 66, f"{title}, {unit}", at="start")
        chart(d, (left, 300), (230, 215), lines, (across, up))
        d.text(left + 115, 336, "tokens", size=11, ink=GREY)
    return d.svg()


DRAWINGS: dict[str, Callable[[], str]] = {
    "cache-pages.svg": cache_pages,
    "token-way.svg": token_way,
    "speed-depth.svg": speed_depth,
    "memory-context.svg": memory_context,
}
"""Files in docs/, and what draws them."""


def main() -> None:
    """Write the files."""
    for name, draw in DRAWINGS.items():
        (DOCS / name).write_text(draw())


if __name__ == "__main__":
    main()
