"""The part of a plan that a cache with a budget answers: types and bytes as a text grows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from localkv.cache.ladder import LadderSizes, ladder_text
from localkv.cache.layout import PAGE_TOKENS, GroupLayout, group_layouts, ladder_layout
from localkv.commands.output import table
from localkv.errors import byte_size
from localkv.memory.plan import repack_bytes

if TYPE_CHECKING:
    from localkv.config import CacheConfig
    from localkv.memory.plan import ModelMemory


MOST_ROWS = 12
"""Most rows of the table."""


@dataclass(frozen=True)
class LadderPlan:
    """A budget and a ladder, for one text of a model.

    Attributes:
        name: of the model.
        cache: with the budget, and the context that is asked for.
        memory: of the model.
    """

    name: str
    cache: CacheConfig
    memory: ModelMemory

    @cached_property
    def layout(self) -> GroupLayout:
        """The layout of the layers whose pages change their types."""
        return ladder_layout(group_layouts(self.cache, self.memory.config.groups))

    @cached_property
    def sizes(self) -> LadderSizes:
        """How the budget is divided."""
        return self.layout.ladder(self.cache.n_ctx, self.cache.n_sequences)

    @cached_property
    def growth(self) -> list[list[int]]:
        """The rungs of the pages of a text of one page, of two, ..., up to the longest context."""
        n_pages = min(self.sizes.room(self.memory.n_batch), -(-self.cache.n_ctx // PAGE_TOKENS))
        return [rungs for rungs in self.sizes.growth(n_pages) if rungs is not None]

    @property
    def n_ctx(self) -> int:
        """Tokens of the longest context that the ladder holds, of those that are asked for."""
        return min(self.cache.n_ctx, PAGE_TOKENS * len(self.growth))

    @property
    def scratch(self) -> int:
        """Bytes that pages take while they change their types, without a batch's."""
        return repack_bytes([self.layout])

    def bytes_of(self, rungs: list[int]) -> list[int]:
        """Bytes of the pages on each rung."""
        unit = len(self.layout.group.layers) * self.sizes.unit
        return [rungs.count(i) * n * unit for i, n in enumerate(self.sizes.units)]

    @property
    def pairs(self) -> list[str]:
        """The ladder, by the names of pairs."""
        return ["/".join(pair) for pair in self.cache.kv_ladder]

    def lines(self) -> list[str]:
        """For people."""
        assert self.cache.kv_budget is not None
        budget = byte_size(self.cache.kv_budget)
        title = f"Pages of {PAGE_TOKENS} tokens on each rung, within {budget} (--kv-budget):"
        if windows := self.cache.kv_window_bytes:
            title = title.replace(":", f", and {byte_size(windows)} of layers with a window:")
        if not self.growth:
            return [f"{budget} (--kv-budget) have no room for a page of {PAGE_TOKENS} tokens."]
        rows = [("tokens", "K + V", *self.pairs)]
        for n_pages in self._shown():
            rungs = self.growth[n_pages - 1]
            counts = (str(rungs.count(i) or "") for i in range(len(self.pairs)))
            n_bytes = sum(self.bytes_of(rungs))
            rows.append((str(min(self.n_ctx, n_pages * PAGE_TOKENS)), byte_size(n_bytes), *counts))
        end = f"The context ends at {self.n_ctx} tokens"
        end += "." if self.n_ctx == self.cache.n_ctx else f", before {self.cache.n_ctx} (-c)."
        flags = (
            f"--kv-budget {self.cache.kv_budget} --kv-ladder {ladder_text(self.cache.kv_ladder)}"
        )
        end += f" Pages that change take up to {byte_size(self.scratch)} of scratch."
        return [title, *table(rows), end, f"flags: {flags}"]

    def _shown(self) -> list[int]:
        """Numbers of pages: those at which a rung is first used, and others between them."""
        found = {1, len(self.growth)}
        for i in range(len(self.pairs)):
            first = next((n for n, rungs in enumerate(self.growth, 1) if i in rungs), None)
            found |= {first, first - 1} if first and first > 1 else set()
        step = max(1, len(self.growth) // MOST_ROWS)
        for n in range(step, len(self.growth), step):
            if len(found) < MOST_ROWS:
                found.add(n)
        return sorted(found)

    def json(self) -> dict[str, Any]:
        """For programs."""
        return {
            "budget": self.cache.kv_budget,
            "pairs": self.pairs,
            "window_bytes": self.cache.kv_window_bytes,
            "scratch": self.scratch,
            "longest_context": self.n_ctx,
            "growth": [
                {
                    "tokens": n * PAGE_TOKENS,
                    "bytes": sum(self.bytes_of(rungs)),
                    "pages": [rungs.count(i) for i in range(len(self.pairs))],
                }
                for n, rungs in enumerate(self.growth, 1)
            ],
        }


def draw(plan: LadderPlan, path: str) -> None:
    """Write the picture: the bytes of each pair of types over the length of a text, stacked."""
    from matplotlib.figure import Figure

    from localkv.commands.pictures import COLOURS, MUTED, quiet, save, title, token_ticks

    assert plan.cache.kv_budget is not None
    unit, factor = ("GiB", 1 << 30) if plan.cache.kv_budget >= 1 << 30 else ("MiB", 1 << 20)
    figure = Figure(figsize=(8, 4.5), layout="constrained", facecolor="white")
    axes = figure.add_subplot()
    edges = [PAGE_TOKENS * n for n in range(len(plan.growth) + 1)]
    base = [0.0] * len(plan.growth)
    stacks = list(zip(*map(plan.bytes_of, plan.growth), strict=True))
    for name, stack, colour in list(zip(plan.pairs, stacks, COLOURS, strict=False))[::-1]:
        top = [low + n / factor for low, n in zip(base, stack, strict=True)]
        axes.stairs(top, edges, baseline=base, fill=True, color=colour, label=name)
        base = top
    limit = (plan.cache.ladder_bytes or 0) / factor
    axes.axhline(limit, color=MUTED, linestyle="--", linewidth=1)
    first = len(plan.layout.group.layers) * plan.sizes.unit * plan.sizes.units[0] / factor
    axes.plot(
        [0, edges[-1]], [0, first * len(plan.growth)], color=MUTED, linestyle=":", linewidth=1
    )
    axes.set_xlim(0, edges[-1])
    axes.set_ylim(0, 1.5 * limit)
    axes.set_xticks(*token_ticks(edges[-1]))
    axes.set_xlabel("tokens of a text")
    axes.set_ylabel(f"K and V ({unit})")
    axes.legend(frameon=False, fontsize=8.5, loc="upper left", ncols=len(plan.pairs))
    what = f"types of K/V within {byte_size(plan.cache.kv_budget)} (dotted: all {plan.pairs[0]})"
    title(axes, f"{plan.name}: {what}")
    quiet(axes)
    save(figure, path)
