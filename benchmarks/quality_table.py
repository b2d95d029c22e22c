"""What `quality.py` found, as tables of Markdown."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from quality_bits import LENGTHS
from quality_caches import BASE, BY_BITS, EQUAL_TAIL, QUAROT, SMOOTHED, TAILED, Case
from quality_outliers import APART, NONE_APART
from quality_report import Measured, Report

BEGIN, END = "<!-- {} table of benchmarks/quality.py -->", "<!-- end of {} table -->"
SIDES = ("K alone", "V alone")
MOST_BITS = 8.9
"""Beyond lie pairs with a 16-bit type, which cost more memory and diverge no less than q8_0."""
LONG = max(LENGTHS)
BUDGETS = (3.0, 3.5, 4.0, 4.5, 5.0, 5.5, 6.0, 6.5, 7.5, 8.6)
"""Bits, with a tail and a sink after `LONG` tokens, for which the best caches are listed."""

PUBLISHED_QUAROT = {
    ("q4_1", "q4_1"): 5.51,
    ("q4_1", "kv3_1"): 5.54,
    ("kv3_1", "q4_1"): 5.65,
    ("kv3_1", "kv3_1"): 5.68,
    ("q4_1", "kv2_1"): 5.75,
    ("kv2_1", "q4_1"): 8.06,
    ("kv2_1", "kv2_1"): 9.23,
}
"""Perplexity of Llama-2-7B (QuaRot, arXiv:2404.00456, table 6)."""
QUAROT_F16 = 5.47


def full_table(report: Report) -> list[str]:
    """Every cache with every model."""
    distances = list(next(one.recall for one in report.results if one.recall))
    header = ["model", "K/V", "rotated", "tail", "sink", "smoothed", "variant", "bits"]
    header += [f"bits at {n}" for n in LENGTHS]
    header += ["KLD", "±", "KLD 99 %", "same top", "perplexity"]
    header += [f"right at {distance}" for distance in distances] + ["log p"]

    def facts(one: Measured) -> list[str]:
        if not one.recall:
            return [""] * (len(distances) + 1)
        right = [f"{one.recall[distance].right:.2f}" for distance in distances]
        return [*right, f"{one.log_p:.3f}"]

    cells = [
        [
            one.model,
            one.layers or one.pair,
            one.rotated,
            str(one.tail),
            str(one.sink),
            "yes" if one.smoothed else "no",
            one.variant,
            f"{one.bits:g}",
            *(f"{one.bits_after[n]:.3f}" for n in LENGTHS),
            f"{one.kld.value:.2e}",
            f"{one.kld.error:.0e}",
            f"{one.kld_99:.2e}",
            f"{100 * one.same_top.value:.2f} %",
            f"{one.ppl_ratio:.4f}",
            *facts(one),
        ]
        for one in report.results
    ]
    return markdown(header, cells)


def as_used(report: Report) -> list[Measured]:
    """Caches as they are without options but types and rotation."""
    return [
        one
        for one in report.results
        if not (one.smoothed or one.variant or one.layers) and has_default_rows(one)
    ]


def has_default_rows(one: Measured) -> bool:
    """Whether tail and sink are those that the types have by themselves."""
    case = used(one.type_k, one.type_v)
    return (one.tail, one.sink) == (case.tail, case.sink)


def cost_table(report: Report) -> list[str]:
    """What the types cost, a row for each cache: KLD of all models, the rest where it differs most.

    Pairs of two types with more bits than q8_0 are left out, and caches with one packed side.
    """
    plain, last = report.models[0], report.models[-1]
    shown = [one for one in as_used(report) if one.recall]
    farthest = max(shown[0].recall)
    columns: tuple[tuple[str, Sequence[str], Callable[[Measured], str]], ...] = (
        ("KLD", report.models, lambda one: nats(one) if one.kld.value else "0"),
        (
            "same top",
            (plain, last)[plain == last :],
            lambda one: f"{100 * one.same_top.value:.1f} %",
        ),
        (f"right at {farthest}", (last,), lambda one: f"{one.recall[farthest].right:.2f}"),
        ("log p", (last,), lambda one: f"{one.log_p:.2f}"),
    )
    header = ["K/V", "rotated", "bits", *(f"at {n // 1024}k" for n in LENGTHS)]
    header += [f"{title}: {model}" for title, models, _ in columns for model in models]
    cells = []
    for of in by_cache(shown):
        one = of[plain]
        if one.type_k != one.type_v and one.bits > MOST_BITS:
            continue
        figures = [show(of[model]) for _, models, show in columns for model in models]
        cells.append([one.pair, yes_or_no(one), *bits_cells(one), *figures])
    return markdown(header, cells)


def side_table(report: Report) -> list[str]:
    """KLD of a type for K alone and for V alone, the other being f16."""
    header = ["type", "rotated"]
    header += [f"{side}: {model}" for model in report.models for side in SIDES]
    klds: dict[tuple[str, str], dict[tuple[str, str], str]] = {}
    for one in as_used(report):
        sides = [name for name in (one.type_k, one.type_v) if name != BASE]
        if len(sides) == 1:
            rotated = "no" if one.rotated == "no" else "yes"
            row = klds.setdefault((sides[0], rotated), {})
            row[one.model, SIDES[one.type_k == BASE]] = nats(one)
    order = sorted(klds, key=lambda key: next(i for i, k in enumerate(klds) if k[0] == key[0]))
    columns = [(model, side) for model in report.models for side in SIDES]
    cells = [[*key, *(klds[key].get(column, "") for column in columns)] for key in order]
    return markdown(header, cells)


def frontier_table(report: Report) -> list[str]:
    """For growing budgets the pair that costs least with each model, without a tail and with one,
    and types by layer."""
    header = [f"bits at {LONG // 1024}k, at most", ""]
    for model in report.models:
        header += [model, "KLD"]
    usual = [
        one
        for one in report.results
        if not (one.smoothed or one.variant or one.layers)
        and is_auto(one)
        and one.sink == default_sink(one)
        and BASE not in (one.type_k, one.type_v)
    ]
    kinds = {
        "no tail": [one for one in usual if not one.tail],
        f"tail of {EQUAL_TAIL}": [one for one in usual if one.tail == EQUAL_TAIL],
        "by layer": [one for one in report.results if one.layers],
    }
    cells = []
    for budget in BUDGETS:
        for number, (kind, found) in enumerate(kinds.items()):
            best = [least(found, model, budget) for model in report.models]
            names = ["" if one is None or one.layers else one.pair for one in best]
            figures = [cell for pair in zip(names, map(nats, best), strict=True) for cell in pair]
            cells.append(["" if number else f"{budget:g}", kind, *figures])
    return markdown(header, cells)


def least(found: Iterable[Measured], model: str, budget: float) -> Measured | None:
    """The cache with the least divergence of a model within a budget of bits."""
    fitting = [one for one in found if one.model == model and one.bits_after[LONG] <= budget + 1e-9]
    return min(fitting, key=lambda one: one.kld.value, default=None)


def tail_table(report: Report) -> list[str]:
    """A table of pairs with several tails and sinks."""
    header = ["K/V", "tail", "sink", "bits", *(f"at {n // 1024}k" for n in LENGTHS)]
    header += [f"KLD: {model}" for model in report.models]
    wanted = [
        one
        for one in report.results
        if (one.type_k, one.type_v) in TAILED and is_auto(one) and not (one.smoothed or one.variant)
    ]
    rows = sorted(
        by_cache(wanted),
        key=lambda of: (
            TAILED.index((first(of).type_k, first(of).type_v)),
            first(of).tail,
            first(of).sink,
        ),
    )
    cells = [
        [first(of).pair, str(first(of).tail), str(first(of).sink), *bits_cells(first(of))]
        + [nats(of[model]) for model in report.models]
        for of in rows
    ]
    return markdown(header, cells)


def axis_table(report: Report) -> list[str]:
    """Scales by channel and by token, for K and for V, not rotated."""
    header = ["bits of a code", "K", "V", *(f"KLD: {model}" for model in report.models)]
    words = {True: "channel", False: "token"}
    cells = []
    for name in BY_BITS:
        sides = (f"{name}c", name)
        for of in by_cache(
            one
            for one in report.results
            if {one.type_k, one.type_v} <= set(sides)
            and (one.rotated, one.tail, one.sink) == ("no", EQUAL_TAIL, 0)
            and not one.smoothed
        ):
            pair = first(of)
            kinds = [words[side.endswith("c")] for side in (pair.type_k, pair.type_v)]
            cells.append([name[1], *kinds, *(nats(of[model]) for model in report.models)])
    return markdown(header, cells)


def bits_table(report: Report) -> list[str]:
    """K and V of 4, 3 and 2 bits, rotated, beside QuaRot's perplexities."""
    header = ["K/V", "QuaRot: perplexity", "here: " + report.models[0]]
    header += [f"here: {model}" for model in report.models[1:]]
    header += [f"KLD: {model}" for model in report.models]
    cells = []
    rotated = [one for one in as_used(report) if one.rotated == "K, V"]
    found = {(first(of).type_k, first(of).type_v): of for of in by_cache(rotated)}
    for pair in QUAROT:
        of = found.get(pair)
        if of is None:  # of a dry run
            continue
        published = PUBLISHED_QUAROT.get(pair)
        theirs = "" if published is None else percent(published / QUAROT_F16)
        cells.append(
            [f"K{pair[0][1]}V{pair[1][1]}", theirs]
            + [percent(of[model].ppl_ratio) for model in report.models]
            + [nats(of[model]) for model in report.models]
        )
    return markdown(header, cells)


