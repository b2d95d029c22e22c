"""Codebooks of the `nuq` types: the numbers that serve some rows best.

k-means in one dimension (Lloyd 1982) of all values, each over its block's scale, outliers left out.
The scale depends on the codebook in its turn, so both are found several times. KVQuant weights
values by their gradients; without gradients all count alike.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from localkv.formats.nuq import scaled_inliers
from localkv.formats.shared.codebooks import LARGEST, STEPS, Codebook, check_codebook

Floats = NDArray[np.float32]

ROUNDS = 50
"""Of k-means for the same scales."""
TURNS = 4
"""Of scales and k-means."""
BINS = 1 << 14


def learn_codebook(rows: Floats, n: int) -> Codebook:
    """`n` numbers for rows: float32 [..., channels], as they are to be packed.

    The values are counted in bins, so the time does not depend on how many there are.
    """
    codebook: Codebook = ()
    for _ in range(TURNS):
        codebook = _means(scaled_inliers(rows, codebook), n, codebook)
    check_codebook(codebook)
    return codebook


def _means(values: Floats, n: int, start: Codebook) -> Codebook:
    """`n` means of values, from those before on, if there are any."""
    counts, edges = np.histogram(values.clip(-LARGEST, LARGEST), BINS, (-LARGEST, LARGEST))
    points = (edges[1:] + edges[:-1]) / 2
    below = np.concatenate(([0.0], np.cumsum(counts, dtype=np.float64)))
    moments = np.concatenate(([0.0], np.cumsum(counts * points)))
    shares = (np.arange(n) + 0.5) / n
    centres = np.array(start) if start else np.interp(shares * below[-1], below[1:], points)
    for _ in range(ROUNDS):
        borders = np.searchsorted(points, (centres[1:] + centres[:-1]) / 2)
        starts, ends = np.concatenate(([0], borders)), np.concatenate((borders, [BINS]))
        members = below[ends] - below[starts]
        sums = moments[ends] - moments[starts]
        centres = np.where(members > 0, sums / np.maximum(members, 1), centres)
    step = STEPS[n]
    parts = _distinct(np.rint(centres / step).astype(int).tolist(), LARGEST // step)
    return tuple(part * step for part in parts)


def _distinct(values: list[int], largest: int) -> Codebook:
    """The same numbers, of at most `largest`, moved apart where two are equal."""
    values[0] = max(values[0], -largest)
    for i in range(1, len(values)):
        values[i] = max(values[i], values[i - 1] + 1)
    values[-1] = min(values[-1], largest)
    for i in reversed(range(len(values) - 1)):
        values[i] = min(values[i], values[i + 1] - 1)
    return tuple(values)
