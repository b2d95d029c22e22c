"""What `quality.py` found, as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from quality_recall import Recall

from localkv.quality.scores import Estimate


@dataclass(frozen=True)
class Measured:
    """One cache with one model. Divergences (KLD) are in nats.

    Attributes:
        rotated: "K, V", "K", "V" or "no".
        tail, sink: tokens that are read as f16.
        smoothed: whether the model's K and V were.
        variant: what else is unlike a cache as it is used: "normal numbers" for codebooks that know
            nothing of the model, "outliers apart" and "none apart" of what the formats' references
            made.
        layers: types by layer in words, of a cache that has them; its types are "mixed".
        bits: per packed value, the mean of K and V.
        bits_after: with the tail and the sink, by number of tokens.
        ppl_ratio: the perplexity over that with an f16 cache.
        recall: by distance; empty where it was not measured.
    """

    model: str
    type_k: str
    type_v: str
    rotated: str
    tail: int
    sink: int
    smoothed: bool
    variant: str
    layers: str
    bits: float
    bits_after: Mapping[int, float]
    kld: Estimate
    kld_99: float
    same_top: Estimate
    ppl_ratio: float
    recall: Mapping[int, Recall]

    @property
    def pair(self) -> str:
        """K/V, or one name where both are the same."""
        return self.type_k if self.type_k == self.type_v else f"{self.type_k}/{self.type_v}"

    @property
    def cache(self) -> tuple[object, ...]:
        """Equal for the same cache with other models."""
        return (
            *(self.type_k, self.type_v, self.rotated, self.tail, self.sink, self.smoothed),
            self.variant,
        )

    @property
    def log_p(self) -> float:
        """The mean log-probability of right answers, over all distances."""
        count = sum(one.count for one in self.recall.values())
        return sum(one.log_p * one.count for one in self.recall.values()) / count


@dataclass(frozen=True)
class Report:
    """All that was measured, and with what; seconds by the clock, and of the processors."""

    model: str
    rows: int
    row_tokens: int
    seed: int
    threads: int
    seconds: float
    processor_seconds: float
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
        return cls(**{**data, "results": tuple(map(_measured, data["results"]))})


def _measured(data: Mapping[str, Any]) -> Measured:
    known = {field.name: data[field.name] for field in fields(Measured)}
    known["kld"], known["same_top"] = Estimate(**data["kld"]), Estimate(**data["same_top"])
    known["recall"] = {int(d): Recall(**r) for d, r in data["recall"].items()}
    known["bits_after"] = {int(n): bits for n, bits in data["bits_after"].items()}
    return Measured(**known)