def outlier_table(report: Report) -> list[str]:
    """Codebooks with and without outliers kept apart, and integers."""
    header = ["type", "outliers", "rotated", "bits"]
    header += [f"KLD: {model}" for model in report.models]
    found = by_cache(one for one in report.results if one.variant in (APART, NONE_APART))
    words = {APART: "apart", NONE_APART: "in their blocks"}
    cells = [
        [first(of).type_k, "" if first(of).type_k in BY_BITS else words[first(of).variant]]
        + ["no" if first(of).rotated == "no" else "yes", f"{first(of).bits:g}"]
        + [nats(of[model]) for model in report.models]
        for of in sorted(
            found,
            key=lambda of: (
                first(of).rotated != "no",
                -int("".join(c for c in first(of).type_k if c.isdigit())[0]),
                first(of).type_k in BY_BITS,
                first(of).variant,
            ),
        )
    ]
    return markdown(header, cells)


def smooth_table(report: Report) -> list[str]:
    """Pairs with a smoothed model and with the model as it is."""
    header = ["K/V", "smoothed", *(f"KLD: {model}" for model in report.models)]
    cells = []
    for pair in SMOOTHED:
        for of in by_cache(
            one
            for one in report.results
            if (one.type_k, one.type_v) == pair
            and is_auto(one)
            and not one.variant
            and has_default_rows(one)
        ):
            smoothed = "yes" if first(of).smoothed else "no"
            cells.append([first(of).pair, smoothed, *(nats(of[m]) for m in report.models)])
    return markdown(header, cells)


