"""Types of K and of V by layer, in a few words. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby


def in_words(layer_types: Sequence[tuple[str, str] | None]) -> str:
    """Runs of layers with the same pair, "0-3 q8_0/q4_0, 4 q5_1/q5_1", without those of none."""
    runs = list[str]()
    for pair, items in groupby(enumerate(layer_types), key=lambda item: item[1]):
        layers = [layer for layer, _ in items]
        if pair is not None:
            span = f"{layers[0]}-{layers[-1]}" if len(layers) > 1 else f"{layers[0]}"
            runs.append(f"{span} {'/'.join(pair)}")
    return ", ".join(runs)
