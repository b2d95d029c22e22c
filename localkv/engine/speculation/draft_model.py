"""`DraftModel`: a smaller model of the same tokens, with a cache of its own, says what may follow.

Drafting with a model (Leviathan et al. 2023; Chen et al. 2023). It takes the most probable token
each time: what is drawn from the large model's logits decides, so a request's own way of drawing
needs no counterpart here.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from localkv.cache.arrays import Array
from localkv.engine.cache_slot import CacheSlot
from localkv.engine.prefix import Text
from localkv.engine.speculation.config import Speculation
from localkv.engine.speculation.speculator import (
    MOST_SURE,
    OUTLIER,
    Pace,
    Prices,
    Speculator,
    smoothed,
)
from localkv.kernels.backend import Guessing

FEW_ALONE = 2
FEW_MISSING = 16
"""More tokens than these are evaluated as a prompt is, if the draft lacks them."""
_WARM_UP_TOKENS = 40
_PAUSE, _LONGEST_PAUSE = 16, 128
"""Tokens until it is asked again whether there may be drafts, where they have cost too much, at
least and at most."""
_TIMES = 4
"""Drafts that are timed before a user waits for one."""


class Guess(NamedTuple):
    """A token that may follow, and how sure the draft is of it (`confidence_of`)."""

    token: int
    confidence: int


def most_probable(row: NDArray[np.float32]) -> tuple[int, float]:
    """The token that logits, float32 [n_vocab], give most, and its probability."""
    token = int(row.argmax())
    return token, 1 / float(np.exp(row - row[token]).sum())


@dataclass
class GuessTimes:
    """What guesses took so far.

    Attributes:
        token: seconds that a token takes, smoothed; 0 before one was timed.
        reading: the same of tokens that are read together.
        overhead: seconds of a draft without its tokens, smoothed.
    """

    token: float = 0.0
    reading: float = 0.0
    overhead: float = 0.0

    def timed(self, seconds: float) -> None:
        """A token took so long."""
        self.token = smoothed(self.token, seconds)

    def read(self, n_tokens: int, seconds: float) -> float:
        """Tokens that were read together took so long: the seconds, not much more than usual."""
        before = self.reading
        self.reading = smoothed(before, seconds / n_tokens)
        return min(seconds, OUTLIER * before * n_tokens) if before else seconds

    def drafted(self, n_missing: int, n_guesses: int, seconds: float) -> float:
        """A draft took so long: the seconds, not much more than usual. Who else uses the machine
        makes it longer, but steps without a draft, too."""
        of_tokens, before = self.token * (n_missing + n_guesses), self.overhead
        self.overhead = smoothed(before, max(0.0, seconds - of_tokens))
        if before and n_missing <= FEW_MISSING:
            seconds = min(seconds, OUTLIER * (of_tokens + before))
        return seconds


class DraftModel:
    """A model that drafts for texts of another one, which take turns with its cache.

    Args:
        slot: its cache, which reuses rows whatever kind they are of (not `exact`).
        n_ctx: tokens of its context.
        n_vocab: tokens that both models know; texts have no others.
        prices: of the other one's batches.

    Attributes:
        pace: what was measured, in all texts.
        times: what it takes.
    """

    def __init__(self, slot: CacheSlot, n_ctx: int, n_vocab: int, prices: Prices) -> None:
        self.slot = slot
        self.n_ctx = n_ctx
        self.n_vocab = n_vocab
        self.pace = DraftPace(prices)
        self.times = GuessTimes()
        self._n_same = 0

    def warm_up(self) -> None:
        """Evaluate some tokens and forget them, so that no text waits for what is made once."""

        def work() -> None:
            text = Text([0] * min(_WARM_UP_TOKENS, self.n_ctx - 8), 0)
            text.n_prompt = len(text.ids)
            for n in (1, 1, 2, 2):
                self.guesses(text, self._any(3))
                text.ids += [0] * n
            timed = []
            for _ in range(_TIMES):  # the first ones took long
                self.times.token, started = 0.0, time.perf_counter()
                found = self.guesses(text, self._any(4))
                seconds, token = time.perf_counter() - started, self.times.token
                timed.append((token, seconds - token * len(found)))
            token, overhead = (max(0.0, min(some)) for some in zip(*timed, strict=True))
            self.times = GuessTimes(token, overhead=overhead)
            self.slot.forget()

        self.slot.turn(work)

    def _any(self, most: int) -> Guessing:
        """Guess as many tokens, whatever they are worth."""
        return Guessing(most, self.n_vocab, 0.0, (), (1.0,), (0.0,) * most)

    def read(self, text: Text) -> float:
        """Evaluate what is missing of a text, if there is room for it: the seconds that it took,
        not much more than usual."""

        def work() -> float:
            self._take(text)
            n_missing, started = len(text.ids) - self.slot.sequence.length, time.perf_counter()
            self.slot.logits(text)
            return self.times.read(n_missing, time.perf_counter() - started)

        return self.slot.turn(work) if len(text.ids) <= self.n_ctx else 0.0

    def lacks_much(self, text: Text) -> bool:
        """Whether the missing tokens of a text are as many as a prompt, and read like one."""
        return self.n_missing(text) > FEW_MISSING

    def n_missing(self, text: Text) -> int:
        """Tokens of a text to be evaluated before the first guess."""
        n_held = self.slot.sequence.length if self.slot.is_taken_by(text) else 0
        return max(1, len(text.ids) - n_held)

    def draft(
        self, text: Text, guessing: Guessing, started: float | None = None
    ) -> tuple[list[Guess], float]:
        """Call `guesses` in a turn; and the seconds that it took since it `started`, as
        `GuessTimes.drafted` has them."""
        started, n_missing = started or time.perf_counter(), self.n_missing(text)
        found = self.slot.turn(lambda: self.guesses(text, guessing))
        return found, self.times.drafted(n_missing, len(found), time.perf_counter() - started)

    def guesses(self, text: Text, guessing: Guessing) -> list[Guess]:
        """Tokens that may follow a text of the large model, one after the other.

        Args:
            guessing: when it ends; it may end earlier.
        """
        slot, most = self.slot, min(guessing.most, self.n_ctx - len(text.ids))
        if most < 1:
            return []
        if most < guessing.most:
            guessing = guessing._replace(most=most)
        self._take(text)
        missing = text.ids[slot.sequence.length :]
        if len(missing) <= FEW_MISSING:
            found = slot.guess(missing, guessing)
            if found is not None:
                self.times.timed(found.seconds)
                pairs = zip(found.tokens, found.probabilities, strict=True)
                return [Guess(token, confidence_of(p)) for token, p in pairs]
        return self._one_by_one(text, guessing)

    def _one_by_one(self, text: Text, guessing: Guessing) -> list[Guess]:
        """Guess one by one, for models and places where the backend runs no guesses at once."""
        slot, found, likely = self.slot, list[Guess](), 1.0
        logits = self._logits(text)
        slot.cache.states.mark(slot.sequence, 1)
        to_numpy = slot.model.backend.arrays.to_numpy
        while logits is not None:
            started = time.perf_counter()
            token, probability = most_probable(to_numpy(logits)[-1, : guessing.n_vocab])
            if probability < guessing.p_min:
                break
            found.append(Guess(token, confidence_of(probability)))
            likely *= guessing.chance(probability)
            if not guessing.goes_on(likely, len(found)):
                break
            logits = slot.evaluate([token], generated=True)
            self.times.timed(time.perf_counter() - started)
        return found

    def _logits(self, text: Text) -> Array | None:
        """Logits after a text, some of whose tokens are missing; a token alone is quick."""
        slot, logits = self.slot, None
        missing = text.ids[slot.sequence.length :]
        if len(missing) > FEW_ALONE:
            return slot.logits(text)
        for token in missing:
            logits = slot.evaluate([token], generated=True)
        return logits

    def _take(self, text: Text) -> None:
        """Make the slot the text's, without the guesses that turned out wrong."""
        slot, ids = self.slot, text.ids
        if not slot.is_taken_by(text):
            slot.take(text)
            self._n_same = 0
        held, most = slot.ids, min(len(slot.ids), len(ids) - 1)
        same = min(max(text.n_prompt, self._n_same), most)
        while same < most and held[same] == ids[same]:
            same += 1
        self._n_same = same
        slot.retract(text, same)
        if len(ids) - slot.sequence.length > FEW_MISSING:
            text.n_prompt = len(ids)


