"""What `localkv calibrate` found, for people and for programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from localkv.cli.output.table import table
from localkv.errors import counted, printable

if TYPE_CHECKING:
    from localkv.cache.profile import KVProfile


def report_lines(profile: KVProfile) -> list[str]:
    """What was found, for people."""
    from localkv.cache.layer_types import in_words

    rows = [("bits", "tail", "KLD predicted", "verified", "K/V by layer")]
    rows += [
        (
            f"{one.bits:.3f}",
            str(one.kv_tail or 0),
            f"{one.predicted:.2e}",
            f"{one.verified:.2e}",
            in_words(one.layers),
        )
        for one in sorted(profile.lists, key=lambda one: (one.kv_tail or 0, one.bits))
    ]
    outliers = [
        f"layer {i} {side} {len(facts.outliers)}"
        for i, layer in enumerate(profile.layers)
        if layer is not None
        for side, facts in (("K", layer.k), ("V", layer.v))
        if facts.outliers
    ]
    ratios = [one.verified / one.predicted for one in profile.uniform if one.predicted > 0]
    lines = [
        f"{counted(profile.n_tokens, 'token')} of {printable(profile.text)}, "
        f"{profile.n_scored} predictions compared with those of an f16 cache",
        f"outlier channels: {', '.join(outliers) if outliers else 'none'}",
    ]
    if ratios:
        lines.append(
            "one type for all layers costs "
            f"{min(ratios):.2g} to {max(ratios):.2g} times what it costs in each alone"
        )
    return [*lines, "", *table(rows)]


def report(profile: KVProfile) -> dict[str, Any]:
    def lists(found: Sequence[Any]) -> list[dict[str, Any]]:
        return [
            {
                "bits": one.bits,
                "bytes_per_token": one.bytes_per_token,
                "kv_tail": one.kv_tail,
                "kv_sink": one.kv_sink,
                "predicted": one.predicted,
                "verified": one.verified,
                "layers": [pair and "/".join(pair) for pair in one.layers],
            }
            for one in found
        ]

    return {
        "model": profile.model,
        "name": profile.name,
        "n_tokens": profile.n_tokens,
        "n_scored": profile.n_scored,
        "lists": lists(profile.lists),
        "uniform": lists(profile.uniform),
        "pairs": profile.pairs,
    }
