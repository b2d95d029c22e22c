"""The joint choice of a plan: types of weights, of their activations, and of K and V by layer.

A weight profile has what types of each matrix cost, and a KV profile what lists of types by layer
cost. All costs add up, so for each list the best weights in the bytes that are left are found, and
the best of all pairs is the choice.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from localkv.commands.output import table
from localkv.errors import DoesNotFitError, byte_size
from localkv.quality.weight_profile import Curve, WeightProfile
from localkv.quant_formats import FORMATS

if TYPE_CHECKING:
    from localkv.cache.profile import TypeList

POINTS = 10
"""Budgets of the table, from the fewest bytes to the most that gain something."""
MIB = 1 << 20


@dataclass(frozen=True)
class CacheChoice:
    """Types of K and V that a plan may take.

    Attributes:
        name: for people: "f16" or bits by layer.
        n_bytes: of K and V in the context.
        scratch: bytes beside them and the weights.
        kld: divergence from an f16 cache.
        types: of the profile; None for f16.
    """

    name: str
    n_bytes: int
    scratch: int
    kld: float
    types: TypeList | None = None


@dataclass(frozen=True)
class JointChoice:
    """The best for a budget.

    Attributes:
        budget: bytes for all.
        cache: of K and V.
        types: of the matrices.
        weights: bytes of all tensors.
        kld: the sum of all costs, in nats.
    """

    budget: int
    cache: CacheChoice
    types: Sequence[str]
    weights: int
    kld: float

    @property
    def total(self) -> int:
        return self.weights + self.cache.n_bytes + self.cache.scratch


@dataclass(frozen=True)
class QualityPlan:
    """All choices of a model for one context.

    Attributes:
        profile: of weights.
        curve: the best weights.
        caches: f16 first.
        budget: bytes that may be taken.
    """

    profile: WeightProfile
    curve: Curve
    caches: Sequence[CacheChoice]
    budget: int

    def within(self, budget: int, caches: Sequence[CacheChoice] = ()) -> JointChoice | None:
        """The best for a budget, with one of some caches; None if nothing is small enough."""
        found = list[JointChoice]()
        for cache in caches or self.caches:
            weights = self.curve.within(budget - cache.n_bytes - cache.scratch)
            if weights is not None:
                types, n_bytes, cost = weights
                found.append(JointChoice(budget, cache, types, n_bytes, cost + cache.kld))
        return min(found, key=lambda one: (one.kld, one.total), default=None)

    def one_type(self, budget: int, caches: Sequence[CacheChoice]) -> JointChoice | None:
        """The best for a budget where all matrices have one type, as far as it fits their rows."""
        names = dict.fromkeys(name for one in self.profile.matrices for name in one.kld)
        found = list[JointChoice]()
        for name in names:
            types = self.profile.in_one_type(FORMATS[name])
            n_bytes, cost = self.profile.sums(types)
            found += [
                JointChoice(budget, cache, types, n_bytes, cost + cache.kld)
                for cache in caches
                if n_bytes + cache.n_bytes + cache.scratch <= budget
            ]
        return min(found, key=lambda one: (one.kld, one.total), default=None)

    @property
    def choice(self) -> JointChoice:
        """The best for the budget.

        Raises:
            DoesNotFitError: nothing is small enough.
        """
        found = self.within(self.budget)
        if found is None:
            raise DoesNotFitError(
                f"the smallest of the measured types take {byte_size(self.least)}, and there is "
                f"{byte_size(self.budget)}",
                hint="measure smaller types, or take a shorter context (-c)",
            )
        return found

    @property
    def least(self) -> int:
        """The fewest bytes of all choices."""
        n_bytes, _ = self.profile.sums(self.curve.start)
        return n_bytes + min(one.n_bytes + one.scratch for one in self.caches)

    @property
    def most(self) -> int:
        """The bytes beyond which nothing gets better."""
        n_bytes, _ = self.profile.sums(self.curve.start)
        cache = min(self.caches, key=lambda one: one.kld)
        steps = sum(step.n_bytes for step in self.curve.steps)
        return n_bytes + steps + cache.n_bytes + cache.scratch

    def budgets(self) -> list[int]:
        """Budgets of the table: in equal ratios, and the one that is asked for."""
        least, most = self.least, self.most
        ratio = (most / least) ** (1 / max(1, POINTS - 1))
        spread = [int(least * ratio**i) + 1 for i in range(POINTS)]
        return sorted({*spread[:-1], most, max(least, min(self.budget, most))})

    def next_mib(self, choice: JointChoice) -> str:
        """Where a further MiB helps most from a choice, and how much, in words."""
        words = "nothing helps"
        best = 0.0
        step = self.curve.next_step(choice.types)
        if step is not None:
            best = step.slope
            name = self.profile.matrices[step.matrix].name.removesuffix(".weight")
            words = f"{name} {choice.types[step.matrix]} -> {step.type}"
        for cache in self.caches:
            more = cache.n_bytes - choice.cache.n_bytes
            if more > 0 and (slope := (choice.cache.kld - cache.kld) / more) > best:
                best, words = slope, f"K and V {choice.cache.name} -> {cache.name}"
        return f"{words} ({best * MIB:.1e} a MiB)" if best else words


def bits_of(profile: WeightProfile, types: Sequence[str]) -> float:
    """Bits of a matrix's value, on average."""
    pairs = list(zip(profile.matrices, types, strict=True))
    n_values = sum(one.shape[0] * one.shape[1] for one, _ in pairs)
    return 8 * sum(one.n_bytes(name) for one, name in pairs) / max(1, n_values)


