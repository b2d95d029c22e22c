"""`DraftModel`: a smaller model of the same tokens, with a cache of its own, says what may follow.

Drafting with a model (Leviathan et al. 2023; Chen et al. 2023). It takes the most probable token
each time: what is drawn from the large model's logits decides, so a request's own way of drawing
needs no counterpart here.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from threading import Event
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from localkv.cache.arrays import Array
from localkv.engine.cache_slot import CacheSlot
from localkv.engine.speculation.config import Speculation
from localkv.engine.speculation.draft_pace import DraftPace, confidence_of
from localkv.engine.speculation.prices import Prices
from localkv.engine.speculation.speculator import Speculator
from localkv.engine.token_text import Text

FEW_ALONE = 2
FEW_MISSING = 16
"""More tokens than these are evaluated as a prompt is, if the draft lacks them."""
_WARM_UP_TOKENS = 40
_PAUSE = 16
"""Tokens until it is asked again whether there may be drafts, where they have cost too much."""
_FASTER, _SLOWER = 0.3, 0.03
"""Weights of a new measurement: what else runs on the machine makes some of them longer."""


class Guess(NamedTuple):
    """A token that may follow, and how sure the draft is of it (`confidence_of`)."""

    token: int
    confidence: int


def most_probable(row: NDArray[np.float32]) -> tuple[int, float]:
    """The token that logits, float32 [n_vocab], give most, and its probability."""
    token = int(row.argmax())
    return token, 1 / float(np.exp(row - row[token]).sum())


GoesOn = Callable[[Guess, int], bool]


class DraftModel:
    """A model that drafts for texts of another one, which take turns with its cache.

    Args:
        slot: its cache, which reuses rows whatever kind they are of (not `exact`).
        n_ctx: tokens of its context.
        n_vocab: tokens that both models know; texts have no others.
        prices: of the other one's batches.

    Attributes:
        pace: what was measured, in all texts.
        seconds: that a token takes, smoothed; 0 before one was timed.
    """

    def __init__(self, slot: CacheSlot, n_ctx: int, n_vocab: int, prices: Prices) -> None:
        self.slot = slot
        self.n_ctx = n_ctx
        self.n_vocab = n_vocab
        self.pace = DraftPace(prices)
        self.seconds = 0.0

    def warm_up(self) -> None:
        """Evaluate some tokens and forget them, so that no text waits for what is made once."""

        def work() -> None:
            text = Text([0] * min(_WARM_UP_TOKENS, self.n_ctx - 8), 0)
            text.n_prompt = len(text.ids)
            for n in (1, 1, 2, 2):
                self.guesses(text, 3, 0.0, lambda guess, n: True)
                text.ids += [0] * n
            self.seconds = 0.0  # the first ones took long
            self.guesses(text, 4, 0.0, lambda guess, n: True)
            self.slot.forget()

        self.slot.turn(work)

    def read(self, text: Text) -> None:
        """Evaluate what is missing of a text, if there is room for it."""

        def work() -> None:
            self.slot.take(text)
            self.slot.logits(text, Event())

        if len(text.ids) <= self.n_ctx:
            self.slot.turn(work)

    def lacks_much(self, text: Text) -> bool:
        """Whether so many tokens of a text are missing that they are read as a prompt is."""
        n_held = self.slot.sequence.length if self.slot.is_taken_by(text) else 0
        return len(text.ids) - n_held > FEW_MISSING

    def draft(
        self, text: Text, most: int, p_min: float, goes_on: GoesOn
    ) -> tuple[list[Guess], float]:
        """As `guesses`, in a turn; and the seconds that it took."""
        started = time.perf_counter()
        found = self.slot.turn(lambda: self.guesses(text, most, p_min, goes_on))
        return found, time.perf_counter() - started

    def guesses(self, text: Text, most: int, p_min: float, goes_on: GoesOn) -> list[Guess]:
        """Tokens that may follow, one after the other, as long as each `goes_on`.

        Args:
            text: a text of the large model.
            most: so many at most.
            p_min: none that is less probable.
            goes_on: with a guess and its number, whether the one after it is looked for.
        """
        slot, found = self.slot, list[Guess]()
        most = min(most, self.n_ctx - len(text.ids))
        if most < 1:
            return found
        self._take(text)
        logits = self._logits(text)
        slot.cache.states.mark(slot.sequence)
        to_numpy = slot.model.backend.arrays.to_numpy
        while logits is not None:
            started = time.perf_counter()
            token, probability = most_probable(to_numpy(logits)[-1, : self.n_vocab])
            if probability < p_min:
                break
            found.append(Guess(token, confidence_of(probability)))
            if len(found) == most or not goes_on(found[-1], len(found)):
                break
            logits = slot.evaluate([token], generated=True)
            self._timed(time.perf_counter() - started)
        return found

    def _logits(self, text: Text) -> Array | None:
        """Those after a text, of which something is missing; a token alone is quick."""
        slot, logits = self.slot, None
        missing = text.ids[slot.sequence.length :]
        if len(missing) > FEW_ALONE:
            return slot.logits(text, Event())
        for token in missing:
            logits = slot.evaluate([token], generated=True)
        return logits

    def _take(self, text: Text) -> None:
        """Make the slot the text's, without the guesses that turned out wrong."""
        slot, ids = self.slot, text.ids
        if not slot.is_taken_by(text):
            slot.take(text)
        held, most = slot.ids, min(len(slot.ids), len(ids) - 1)
        same = min(text.n_prompt, most)
        while same < most and held[same] == ids[same]:
            same += 1
        slot.retract(text, same)
        if len(ids) - slot.sequence.length > FEW_MISSING:
            text.n_prompt = len(ids)

    def _timed(self, seconds: float) -> None:
        before = self.seconds or seconds
        weight = _SLOWER if seconds > before else _FASTER
        self.seconds = before + weight * (min(seconds, 2 * before) - before)


