"""Texts to measure with: one that comes with the package, and any text in chunks of one context."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources

from localkv.errors import UsageError, counted

MIN_CONTEXT = 8
"""Tokens of a chunk below which too few are scored for an error to be estimated."""


def text_chunks(
    ids: Sequence[int], n_ctx: int, *, bos_id: int | None = None, limit: int | None = None
) -> list[list[int]]:
    """A text's token ids in chunks of `n_ctx`; the remainder at the end is not used.

    Args:
        ids: the text.
        n_ctx: tokens of a chunk.
        bos_id: takes the place of each chunk's first token; None for a model without BOS.
        limit: most chunks.

    Raises:
        UsageError: the text, or a chunk, is too short.
    """
    if n_ctx < MIN_CONTEXT:
        raise UsageError(
            f"a context of {n_ctx} tokens is too short to measure with",
            hint=f"use at least {MIN_CONTEXT} (-c)",
        )
    if len(ids) < n_ctx:
        hint = "use a longer text"
        if len(ids) >= MIN_CONTEXT:
            hint += f", or a context of at most {len(ids)} (-c)"
        raise UsageError(
            f"the text has {counted(len(ids), 'token')}, but a context of {n_ctx} needs at least "
            f"{n_ctx}",
            hint=hint,
        )
    chunks = [list(ids[at : at + n_ctx]) for at in range(0, len(ids) - n_ctx + 1, n_ctx)][:limit]
    if bos_id is not None:
        for chunk in chunks:
            chunk[0] = bos_id
    return chunks


def first_scored(n_ctx: int) -> int:
    """The first position whose prediction counts: those before it have too little context."""
    return n_ctx // 2


def n_scored(n_ctx: int) -> int:
    """Number of a chunk's tokens that are scored: those from `first_scored` on."""
    return n_ctx - 1 - first_scored(n_ctx)


def calibration_text() -> str:
    """Some 1,500 words."""
    return resources.files("localkv.quality").joinpath("calibration.txt").read_text("utf-8").strip()