def quality_lines(
    plan: QualityPlan, model: str, types_file: str | None, *, is_rounded: bool
) -> list[str]:
    """The plan as it is printed.

    Args:
        model: its file.
        types_file: where the types are written, if anywhere.
        is_rounded: whether the file has matrices of packed types.

    Raises:
        DoesNotFitError: nothing is small enough.
    """
    chosen, profile = plan.choice, plan.profile
    rows = [("budget", "weights", "bits", "K and V", "K + V", "KLD", "f16 cache", "one type",
             "where the next MiB helps most")]  # fmt: skip
    for budget in plan.budgets():
        one = plan.within(budget)
        if one is None:
            continue
        alone, uniform = plan.within(budget, plan.caches[:1]), plan.one_type(budget, plan.caches)
        rows.append(
            (
                byte_size(budget),
                byte_size(one.weights),
                f"{bits_of(profile, one.types):.2f}",
                one.cache.name,
                byte_size(one.cache.n_bytes),
                f"{one.kld:.2e}",
                f"{alone.kld:.2e}" if alone else "none",
                f"{uniform.kld:.2e}" if uniform else "none",
                plan.next_mib(one),
            )
        )
    halves = chosen.types.count("bf16")
    exact = sum(FORMATS[name].block_size == 1 for name in chosen.types) - halves
    some = f", {halves} activations in BF16 where the CPU multiplies it" if halves else ""
    counts = {name: list(chosen.types).count(name) for name in sorted(set(chosen.types))}
    words = ", ".join(f"{n} {name}" for name, n in counts.items())
    lines = [
        *table(rows),
        "",
        f"chosen for {byte_size(plan.budget)}: weights {byte_size(chosen.weights)}, K and V "
        f"{chosen.cache.name} {byte_size(chosen.cache.n_bytes)}, scratch "
        f"{byte_size(chosen.cache.scratch)}; KLD {chosen.kld:.2e}",
        f"matrices: {words}; {exact} meet float32 activations{some}, the others 8-bit ones",
    ]
    if types_file is None:
        return [*lines, "--save-types FILE writes the types for localkv quantize"]
    flags = f" --imatrix {profile.imatrix}" if profile.imatrix else ""
    out = "OUT.gguf"
    lines.append(
        f"localkv quantize{flags} --tensor-type-file {types_file} {model} {out} Q8_0"
        + (" --allow-requantize" if is_rounded else "")
    )
    if chosen.cache.types is None:
        return [*lines, f"localkv chat -m {out}"]
    bits = f"{chosen.cache.types.bits:.4g}"
    return [
        *lines,
        f"localkv calibrate -m {out}",
        f"localkv chat -m {out} --kv-profile auto --kv-bits {bits}",
    ]


def type_lines(profile: WeightProfile, types: Sequence[str]) -> str:
    """The types as `localkv quantize --tensor-type-file` reads them."""
    pairs = zip(profile.matrices, types, strict=True)
    return "".join(f"^{re.escape(one.name)}$={name}\n" for one, name in pairs)


def quality_json(plan: QualityPlan) -> dict[str, Any]:
    """The plan for programs."""

    def facts(one: JointChoice | None) -> dict[str, Any] | None:
        if one is None:
            return None
        cache = one.cache
        return {
            "budget": one.budget,
            "weights": one.weights,
            "cache": cache.name,
            "cache_bytes": cache.n_bytes,
            "scratch": cache.scratch,
            "kld": one.kld,
            "next": plan.next_mib(one),
        }

    chosen = plan.choice
    names = [one.name for one in plan.profile.matrices]
    layers = cache.layers if (cache := chosen.cache.types) else None
    return {
        "model": plan.profile.name,
        "chosen": facts(chosen),
        "types": dict(zip(names, chosen.types, strict=True)),
        "kv_layers": layers and [pair and "/".join(pair) for pair in layers],
        "curve": [facts(plan.within(budget)) for budget in plan.budgets()],
    }


def draw_quality(plan: QualityPlan, path: str) -> None:
    """Draw divergence over bytes: chosen together, with an f16 cache, with one type of weights."""
    from matplotlib.figure import Figure

    from localkv.commands.pictures import COLOURS, save, title

    figure = Figure(figsize=(8, 5), layout="constrained", facecolor="white")
    axes = figure.add_subplot()
    ratio = plan.most / plan.least
    budgets = [int(plan.least * ratio ** (i / 79)) + 1 for i in range(80)]
    curves = {
        "chosen together": [plan.within(budget) for budget in budgets],
        "weights alone, f16 cache": [plan.within(b, plan.caches[:1]) for b in budgets],
        "one type of weights, best cache": [plan.one_type(b, plan.caches) for b in budgets],
    }
    for (name, found), colour in zip(curves.items(), COLOURS, strict=False):
        points = [(b / MIB, one.kld) for b, one in zip(budgets, found, strict=True) if one]
        if points:
            axes.plot(*zip(*points, strict=True), color=colour, linewidth=1.6, label=name)
    axes.set_yscale("log")
    axes.set_xscale("log")
    axes.set_xlabel("MiB of weights, K, V and scratch")
    axes.set_ylabel("KLD from the file as it is, in nats")
    axes.legend(frameon=False)
    title(axes, f"{plan.profile.name}: what bytes buy")
    save(figure, path)
