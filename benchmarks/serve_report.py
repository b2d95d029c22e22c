"""The tables and the plot of `serve.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

ROWS = {
    "start": ("answers_s", "loaded_s"),
    "long prompt": ("alone_s", "beside_s", "gap_p99_ms", "gap_max_ms"),
    "short behind long": ("first_ms",),
    "prefixes": ("turn_new", "turn_read", "shared_all", "shared_read", "shared_s"),
    "liveness": ("p99_ms",),
    "gone": ("first_ms",),
    "crowd": ("errors", "front_mib"),
}
WORDS = {
    "answers_s": "/health answers after, s",
    "loaded_s": "model loaded after, s",
    "alone_s": "long prompt alone, first token, s",
    "beside_s": "beside four streams, first token, s",
    "gap_p99_ms": "their tokens meanwhile, p99, ms",
    "gap_max_ms": "their tokens meanwhile, longest, ms",
    "first_ms": "first token, ms",
    "turn_new": "next turn: new tokens",
    "turn_read": "next turn: evaluated",
    "shared_all": "16 with one beginning: tokens",
    "shared_read": "16 with one beginning: evaluated",
    "shared_s": "16 with one beginning: done after, s",
    "p99_ms": "/health meanwhile, p99, ms",
    "errors": "256 streams, 500 idle: errors",
    "front_mib": "256 streams, 500 idle: front, MiB",
}


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def table(result: dict[str, Any]) -> str:
    """Markdown."""
    figures = result["figures"]
    names = list(figures["start"])
    lines = [
        f"{result['machine']}, {result['shape']} in Q4_0",
        "",
        "| Streams | "
        + " | ".join(f"{name}, t/s | first, ms | p99 gap, ms" for name in names)
        + " |",
        "| --- |" + " --- |" * 3 * len(names),
    ]
    for what, by_name in figures.items():
        if what.endswith(" streams"):
            keys = ("tokens_per_s", "first_ms", "gap_p99_ms")
            cells = [_number(by_name[name][key]) for name in names for key in keys]
            lines.append(f"| {what.split()[0]} | " + " | ".join(cells) + " |")
    lines += ["", "| | " + " | ".join(names) + " |", "| --- |" + " --- |" * len(names)]
    for what, keys in ROWS.items():
        for key in keys:
            cells = [_number(figures.get(what, {}).get(name, {}).get(key)) for name in names]
            label = WORDS[key] if key != "first_ms" else f"{what}: {WORDS[key]}"
            lines.append(f"| {label} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def plot(result: dict[str, Any], path: Path) -> None:
    """Tokens per second of all streams, and the slowest of hundred gaps, over their number."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figures = result["figures"]
    counts = [int(what.split()[0]) for what in figures if what.endswith(" streams")]
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for name in figures["start"]:
        rows = [figures[f"{count} streams"][name] for count in counts]
        axes[0].plot(counts, [row["tokens_per_s"] for row in rows], "o-", label=name)
        axes[1].plot(counts, [row["gap_p99_ms"] for row in rows], "o-", label=name)
    for axis, title in zip(
        axes, ("Tokens per second, all streams", "Time between tokens, p99, ms"), strict=True
    ):
        axis.set(title=title, xlabel="streams", xticks=counts, ylim=0)
        axis.grid(alpha=0.3)
    axes[0].legend()
    figure.suptitle(f"{result['shape']}, Q4_0, K and V in q8_0; {result['machine']}", fontsize=9)
    figure.savefig(path)