class Guesser(Protocol):
    """What drafts for a text of another model.

    Attributes:
        pace: what was measured, in all texts.
        times: what it takes.
        n_vocab: tokens that both know.
    """

    pace: DraftPace
    times: GuessTimes
    n_vocab: int

    def n_missing(self, text: Text) -> int:
        """Tokens of a text to be evaluated before the first guess."""
        ...

    def lacks_much(self, text: Text) -> bool:
        """Whether the missing tokens of a text are as many as a prompt, and read like one."""
        ...

    def read(self, text: Text) -> float:
        """Evaluate what is missing of a text: the seconds that it took."""
        ...

    def draft(self, text: Text, guessing: Guessing, started: float) -> tuple[list[Guess], float]:
        """Tokens that may follow; and the seconds that it took since it `started`."""
        ...


class ModelSpeculator(Speculator):
    """Guesses tokens of a text with a model, while it is worth it and the text is alone.

    Args:
        model: which has the rows of the text.
        reads_late: it reads a text when it first drafts for it, and not at the text's beginning:
            others may run, for which it would have to wait.
    """

    def __init__(self, config: Speculation, model: Guesser, *, reads_late: bool = False) -> None:
        self.config = config
        self.model = model
        self._reads_late = reads_late
        self.pace: DraftPace = model.pace
        self._text = Text([], 0)
        self._guesses = deque[Guess]()
        self._is_known = True
        self._is_read = False
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
        self._is_read = self._is_known and not self._reads_late
        if self._is_read:
            self.model.read(self._text)

    def accept(self, token: int) -> None:
        """Take note of the text's next token, which proves or refutes a guess."""
        if self._n_resting:
            self._n_resting -= 1
        elif self._guesses:
            guess = self._guesses.popleft()
            self.pace.guessed(guess.confidence, right=guess.token == token)
            if guess.token != token:
                self._guesses.clear()
        self._text.ids.append(token)
        if token >= self.model.n_vocab:
            self._is_known = False

    def draft(self, most: int, *, missing: int = 0, others: int = 0) -> Sequence[int]:
        """Draft, as `Speculator.draft` has it."""
        pace, most = self.pace, min(most, self.config.draft_max)
        self._guesses.clear()
        is_possible = self._is_known and not others and most >= self.config.draft_min
        if not is_possible:
            return ()
        if pace.compares:
            return ()
        model, text, reading = self.model, self._text, 0.0
        lacks_much = model.lacks_much(text)
        if lacks_much and self._is_read:
            reading = model.times.reading * model.n_missing(text)
        if not pace.may_draft(reading):
            self._n_resting = min(max(_PAUSE, pace.tokens_to_rest(reading)), _LONGEST_PAUSE)
            pace.rested(self._n_resting - 1)
            return ()
        if lacks_much:
            seconds = model.read(text)
            if self._is_read:
                pace.read(seconds)
            self._is_read = True
        started = time.perf_counter()
        guessing = pace.guessing(
            most,
            1 + missing,
            model.times.token,
            model.n_vocab,
            self.config.draft_p_min,
            model.times.overhead,
        )
        found, seconds = model.draft(text, guessing, started)
        pace.drafted(seconds)
        self._guesses.extend(found)
        n = pace.worthy([guess.confidence for guess in found])
        if found and not n:
            pace.prices.doubt()
        return [guess.token for guess in found[:n]] if n >= self.config.draft_min else ()


