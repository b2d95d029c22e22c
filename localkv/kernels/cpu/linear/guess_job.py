"""The job of the worker that guesses a token and prepares its evaluation."""

from __future__ import annotations

from typing import NamedTuple


class GuessJob(NamedTuple):
    """What is known of the tokens, from one to the next. Addresses are int64, too.

    Attributes:
        next_piece: unused, as there is one piece.
        is_over: whether no further token is to be evaluated.
        n_evaluated: tokens that were.
        n_given, given: those at the start, int64 [n_given], the first of which is prepared.
        n_guessed, most: tokens that were guessed, and how many may be.
        n_vocab: tokens that are guessed.
        logits: float32 [n_vocab] after the last one.
        tokens, probabilities: int64 and float32 [most], the guesses.
        likely: one float32, the chance that all of them are right.
        p_min: one float32.
        n_bounds, bounds, chances, least: as `Guessing` has them, float32.
        row_worker, row_job: decode a row of the embedding (`EmbeddingJob`).
        row_item: address of the item that names the row.
        first_row, row_bytes: of the embedding.
        n_grow, grow: items that are one more for each token: their addresses, int64 [n_grow].
        n_clear, clear: memory that is 0 for each token: int64 [n_clear, 2], addresses and words.
        n_turns, turns: rotations: int64 [n_turns, 3], where they go, where those of the last token
            are, and how many floats.
    """

    next_piece: int
    is_over: int
    n_evaluated: int
    n_given: int
    given: int
    n_guessed: int
    most: int
    n_vocab: int
    logits: int
    tokens: int
    probabilities: int
    likely: int
    p_min: int
    n_bounds: int
    bounds: int
    chances: int
    least: int
    row_worker: int
    row_job: int
    row_item: int
    first_row: int
    row_bytes: int
    n_grow: int
    grow: int
    n_clear: int
    clear: int
    n_turns: int
    turns: int


IS_OVER, N_EVALUATED, N_GUESSED = (
    GuessJob._fields.index(name) for name in ("is_over", "n_evaluated", "n_guessed")
)
