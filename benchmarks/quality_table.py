"""What `quality.py` found, as JSON and as Markdown."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quality_caches import BASE
from quality_recall import Recall

from localkv.quality.statistics import Estimate

BEGIN, END = "<!-- {} table of benchmarks/quality.py -->", "<!-- end of {} table -->"
SIDES = ("K alone", "V alone")
MOST_BITS = 8.9
"""Beyond lie pairs with a 16-bit type, which cost more memory and diverge no less than q8_0."""


@dataclass(frozen=True)
class Measured:
    """One cache with one model. `bits_per_value` is the mean of K and V; KLD is in nats."""

    model: str
    type_k: str
    type_v: str
    rotation: str
    bits_per_value: float
    kld: Estimate
    kld_99: float
    same_top: Estimate
    recall: Mapping[int, Recall]

    @property
    def pair(self) -> str:
        """K/V, or one name where both are the same."""
        return self.type_k if self.type_k == self.type_v else f"{self.type_k}/{self.type_v}"

    @property
    def rotated(self) -> str:
        """For tables."""
        return "yes" if self.rotation == "on" else "no"

    @property
    def log_p(self) -> float:
        """Of right answers, over all distances."""
        count = sum(one.count for one in self.recall.values())
        return sum(one.log_p * one.count for one in self.recall.values()) / count


@dataclass(frozen=True)
class Report:
    """All that was measured, and with what."""

    model: str
    rows: int
    row_tokens: int
    seed: int
    threads: int
    seconds: float
    results: tuple[Measured, ...]

    @property
    def models(self) -> list[str]:
        """The model and its twins, in order."""
        return list(dict.fromkeys(result.model for result in self.results))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Report:
        """What `to_json` gave, after JSON turned its numbers as keys into text."""
        results = tuple(
            Measured(
                **{
                    **result,
                    "kld": Estimate(**result["kld"]),
                    "same_top": Estimate(**result["same_top"]),
                    "recall": {int(d): Recall(**r) for d, r in result["recall"].items()},
                }
            )
            for result in data["results"]
        )
        return cls(**{**data, "results": results})


def full_table(report: Report) -> list[str]:
    """Every cache with every model, as Markdown."""
    distances = list(report.results[0].recall)
    header = ["model", "K/V", "rotated", "bits", "KLD", "±", "KLD 99 %", "same top"]
    header += [f"right at {distance}" for distance in distances] + ["log p"]
    cells = [
        [
            result.model,
            result.pair,
            result.rotated,
            f"{result.bits_per_value:g}",
            f"{result.kld.value:.2e}",
            f"{result.kld.error:.0e}",
            f"{result.kld_99:.2e}",
            f"{100 * result.same_top.value:.2f} %",
            *(f"{result.recall[distance].right:.2f}" for distance in distances),
            f"{result.log_p:.3f}",
        ]
        for result in report.results
    ]
    return markdown(header, cells)


def cost_table(report: Report) -> list[str]:
    """What the types cost, a row for each cache: KLD of all models, the rest where it differs most.

    Pairs of two types with more bits than q8_0 are left out.
    """
    farthest = max(report.results[0].recall)
    first, last = report.models[0], report.models[-1]
    columns: tuple[tuple[str, Sequence[str], Callable[[Measured], str]], ...] = (
        ("KLD", report.models, lambda one: f"{one.kld.value:.1e}" if one.kld.value else "0"),
        ("same top", (first, last), lambda one: f"{100 * one.same_top.value:.1f} %"),
        (f"right at {farthest}", (last,), lambda one: f"{one.recall[farthest].right:.2f}"),
        ("log p", (last,), lambda one: f"{one.log_p:.2f}"),
    )
    header = ["K/V", "rotated", "bits"]
    header += [f"{title}: {model}" for title, models, _ in columns for model in models]
    cells = []
    for results in by_cache(report):
        cache = results[0]
        if cache.type_k != cache.type_v and cache.bits_per_value > MOST_BITS:
            continue
        of = {one.model: one for one in results}
        figures = [show(of[model]) for _, models, show in columns for model in models]
        cells.append([cache.pair, cache.rotated, f"{cache.bits_per_value:g}", *figures])
    return markdown(header, cells)


def side_table(report: Report) -> list[str]:
    """KLD of a type for K alone and for V alone, the other being f16."""
    header = ["type", "rotated"]
    header += [f"{side}: {model}" for model in report.models for side in SIDES]
    klds: dict[tuple[str, str], dict[tuple[str, str], float]] = {}
    for one in report.results:
        sides = [name for name in (one.type_k, one.type_v) if name != BASE]
        if len(sides) == 1 and BASE in (one.type_k, one.type_v):
            side = SIDES[one.type_k == BASE]
            row = klds.setdefault((sides[0], one.rotated), {})
            row[one.model, side] = one.kld.value
    order = sorted(klds, key=lambda key: next(i for i, k in enumerate(klds) if k[0] == key[0]))
    cells = [
        [*key, *(f"{klds[key][model, side]:.1e}" for model in report.models for side in SIDES)]
        for key in order
    ]
    return markdown(header, cells)


def by_cache(report: Report) -> list[list[Measured]]:
    """The results of each cache with every model; a pair's rotations follow one another."""
    found: dict[tuple[str, str], list[Measured]] = {}
    for one in report.results:
        found.setdefault((one.pair, one.rotation), []).append(one)
    pairs = list(dict.fromkeys(pair for pair, _ in found))
    return [found[key] for key in sorted(found, key=lambda key: pairs.index(key[0]))]


def markdown(header: Sequence[str], cells: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table."""
    rows = [header, ["---"] * len(header), *cells]
    return ["| " + " | ".join(row) + " |" for row in rows]


def insert_tables(report: Report, page: Path) -> None:
    """Put the tables between the marks of a page."""
    text = page.read_text()
    for name, lines in (("cost", cost_table(report)), ("side", side_table(report))):
        begin, end = (mark.format(name) for mark in (BEGIN, END))
        before, found, rest = text.partition(begin)
        _, found_end, after = rest.partition(end)
        if not (found and found_end):
            raise SystemExit(f"{page}: no {begin} with {end}")
        text = "\n".join([before + begin, "", *lines, "", end + after])
    page.write_text(text)
