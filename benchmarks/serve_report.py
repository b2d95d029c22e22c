"""The tables and the plot of `serve.py`."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

ROWS = {
    "start": ("answers_s", "loaded_s"),
    "long alone": ("alone_s",),
    "long beside": ("beside_s", "gap_p99_ms", "gap_max_ms"),
    "short behind long": ("first_ms",),
    "prefixes": ("turn_new", "turn_read", "shared_all", "shared_read", "shared_s"),
    "liveness": ("health_p99_ms", "metrics_p99_ms"),
    "gone": ("first_ms",),
    "crowd": ("errors", "crowd_s", "memory_mib"),
}
WORDS = {
    "answers_s": "/health answers after, s",
    "loaded_s": "model loaded after, s",
    "alone_s": "long prompt alone: first token, s",
    "beside_s": "long prompt beside four streams: first token, s",
    "gap_p99_ms": "between their tokens meanwhile, p99, ms",
    "gap_max_ms": "between their tokens meanwhile, longest, ms",
    "turn_new": "next turn: new tokens",
    "turn_read": "next turn: evaluated",
    "shared_all": "16 with one beginning: tokens",
    "shared_read": "16 with one beginning: evaluated",
    "shared_s": "16 with one beginning: done after, s",
    "health_p99_ms": "/health while a long prompt is read, p99, ms",
    "metrics_p99_ms": "/metrics while a long prompt is read, p99, ms",
    "errors": "256 streams, 500 idle: not answered",
    "crowd_s": "256 streams, 500 idle: done after, s",
    "memory_mib": "256 streams, 500 idle: process that is asked, MiB",
}
FIRST = {
    "short behind long": "50 tokens behind a long prompt: first token, ms",
    "gone": "after 16 have gone away: first token, ms",
}
STREAMS = {
    "all_per_s": "t/s",
    "together_per_s": "while all run",
    "first_ms": "first, ms",
    "gap_p99_ms": "p99 gap, ms",
}


def _medians(rounds: dict[str, dict[str, list[dict[str, float]]]]) -> Any:
    """What was measured, by server, as medians of the rounds that have it."""
    return {
        what: {
            name: {
                key: statistics.median(one[key] for one in done if key in one)
                for key in {key for one in done for key in one}
            }
            for name, done in by_name.items()
        }
        for what, by_name in rounds.items()
    }


def _cell(figures: dict[str, float], key: str) -> str:
    value = figures.get(key)
    if value is None:
        limit = figures.get("limit_s")
        return "-" if limit is None or key == "together_per_s" else f"not in {limit:.0f} s"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _names(figures: Any) -> list[str]:
    found = {name for by_name in figures.values() for name in by_name}
    return sorted(found, reverse=True, key=lambda name: name == "localkv")


def table(result: dict[str, Any]) -> str:
    """Markdown."""
    figures = _medians(result["rounds"])
    names = _names(figures)
    lines = [f"{result['machine']}, {result['shape']} in Q4_0"]
    if counts := _counts(figures):
        heads = [f"{name}, {words}" for name in names for words in STREAMS.values()]
        lines += ["", f"| Streams | {' | '.join(heads)} |", "| --- |" + " --- |" * len(heads)]
        for count in counts:
            by_name = figures[f"{count} streams"]
            cells = [_cell(by_name.get(name, {}), key) for name in names for key in STREAMS]
            lines.append(f"| {count} | " + " | ".join(cells) + " |")
    lines += ["", "| | " + " | ".join(names) + " |", "| --- |" + " --- |" * len(names)]
    for what, keys in ROWS.items():
        for key in keys if what in figures else ():
            cells = [_cell(figures[what].get(name, {}), key) for name in names]
            label = FIRST[what] if key == "first_ms" else WORDS[key]
            lines.append(f"| {label} | " + " | ".join(cells) + " |")
    n_rounds = {len(done) for what, by in result["rounds"].items() for done in by.values()}
    lines += ["", f"medians of {min(n_rounds)} to {max(n_rounds)} rounds"]
    return "\n".join(lines)


def _counts(figures: Any) -> list[int]:
    return sorted(int(what.split()[0]) for what in figures if what.endswith(" streams"))


def plot(result: dict[str, Any], path: Path) -> None:
    """Tokens per second of all streams, and the slowest of hundred gaps, over their number; bars
    from the least to the most of the rounds."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    rounds = result["rounds"]
    counts = _counts(rounds)
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for name in _names(rounds):
        for axis, key in zip(axes, ("all_per_s", "gap_p99_ms"), strict=True):
            points = {
                count: [one[key] for one in done if key in one]
                for count in counts
                if (done := rounds[f"{count} streams"].get(name))
            }
            points = {count: values for count, values in points.items() if values}
            middle = [statistics.median(values) for values in points.values()]
            below = [m - min(v) for m, v in zip(middle, points.values(), strict=True)]
            above = [max(v) - m for m, v in zip(middle, points.values(), strict=True)]
            axis.errorbar([*points], middle, [below, above], fmt="o-", capsize=3, label=name)
    for axis, title in zip(
        axes,
        ("Tokens per second, all streams, prompts included", "Time between tokens, p99, ms"),
        strict=True,
    ):
        axis.set(title=title, xlabel="streams", xticks=counts)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    axes[0].legend()
    figure.suptitle(f"{result['shape']}, Q4_0, K and V in q8_0; {result['machine']}", fontsize=9)
    figure.savefig(path)
