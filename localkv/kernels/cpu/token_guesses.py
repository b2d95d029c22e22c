"""Guesses of a program of one token: its chain again and again, with nothing of Python in between.

Behind each token a worker takes the most probable one and writes what the chain reads of the next
(`linear/guess.py`): its row of the embedding, its rotations, and the items that say where its rows
go and how many there are, each of which is one more than before as long as the page is the same.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from localkv.kernels.backend import MovedBatch
from localkv.kernels.bounds import BoundsError
from localkv.kernels.cpu.addresses import Floats, address
from localkv.kernels.cpu.attention.token_steps import AttentionSteps
from localkv.kernels.cpu.jit.kernel_source import KernelSource
from localkv.kernels.cpu.jit.specialize import specialized
from localkv.kernels.cpu.linear.embedding import Embedding
from localkv.kernels.cpu.linear.guess_job import IS_OVER, N_EVALUATED, N_GUESSED, GuessJob
from localkv.kernels.cpu.runtime.chain import Chain
from localkv.kernels.cpu.token_places import TokenPlaces
from localkv.kernels.guessing import Guessed, Guessing
from localkv.kernels.rope import NEARBY

GUESS = KernelSource("linear/guess")
MOST_ITEMS = 64
"""That are one more for each token, or pieces of memory that are cleared; few layers need any of
their own."""


class TokenGuesses:
    """Runs the chain of a program.

    Args:
        places: of the program, whose only stage is a chain.
        attention: steps of attention in it.
        n_vocab: logits of a token.
        name: of the logits in the chain.
    """

    def __init__(
        self, places: TokenPlaces, attention: AttentionSteps, n_vocab: int, name: str
    ) -> None:
        self.places, self.attention = places, attention
        self.logits: dict[str, Floats] = {name: np.empty((1, n_vocab), np.float32)}
        self.given, self.tokens = np.zeros((2, NEARBY), np.int64)
        self.probabilities, self.limits = np.zeros(NEARBY, np.float32), np.zeros(2, np.float32)
        self.grow, self.clear = np.zeros(MOST_ITEMS, np.int64), np.zeros((MOST_ITEMS, 2), np.int64)
        self.turns = np.zeros((0, 3), np.int64)
        self.job = np.zeros(len(GuessJob._fields), np.int64)
        self.worker = specialized(GUESS)["worker"]
        self._guessing: Guessing | None = None
        self._tables = [np.zeros(0, np.float32)] * 3
        self._table_places = dict[str, int]()
        likely, (logits,) = address(self.limits), self.logits.values()
        self._places = {
            "given": address(self.given),
            "logits": address(logits),
            "tokens": address(self.tokens),
            "probabilities": address(self.probabilities),
            "likely": likely,
            "p_min": likely + 4,
            "grow": address(self.grow),
            "clear": address(self.clear),
        }
        self._n_vocab, self._address = n_vocab, address(self.job)

    def run(
        self, moved: MovedBatch, more: Sequence[int], guessing: Guessing, embedding: Embedding
    ) -> Guessed | None:
        """The tokens behind one whose places are filled; as `RunGuesses` has it.

        Raises:
            BoundsError: a token is not in the vocabulary.
        """
        given, n_rows = [*moved.token_ids, *more], moved.token_embd.shape[0]
        if not 0 <= min(given) <= max(given) < n_rows:
            raise BoundsError(f"tokens {given}, and {n_rows} of them")
        row = embedding.row_job(moved.token_embd, moved.scale, self.places.entries[0])
        n = min(guessing.most + len(given) - 1, NEARBY)
        turns, growing = self.places.turns(moved, n), self.attention.growing(moved.before)
        if row is None or turns is None or growing is None:
            return None
        items, cleared = growing
        items = [*items, *self.places.growing()]
        most = n - len(given) + 1
        if most < 1 or max(len(items), len(cleared)) > MOST_ITEMS:
            return None
        self.given[: len(given)], self.grow[: len(items)] = given, items
        for i, (at, n) in enumerate(cleared):
            self.clear[i] = at, n
        self.turns = np.array(turns, np.int64).reshape(-1, 3)
        self.limits[:] = 1.0, guessing.p_min
        self.job[:] = GuessJob(
            next_piece=0,
            is_over=0,
            n_evaluated=0,
            n_given=len(given),
            n_guessed=0,
            most=most,
            n_vocab=min(guessing.n_vocab, self._n_vocab),
            n_bounds=len(guessing.bounds),
            row_worker=row.worker,
            row_job=row.job,
            row_item=row.item,
            first_row=row.first,
            row_bytes=row.row_bytes,
            n_grow=len(items),
            n_clear=len(cleared),
            n_turns=len(self.turns),
            turns=address(self.turns),
            **self._places,
            **self._tables_of(guessing),
        )
        at = self._address
        (chain,) = self.places.stages
        assert isinstance(chain, Chain)
        started = time.perf_counter()
        chain.run_rounds(self.worker, at, at + 8 * IS_OVER, **self.logits)
        n, n_evaluated = int(self.job[N_GUESSED]), int(self.job[N_EVALUATED])
        return Guessed(
            self.tokens[:n].tolist(),
            self.probabilities[:n].tolist(),
            n_evaluated,
            (time.perf_counter() - started) / n_evaluated,
        )

    def _tables_of(self, guessing: Guessing) -> dict[str, int]:
        """Addresses of its numbers, which are copied only if it is another one."""
        if guessing is not self._guessing:
            names = "bounds", "chances", "least"
            tables = [(*getattr(guessing, name), 0.0) for name in names]
            self._tables = [np.array(table, np.float32) for table in tables]
            places = map(address, self._tables)
            self._table_places = dict(zip(names, places, strict=True))
            self._guessing = guessing
        return self._table_places