TABLES: dict[str, Callable[[Report], list[str]]] = {
    "frontier": frontier_table,
    "cost": cost_table,
    "side": side_table,
    "tail": tail_table,
    "axis": axis_table,
    "bits": bits_table,
    "outlier": outlier_table,
    "smooth": smooth_table,
}


@functools.cache
def used(type_k: str, type_v: str) -> Case:
    """A pair as it is unless a user wants it otherwise."""
    return Case(type_k, type_v).settled


def is_auto(one: Measured) -> bool:
    """Whether a cache is rotated as it is unless a user wants it otherwise."""
    return one.rotated == used(one.type_k, one.type_v).rotation


def default_sink(one: Measured) -> int:
    return used(one.type_k, one.type_v).sink or 0


def first(of: dict[str, Measured]) -> Measured:
    return next(iter(of.values()))


def yes_or_no(one: Measured) -> str:
    """Whether a cache is rotated, or which side of it."""
    return "yes" if one.rotated == "K, V" else one.rotated


def nats(one: Measured | None) -> str:
    return "" if one is None else f"{one.kld.value:.1e}"


def percent(ratio: float) -> str:
    change = 100 * (ratio - 1)
    return f"{change:+.1f} %" if abs(change) < 10 else f"{change:+,.0f} %"


def bits_cells(one: Measured) -> list[str]:
    return [f"{bits:.4g}" for bits in (one.bits, *(one.bits_after[n] for n in LENGTHS))]


def by_cache(found: Iterable[Measured]) -> list[dict[str, Measured]]:
    """The results of each cache, by model; a pair's caches follow one another."""
    caches: dict[tuple[object, ...], dict[str, Measured]] = {}
    for one in found:
        caches.setdefault(one.cache, {})[one.model] = one
    pairs = list(dict.fromkeys(first(of).pair for of in caches.values()))
    return sorted(caches.values(), key=lambda of: pairs.index(first(of).pair))


def markdown(header: Sequence[str], cells: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table."""
    rows = [header, ["---"] * len(header), *cells]
    return ["| " + " | ".join(row) + " |" for row in rows]


def insert_tables(report: Report, pages: Sequence[Path]) -> None:
    """Put each table between its marks, in the page that has them."""
    texts = {page: page.read_text() for page in pages}
    for name, make in TABLES.items():
        begin, end = (mark.format(name) for mark in (BEGIN, END))
        page = next((page for page, text in texts.items() if begin in text and end in text), None)
        if page is None:
            raise SystemExit(f"{', '.join(map(str, pages))}: no {begin} with {end}")
        before, _, rest = texts[page].partition(begin)
        after = rest.partition(end)[2]
        texts[page] = "\n".join([before + begin, "", *make(report), "", end + after])
    for page, text in texts.items():
        page.write_text(text)
