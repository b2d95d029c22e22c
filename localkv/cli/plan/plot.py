"""A plan as a picture: bytes of the KV cache over the length of the context, a line per pair."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from localkv.cli.output.picture_file import save
from localkv.cli.output.plot_style import COLOURS, MUTED, name_ends, quiet, title, token_ticks
from localkv.memory.kv_bytes import context_bytes

if TYPE_CHECKING:
    from localkv.cli.plan.report import Plan
    from localkv.memory.fit import Pair

POINTS = 256
"""Of a line, about."""


def draw(plan: Plan, path: str) -> None:
    """Write the picture: from no context to the longest that is of interest, on linear scales.

    Where a line meets the dashed one is the longest context that fits.
    """
    from matplotlib.figure import Figure

    config, cache = plan.model.config, plan.cache
    n_ctx = max(config.n_ctx_train, cache.n_ctx)
    unit, factor = ("GiB", 1 << 30) if _most(plan, n_ctx) >= 1 << 30 else ("MiB", 1 << 20)
    left = (plan.budget.n_bytes - plan.pairs[0].plan.weights - plan.pairs[0].plan.scratch) / factor
    figure = Figure(figsize=(8, 5), layout="constrained", facecolor="white")
    axes = figure.add_subplot()
    ends = []
    for fit, colour in zip(plan.pairs, COLOURS, strict=False):
        lengths = sorted({n_ctx, *range(0, n_ctx, max(1, n_ctx // POINTS))})
        sizes = [_bytes(plan, fit.pair, n) / factor for n in lengths]
        end = sizes[-1]
        axes.plot(lengths, sizes, color=colour, linewidth=1.6)
        ends.append((end, f"{'/'.join(fit.pair)}  {end:#.3g} {unit}", colour))
    top = 1.06 * max(end for end, _, _ in ends)
    name_ends(axes, n_ctx, ends, least=0.042 * top)
    if 0 < left < top:
        axes.axhline(left, color=MUTED, linestyle="--", linewidth=1)
        axes.annotate(
            f"{left:.3g} {unit} left beside weights and scratch",
            (0.01 * n_ctx, left),
            xytext=(0, 4),
            textcoords="offset points",
            color=MUTED,
            fontsize=8.5,
        )
    if cache.n_ctx < n_ctx:
        axes.axvline(cache.n_ctx, color=MUTED, linestyle=":", linewidth=1)
    axes.set_xlim(0, n_ctx)
    axes.set_ylim(0, top)
    axes.set_xticks(*token_ticks(n_ctx))
    each = f" in each of {cache.n_sequences} sequences" if cache.n_sequences > 1 else ""
    axes.set_xlabel(f"tokens of context{each}")
    axes.set_ylabel(f"K and V ({unit})")
    title(axes, f"{config.name}: KV cache by types of K/V")
    quiet(axes)
    save(figure, path)


def _most(plan: Plan, n_ctx: int) -> int:
    return max(_bytes(plan, fit.pair, n_ctx) for fit in plan.pairs)


def _bytes(plan: Plan, pair: Pair, n_ctx: int) -> int:
    """The bytes of the rows of K and V; those of layers with a window stop growing."""
    cache = replace(plan.cache, type_k=pair[0], type_v=pair[1], n_ctx=n_ctx)
    return cache.n_sequences * context_bytes(cache, plan.model.config, plan.memory.n_batch)