_BOUNDS = (
    *(0.5, 0.65, 0.75, 0.82, 0.87, 0.91, 0.94, 0.96, 0.975, 0.985, 0.99, 0.994),
    *(0.997, 0.9985, 0.9995),
)
"""Probabilities between the levels of confidence, 1 to `MOST_SURE`."""
_PRIOR_TESTS = 4.0
_LOSS, _HOPEFUL_LOSS = 0.004, 0.02
"""Shares of the time without drafts that make up for drafts that cost more than they saved:
usually, and where they should pay by all that was measured, and had bad luck."""
_MOST_LOST = 5.0
"""Steps that they may have cost more than they saved."""
_CREDIT = 8.0
"""Steps that were saved count against as many that are lost later, at most."""
_COMPARED = 48
"""Drafts after which a step without one is timed."""
_REFRESHED = 8
"""Drafts after which it is worked out again how far they should go; sooner if a guess was wrong."""
_MARGIN = 1.05
"""Guesses must be likely to save this many times what they cost."""


def confidence_of(probability: float) -> int:
    """A level for a guess that the draft gives this probability: finer the surer it is."""
    return 1 + bisect_right(_BOUNDS, probability)


class DraftPace(Pace):
    """Chooses how far a draft model goes, for one text."""

    def __init__(self, prices: Prices | None = None) -> None:
        super().__init__(prices)
        edges = (0.0, *_BOUNDS, 1.0)
        self._tests = [_PRIOR_TESTS] * (MOST_SURE + 1)
        self._hits = [0.0] + [_PRIOR_TESTS * (low + high) / 2 for low, high in pairwise(edges)]
        self._rows = 1
        self._n_drafts = self._age = 0
        self._has_drafted = False
        self._guessing: Guessing | None = None
        self._should_pay = True

    @property
    def compares(self) -> bool:
        """Whether a step without a draft should be timed now, to see what it takes."""
        return self._n_drafts >= _COMPARED

    def may_draft(self, reading: float = 0.0) -> bool:
        """Whether drafts have not cost too much so far.

        Args:
            reading: seconds that it takes the draft to read what it lacks of the text.
        """
        return self._lost + reading <= _MOST_LOST * self.prices.one

    def tokens_to_rest(self, reading: float) -> int:
        """Without drafts, until there may be some."""
        one = self.prices.one
        missing = self._lost + reading - _MOST_LOST * one
        return int(missing / (self._share() * one)) + 1 if one else 1

    def guessed(self, confidence: int, *, right: bool) -> None:
        """Take note of guesses, as `Pace.guessed` has it."""
        super().guessed(confidence, right=right)
        if not right:
            self._guessing = None

    def guessing(
        self,
        most: int,
        n_rows: int,
        seconds: float,
        n_vocab: int,
        p_min: float,
        overhead: float = 0.0,
    ) -> Guessing:
        """How far a draft should go: a guess should be followed by another one if that is likely to
        save more than it takes.

        Args:
            most: guesses at most.
            n_rows: that are evaluated anyway.
            seconds: what each guess takes.
            n_vocab, p_min: as `Guessing` has them.
            overhead: seconds of a draft without its guesses.
        """
        known, self._age = self._guessing, self._age + 1
        if known is not None and self._age < _REFRESHED and self._rows == n_rows:
            same = known.most == most and known.n_vocab == n_vocab and known.p_min == p_min
            if same:
                return known
        one, steps = self.prices.one, self.prices.steps
        guess = seconds / one if one else 0.0
        prices = [steps(n_rows + n) for n in range(1, most + 1)]
        least = [_MARGIN * (guess + max(0.0, after - price)) for price, after in pairwise(prices)]
        chances = [self._chance(level) for level in range(1, MOST_SURE + 1)]
        self._rows, self._age = n_rows, 0
        self._should_pay = self._pays(
            [price - steps(n_rows) + guess * (n + 1) for n, price in enumerate(prices)],
            overhead / one if one else 0.0,
        )
        self._guessing = Guessing(most, n_vocab, p_min, _BOUNDS, chances, (*least, 1.0))
        return self._guessing

    def worthy(self, confidences: Sequence[int]) -> int:
        """How many of the guesses that were made should be evaluated, perhaps none."""
        steps, rows = self.prices.steps, self._rows
        likely, saved, best, best_gain = 1.0, 0.0, 0, 0.0
        for n, confidence in enumerate(confidences, 1):
            likely *= self._chance(confidence)
            saved += likely
            gain = saved - _MARGIN * (steps(rows + n) - steps(rows))
            if gain > best_gain:
                best, best_gain = n, gain
        return best

    def read(self, seconds: float) -> None:
        """It took the draft so long to read what it lacked of a text."""
        self._lost += seconds

    def drafted(self, seconds: float) -> None:
        """Guesses took so long."""
        self._lost += seconds
        self._n_drafts += 1
        self._has_drafted = True

    def measured(self, n_rows: int, seconds: float) -> None:
        """A batch of rows took so long; the first of its size says nothing."""
        if self._has_drafted:  # what a step needs has left the processor's caches meanwhile
            self._is_after_drafts = True
        is_plain = n_rows == 1 and not self._is_after_drafts
        if n_rows == 1 or self.prices.is_warm(n_rows):
            super().measured(n_rows, seconds)
        else:
            self.prices.measured(n_rows, seconds)
        if is_plain:
            self._n_drafts = 0
        self._is_after_drafts |= self._has_drafted
        self._has_drafted = False

    def spent(self, n_rows: int, seconds: float, *, n_texts: int = 1, n_drafted: int = 1) -> None:
        """Count time, as `Pace.spent` has it, for texts that are alone when they have drafts."""
        one, seconds = self.prices.one, self.prices.usual(n_rows, seconds)
        if n_texts == 1 and (n_rows > 1 or self._is_after_drafts):
            self._lost += seconds - (one or seconds)
        else:
            self._make_up(seconds / n_texts)
        self._is_after_drafts = n_rows > 1

    def rested(self, n_steps: int) -> None:
        """Take note of steps that were not measured, each with one token and no drafts."""
        self._make_up(n_steps * self.prices.one)

    def saved(self) -> None:
        """A drafted token was right: one step less."""
        self._gain(self.prices.one)

    def _pays(self, prices: Sequence[float], overhead: float) -> bool:
        """Whether the guesses that the draft is most sure about save more steps than they take.

        Args:
            prices: steps that 1, 2, ... guesses take.
            overhead: steps of a draft, however many they are.
        """
        chance, likely, saved = self._chance(MOST_SURE), 1.0, 0.0
        for price in prices:
            likely *= chance
            saved += likely
            if saved > _MARGIN * (price + overhead):
                return True
        return False

    def _share(self) -> float:
        return _HOPEFUL_LOSS if self._should_pay else _LOSS

    def _make_up(self, seconds: float) -> None:
        """So long there were no drafts."""
        self._gain(self._share() * seconds)

    def _gain(self, seconds: float) -> None:
        self._lost = max(self._lost - seconds, min(self._lost, -_CREDIT * self.prices.one))
