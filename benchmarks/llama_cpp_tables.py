"""The output of `cpu_vs_llama_cpp.py`: tables of medians and ratios, for the documentation."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

TITLES = {
    "tg": "Decoding, tokens per second",
    "pp": "Prompt of 512 tokens, tokens per second",
    "load": "Loading, seconds",
    "load and a token": "Loading and the first token, seconds",
}
OURS, PEER = "localkv", "llama.cpp"


def ratio(values: Sequence[float], others: Sequence[float]) -> str:
    """Median, least and largest ratio of runs of the same round."""
    ratios = [a / b for a, b in zip(values, others, strict=True)]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"


def rounded(value: float) -> str:
    """Three digits."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def table(rows: list[dict], test: str) -> str:
    """One table for a test: a line for each type of weights and pair, columns for each depth.

    Args:
        rows: `test`, `weights`, `pair`, `depth`, `program` and `values`, one for each round.
    """
    found = {
        (row["weights"], row["pair"], row["depth"], row["program"]): row["values"]
        for row in rows
        if row["test"] == test
    }
    if not found:
        return ""
    depths = sorted({key[2] for key in found})
    lines = list(dict.fromkeys(key[:2] for key in found))
    has_peer = any(key[3] == PEER for key in found)
    has_f16 = test in ("tg", "pp") and any(pair != lines[0][1] for _, pair in lines)
    header = ["Weights", "K/V"]
    for depth in depths:
        at = f"at {depth:,}: " if len(depths) > 1 else ""
        header += [f"{at}{OURS}", *([PEER, "ratio"] if has_peer else [])]
        header += ["to our f16"] if has_f16 else []
    body = []
    for weights, pair in lines:
        *shape, kind = weights.split()
        cells = [" ".join((*shape, kind.upper())), pair if "/" in pair else f"{pair}/{pair}"]
        for depth in depths:
            ours, peer = (found.get((weights, pair, depth, name)) for name in (OURS, PEER))
            f16 = found.get((weights, "f16", depth, OURS))
            cells.append(rounded(statistics.median(ours)))
            if has_peer:
                cells.append(rounded(statistics.median(peer)) if peer else "")
                cells.append(ratio(ours, peer) if peer else "")
            if has_f16:
                cells.append(ratio(ours, f16) if f16 and pair != "f16" else "")
        body.append(cells)
    rule = ["---"] * len(header)
    text = "\n".join(f"| {' | '.join(cells)} |" for cells in (header, rule, *body))
    return f"{TITLES[test]}\n\n{text}\n"


def tables(rows: list[dict]) -> str:
    """All that there are figures for."""
    return "\n".join(filter(None, (table(rows, test) for test in TITLES)))
