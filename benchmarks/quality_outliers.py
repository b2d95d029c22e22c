"""The `nuq` types with and without outliers kept apart: KVQuant's ablation.

The kernels always keep one of 64 values apart. So both are run by the reference backend with the
types' references in NumPy. One of them is made to find no outliers. A block's scale then is for all
its values, and its field for outliers, half a bit per value, says nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from quality_caches import BY_BITS, CODEBOOKS, Case

from localkv.config import CacheConfig, KVCodebook
from localkv.kernels.reference.backend import reference_backend
from localkv.loader.weights import load_model
from localkv.quality.kv_profile import Plan, learn_codebooks
from localkv.quality.scores import TokenScores, base_cache, joined, score_chunks
from localkv.quant_formats import KV_FORMATS, nuq
from localkv.quant_formats.shared.bits import Floats

APART, NONE_APART = "outliers apart", "none apart"
ROTATIONS = ("off", "on")


@contextmanager
def none_apart() -> Iterator[None]:
    """Outliers stay in their blocks meanwhile, in what the references pack."""
    found = nuq._inliers

    def nowhere(x: Floats) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        kept, place, has_outlier = found(x)
        return np.ones_like(kept), np.zeros_like(place), np.zeros_like(has_outlier)

    nuq._inliers = nowhere
    try:
        yield
    finally:
        nuq._inliers = found


def bits_without(name: str) -> float:
    """Bits per value of a type with codebooks that has no field for outliers."""
    fmt = KV_FORMATS[name]
    (field,) = (plane for plane in fmt.planes if plane.name == "o")
    return fmt.bits_per_value(64) - 8 * field.n_bytes / fmt.block_size


def outlier_cases(
    path: Path, text: Sequence[Sequence[int]], known: Sequence[Sequence[int]], n_ctx: int
) -> Iterator[tuple[Case, str, TokenScores]]:
    """Each case with and without outliers kept apart, and integers of as many bits to compare.

    Args:
        path: the model.
        text: what is scored.
        known: what codebooks are learned from, in the same way.
    """
    model, _ = load_model(path, reference_backend())

    def measured(names: Sequence[str], rotation: str) -> Iterator[tuple[Case, TokenScores]]:
        codebooks: tuple[KVCodebook, ...] = ()
        if names == CODEBOOKS:
            codebooks = learn_codebooks(model, known, Plan(CODEBOOKS, (), n_ctx, rotation))
        cases = [Case(name, name, rotation, 0, 0) for name in names]
        caches = [
            CacheConfig(
                *(case.type_k, case.type_v),
                n_ctx=n_ctx,
                kv_rotation=rotation,
                kv_tail=0,
                kv_sink=0,
                kv_codebooks=codebooks,
            )
            for case in cases
        ]
        scores = zip(*score_chunks(model, text, caches, base=base_cache(n_ctx)), strict=True)
        yield from zip(cases, map(joined, scores), strict=True)

    for rotation in ROTATIONS:
        for case, scores in (*measured(CODEBOOKS, rotation), *measured(BY_BITS, rotation)):
            yield case, APART, scores
        with none_apart():
            for case, scores in measured(CODEBOOKS, rotation):
                yield case, NONE_APART, scores
