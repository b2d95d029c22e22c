"""Which codebooks a cache took, in words. No array library."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import Literal, NamedTuple


class CodebookUse(NamedTuple):
    """The codebook of one layer's K or V.

    Attributes:
        type: the cache type that selects from it.
        is_measured: it comes from a profile; else it is that of normal numbers.
    """

    layer: int
    side: Literal["k", "v"]
    type: str
    is_measured: bool


def codebooks_in_words(uses: Iterable[CodebookUse]) -> str:
    """As "K nuq3, V nuq4: of the profile"; layers are named where others of the same side and type
    have codebooks of the other kind."""
    found = dict[bool, dict[str, list[int]]]({True: {}, False: {}})
    for use in sorted(set(uses), key=lambda use: (use.side, use.type, use.layer)):
        found[use.is_measured].setdefault(f"{use.side.upper()} {use.type}", []).append(use.layer)
    parts = []
    for measured, origin in ((True, "the profile"), (False, "normal numbers, without a profile's")):
        rows = [
            f"{name} (layers {_runs(layers)})" if name in found[not measured] else name
            for name, layers in found[measured].items()
        ]
        if rows:
            parts.append(f"{', '.join(rows)}: of {origin}")
    return "; ".join(parts)


def _runs(numbers: list[int]) -> str:
    """Ascending numbers as "0-3, 5"."""
    runs = list[str]()
    for _, items in groupby(enumerate(numbers), key=lambda item: item[1] - item[0]):
        run = [number for _, number in items]
        runs.append(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}")
    return ", ".join(runs)
