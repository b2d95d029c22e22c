"""A plan as a picture: bytes of the KV cache over the length of the context, a line per pair."""

from __future__ import annotations

from typing import TYPE_CHECKING

from localkv.cache.layout import PAGE_TOKENS
from localkv.cli.picture_file import save
from localkv.memory.plan import kv_bytes_per_token

if TYPE_CHECKING:
    from localkv.cli.plan_report import Plan

MOST_LINES = 8
"""The most pairs that a picture can distinguish."""


def draw(plan: Plan, path: str) -> None:
    """Write the picture: from no context to the longest that is of interest, on linear scales.

    Where a line meets the dashed one is the longest context that fits.
    """
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    shades = colormaps["viridis"]
    config, cache = plan.model.config, plan.cache
    n_ctx = max(config.n_ctx_train, cache.n_ctx)
    pairs = plan.pairs[:MOST_LINES]
    unit, factor = ("GiB", 1 << 30) if _most(plan, n_ctx) >= 1 << 30 else ("MiB", 1 << 20)
    left = (plan.budget.n_bytes - plan.pairs[0].plan.weights - plan.pairs[0].plan.scratch) / factor
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    ends = []
    for i, fit in enumerate(pairs):
        per_token = cache.n_sequences * kv_bytes_per_token(*fit.pair, config) / factor
        end = n_ctx * per_token
        color = shades(0.78 * i / max(1, len(pairs) - 1))  # its yellow end is hard to read
        axes.plot([0, n_ctx], [0, end], color=color, linewidth=1.8)
        ends.append((end, "/".join(fit.pair), color))
    top = 1.06 * max(end for end, _, _ in ends)
    for y, (end, name, color) in zip(
        _apart([e for e, _, _ in ends], 0.047 * top), ends, strict=True
    ):
        axes.annotate(
            f"{name}  {end:.3g} {unit}",
            (n_ctx, y),
            xytext=(6, 0),
            textcoords="offset points",
            color=color,
            fontsize=9,
            verticalalignment="center",
            annotation_clip=False,
        )
    if 0 < left < top:
        axes.axhline(left, color="0.35", linestyle="--", linewidth=1)
        axes.annotate(
            f"{left:.3g} {unit} left beside weights and scratch",
            (0.01 * n_ctx, left),
            xytext=(0, 4),
            textcoords="offset points",
            color="0.35",
            fontsize=9,
        )
    if cache.n_ctx < n_ctx:
        axes.axvline(cache.n_ctx, color="0.35", linestyle=":", linewidth=1)
    axes.set_xlim(0, n_ctx)
    axes.set_ylim(0, top)
    axes.set_xticks(*_ticks(n_ctx))
    axes.grid(True, alpha=0.25)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    each = f" in each of {cache.n_sequences} sequences" if cache.n_sequences > 1 else ""
    axes.set_xlabel(f"tokens of context{each}")
    axes.set_ylabel(f"K and V ({unit})")
    axes.set_title(f"{config.name}: KV cache by types of K/V", loc="left")
    save(figure, path)


def _most(plan: Plan, n_ctx: int) -> int:
    per_token = max(kv_bytes_per_token(*fit.pair, plan.model.config) for fit in plan.pairs)
    return per_token * n_ctx * plan.cache.n_sequences


def _apart(values: list[float], least: float) -> list[float]:
    """Places of labels at these values, moved up where they would be nearer than `least`."""
    order = sorted(range(len(values)), key=values.__getitem__)
    placed, below = list(values), float("-inf")
    for i in order:
        placed[i] = below = max(values[i], below + least)
    return placed


def _ticks(n_ctx: int) -> tuple[list[int], list[str]]:
    """Places and names on the axis of tokens: up to nine, by powers of two."""
    step = PAGE_TOKENS
    while n_ctx / step > 8:
        step *= 2
    places = list(range(0, n_ctx + 1, step))
    return places, [f"{n // 1024}k" if step % 1024 == 0 and n else str(n) for n in places]