class ModelSpeculator(Speculator):
    """Guesses tokens of a text with a model, while it is worth it and the text is alone.

    Args:
        model: which has the rows of one text at a time.
        reads_late: it reads a text when it first drafts for it, and not at the text's beginning:
            others may run, for which it would have to wait.
    """

    def __init__(self, config: Speculation, model: DraftModel, *, reads_late: bool = False) -> None:
        self.config = config
        self.model = model
        self._reads_late = reads_late
        self.pace: DraftPace = model.pace
        self._text = Text([], 0)
        self._guesses = deque[Guess]()
        self._is_known = True
        self._n_resting = 0

    @property
    def is_resting(self) -> bool:
        """Whether drafts have cost too much, and `draft` would give none."""
        return self._n_resting > 0

    def begin(self, prompt: Iterable[int]) -> None:
        """Read a prompt."""
        ids = list(prompt)
        self._text = Text(ids, len(ids))
        self._is_known = max(ids) < self.model.n_vocab
        if self._is_known and not self._reads_late:
            self.model.read(self._text)

    def accept(self, token: int) -> None:
        """Take note of the text's next token, which proves or refutes a guess."""
        if self._guesses:
            guess = self._guesses.popleft()
            self.pace.guessed(guess.confidence, right=guess.token == token)
            if guess.token != token:
                self._guesses.clear()
        self._n_resting = max(0, self._n_resting - 1)
        self._text.ids.append(token)
        self._is_known = self._is_known and token < self.model.n_vocab

    def draft(self, most: int, *, missing: int = 0, others: int = 0) -> Sequence[int]:
        """As `Speculator.draft`."""
        pace, most = self.pace, min(most, self.config.draft_max)
        self._guesses.clear()
        is_possible = self._is_known and not others and most >= self.config.draft_min
        if not is_possible:
            return ()
        if not pace.may_draft():
            self._n_resting = _PAUSE
            pace.rested(_PAUSE - 1)
            return ()
        if self._reads_late and self.model.lacks_much(self._text):
            self.model.read(self._text)
        pace.begin(1 + missing, self.model.seconds)

        def goes_on(guess: Guess, number: int) -> bool:
            return pace.goes_on(guess.confidence, number)

        found, seconds = self.model.draft(self._text, most, self.config.draft_p_min, goes_on)
        pace.drafted(seconds)
        self._guesses.extend(found)
        n = pace.worthy([guess.confidence for guess in found])
        return [guess.token for guess in found[:n]] if n >= self.config.draft_min else ()
