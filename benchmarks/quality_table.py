"""What `quality.py` found, as JSON and as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quality_recall import Recall

from localkv.quality import Estimate

BEGIN, END = "<!-- table of benchmarks/quality.py -->", "<!-- end of table -->"


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
            "yes" if result.rotation == "on" else "no",
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


def markdown(header: Sequence[str], cells: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table."""
    rows = [header, ["---"] * len(header), *cells]
    return ["| " + " | ".join(row) + " |" for row in rows]


def insert_table(report: Report, page: Path) -> None:
    """Put the table between the marks of a page."""
    text = page.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text("\n".join([before + BEGIN, "", *full_table(report), "", END + after]))
