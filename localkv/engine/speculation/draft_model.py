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
from typing import Generic, NamedTuple, Protocol, TypeVar, cast

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
    """

    drafts_together = False

    def __init__(self, slot: CacheSlot, n_ctx: int, n_vocab: int, prices: Prices) -> None:
        self.slot = slot
        self.n_ctx = n_ctx
        self.n_vocab = n_vocab
        self.pace = DraftPace(prices)
        self._times = GuessTimes()
        self._n_same = 0

    def times(self, n_texts: int = 1) -> GuessTimes:
        """What guesses take."""
        return self._times

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
                self._times.token, started = 0.0, time.perf_counter()
                found = self.guesses(text, self._any(4))
                seconds, token = time.perf_counter() - started, self._times.token
                timed.append((token, seconds - token * len(found)))
            token, overhead = (max(0.0, min(some)) for some in zip(*timed, strict=True))
            self._times = GuessTimes(token, overhead=overhead)
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
            return self._times.read(n_missing, time.perf_counter() - started)

        return self.slot.turn(work) if len(text.ids) <= self.n_ctx else 0.0

    def lacks_much(self, text: Text) -> bool:
        """Whether the missing tokens of a text are as many as a prompt, and read like one."""
        return self.n_missing(text) > FEW_MISSING

    def n_missing(self, text: Text) -> int:
        """Tokens of a text to be evaluated before the first guess."""
        n_held = self.slot.sequence.length if self.slot.is_taken_by(text) else 0
        return max(1, len(text.ids) - n_held)

    def draft(
        self, asked: Sequence[tuple[Text, Guessing]], started: float | None = None
    ) -> tuple[list[list[Guess]], float]:
        """Call `guesses` for the only text in a turn; and the seconds that it took since it
        `started`, as `GuessTimes.drafted` has them."""
        ((text, guessing),) = asked
        started, n_missing = started or time.perf_counter(), self.n_missing(text)
        found = self.slot.turn(lambda: self.guesses(text, guessing))
        return [found], self._times.drafted(n_missing, len(found), time.perf_counter() - started)

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
                self._times.timed(found.seconds)
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
            self._times.timed(time.perf_counter() - started)
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


Of = TypeVar("Of")
"""What a guesser knows a text by."""
_Of = TypeVar("_Of", contravariant=True)


class Guesser(Protocol[_Of]):
    """What drafts for texts of another model.

    Attributes:
        pace: what was measured, in all texts.
        n_vocab: tokens that both know.
        drafts_together: it drafts for several texts that share steps.
    """

    pace: DraftPace
    drafts_together: bool

    @property
    def n_vocab(self) -> int: ...

    def times(self, n_texts: int = 1) -> GuessTimes:
        """What guesses for `n_texts` texts together take."""
        ...

    def n_missing(self, text: _Of) -> int:
        """Tokens of a text to be evaluated before the first guess."""
        ...

    def lacks_much(self, text: _Of) -> bool:
        """Whether the missing tokens of a text are as many as a prompt, and read like one."""
        ...

    def read(self, text: _Of) -> float:
        """Evaluate what is missing of a text: the seconds that it took."""
        ...

    def draft(
        self, asked: Sequence[tuple[_Of, Guessing]], started: float
    ) -> tuple[list[list[Guess]], float]:
        """Tokens that may follow each text, which shares no step with others if it is the only
        one; and the seconds that it took since it `started`."""
        ...


class ModelSpeculator(Speculator, Generic[Of]):
    """Guesses tokens of a text with a model, while it is worth it.

    Args:
        model: which guesses.
        rows: what the model knows the text by; None for the text.
        copies: guesses, too, from what the text repeats; the longer guess is taken.
        reads_late: it reads a text when it first drafts for it, and not at the text's beginning:
            others may run, for which it would have to wait.

    Attributes:
        pace: what was measured of who has guessed last.
    """

    def __init__(
        self,
        config: Speculation,
        model: Guesser[Of],
        rows: Of | None = None,
        *,
        copies: Speculator | None = None,
        reads_late: bool = False,
    ) -> None:
        self.config = config
        self.model = model
        self.pace: Pace = model.pace
        self._rows = rows
        self._copies = copies
        self._reads_late = reads_late
        self._n_found = 0
        self._text = Text([], 0)
        self._guesses = deque[Guess]()
        self._is_known = True
        self._is_read = False
        self._n_resting = 0

    @property
    def is_resting(self) -> bool:
        """Whether drafts have cost too much, and `draft` would give none."""
        return self._n_resting > 0 and (self._copies is None or self._copies.is_resting)

    @property
    def drafts_together(self) -> bool:
        """Whether the model drafts for this text and others that share a step."""
        return self.model.drafts_together

    def begin(self, prompt: Iterable[int]) -> None:
        """Read a prompt."""
        ids = list(prompt)
        self._text = Text(ids, len(ids))
        self._is_known = max(ids) < self.model.n_vocab
        self._is_read = self._is_known and not self._reads_late
        if self._is_read:
            self.model.read(self._of)
        if self._copies is not None:
            self._copies.begin(ids)

    @property
    def _of(self) -> Of:
        return cast("Of", self._text) if self._rows is None else self._rows

    def priced(self, prices: Prices) -> None:
        """These are the prices of the next batch."""
        self.model.pace.prices = prices
        if self._copies is not None:
            self._copies.priced(prices)

    def measured(self, n_rows: int, seconds: float) -> None:
        """Take note of a batch, as `Pace.measured` has it."""
        super().measured(n_rows, seconds)
        if self._copies is not None and self.pace is self.model.pace:
            self._copies.pace.rested(1)

    def accept(self, token: int) -> None:
        """Take note of the text's next token, which proves or refutes a guess."""
        if self._n_resting:
            self._n_resting -= 1
        elif self._guesses:
            guess = self._guesses.popleft()
            self.model.pace.guessed(guess.confidence, right=guess.token == token)
            if guess.token != token:
                self._guesses.clear()
        if self._copies is not None:
            self._copies.accept(token)
        self._text.ids.append(token)
        if token >= self.model.n_vocab:
            self._is_known = False

    def draft(self, most: int, *, missing: int = 0, others: int = 0) -> Sequence[int]:
        """Draft, as `Speculator.draft` has it, unless the model drafts for one text at a time, and
        others share the step."""
        if others and not self.drafts_together:
            self.waits()
            return ()
        return draft_together([(self, most)], missing=missing, others=others)[0]

    def asks(self, most: int) -> int:
        """Guesses that are to be made at most, as it is time for some; perhaps none.

        What the model lacks of the text is read.
        """
        self.waits()
        model, reading = self.model, 0.0
        pace, most = model.pace, min(most, self.config.draft_max)
        if not self._is_known or most < self.config.draft_min or self._n_resting:
            return 0
        lacks_much = model.lacks_much(self._of)
        if lacks_much and self._is_read:
            reading = model.times().reading * model.n_missing(self._of)
        if not pace.may_draft(reading):
            self._n_resting = min(max(_PAUSE, pace.tokens_to_rest(reading)), _LONGEST_PAUSE)
            pace.rested(self._n_resting - 1)
            return 0
        if lacks_much:
            seconds = model.read(self._of)
            if self._is_read:
                pace.read(seconds)
        self._is_read = True
        return most

    def guessing(self, most: int, n_rows: int, n_texts: int) -> tuple[Of, Guessing]:
        """How far a draft should go.

        Args:
            most: guesses at most.
            n_rows: that are evaluated anyway, beside the other texts'.
            n_texts: that guesses are made for.
        """
        times = self.model.times(n_texts)
        return self._of, self.model.pace.guessing(
            most,
            n_rows,
            times.token,
            self.model.n_vocab,
            self.config.draft_p_min,
            times.overhead,
            n_asked=n_texts,
        )

    def waits(self, guesses: Sequence[Guess] = ()) -> None:
        """Wait for the tokens that prove guesses or refute them, and for no others."""
        self._guesses = deque(guesses)

    def copied(self, most: int, missing: int, others: int) -> Sequence[int]:
        """What the text may repeat, if that is worth its rows."""
        if self._copies is None or self._copies.is_resting:
            return ()
        return self._copies.draft(most, missing=missing, others=others)

    @property
    def n_likely(self) -> int:
        """Guesses that the model may make, by those that it made last."""
        return self._n_found

    def longer(self, copied: Sequence[int], guesses: Sequence[Guess], n: int) -> Sequence[int]:
        """The longer of two drafts: what the text repeats, and the first `n` guesses."""
        is_copied = len(copied) > n
        self.pace = self.model.pace
        if is_copied and self._copies is not None:
            self.pace = self._copies.pace
        if guesses:
            self.waits(guesses)
            self._n_found = len(guesses)
        return copied if is_copied else [guess.token for guess in guesses[:n]]


def draft_together(
    asked: Sequence[tuple[ModelSpeculator[Of], int]],
    *,
    missing: int,
    others: int,
    most: int | None = None,
) -> list[Sequence[int]]:
    """Tokens that should be evaluated with the next ones of texts that share a step; of all guesses
    of their model the most likely ones are.

    Args:
        asked: speculators of one model, and the most tokens for each.
        missing, others: as `Speculator.draft` has them.
        most: guesses that the step has time for; None for any number.
    """
    model = asked[0][0].model
    pace = model.pace
    pace.shared_by(others + 1)
    copies = [speculator.copied(most, missing, others) for speculator, most in asked]
    drafts = [
        speculator.longer(copied, (), 0)
        for (speculator, _), copied in zip(asked, copies, strict=True)
    ]
    if pace.compares or not pace.prices.knows_step:
        for speculator, _ in asked:
            speculator.waits()
        return drafts
    asking = list[tuple[int, int]]()
    for i, (speculator, most) in enumerate(asked):
        if len(copies[i]) > speculator.n_likely:
            speculator.waits()
        elif n := speculator.asks(most):
            asking.append((i, n))
    if not asking:
        return drafts
    started = time.perf_counter()
    guessing = [asked[i][0].guessing(most, 1 + missing, len(asking)) for i, most in asking]
    found, seconds = model.draft(guessing, started)
    pace.drafted(seconds)
    numbers = pace.worthy([[guess.confidence for guess in guesses] for guesses in found], most)
    for (i, _), guesses, number in zip(asking, found, numbers, strict=True):
        speculator = asked[i][0]
        n = number if number >= speculator.config.draft_min else 0
        drafts[i] = speculator.longer(copies[i], guesses, n)
    if any(found) and not any(numbers):
        pace.prices.doubt()
    return drafts


_BOUNDS = (
    *(0.5, 0.65, 0.75, 0.82, 0.87, 0.91, 0.94, 0.96, 0.975, 0.985, 0.99, 0.994),
    *(0.997, 0.9985, 0.9995),
)
"""Probabilities between the levels of confidence, 1 to `MOST_SURE`."""
_PRIOR_TESTS = 4.0
_LOSS, _HOPEFUL_LOSS = 0.004, 0.02
"""Shares of the time without drafts that make up for drafts that cost more than they saved.

The first is the usual one. The second is for drafts that should pay by all that was measured, and
had bad luck.
"""
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
    """Chooses how far a draft model goes, for one text or for some that share steps."""

    def __init__(self, prices: Prices | None = None) -> None:
        super().__init__(prices)
        edges = (0.0, *_BOUNDS, 1.0)
        self._tests = [_PRIOR_TESTS] * (MOST_SURE + 1)
        self._hits = [0.0] + [_PRIOR_TESTS * (low + high) / 2 for low, high in pairwise(edges)]
        self._rows = 1, 1
        self._n_drafts = self._age = 0
        self._has_drafted = False
        self._guessing: Guessing | None = None
        self._should_pay = True

    def shared_by(self, n_texts: int) -> None:
        """`n_texts` texts share the next step: a token that a text is spared saves its share."""
        if n_texts != self._n_texts:
            self._n_texts, self._guessing = n_texts, None

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
        *,
        n_asked: int = 1,
    ) -> Guessing:
        """How far a draft should go: a guess should be followed by another one if that is likely to
        save more than it takes.

        Args:
            most: guesses at most.
            n_rows: that are evaluated anyway.
            seconds: what a guess for each of the texts takes, all together.
            n_vocab, p_min: as `Guessing` has them.
            overhead: seconds of a draft without its guesses.
            n_asked: texts that guesses are made for.
        """
        known, self._age = self._guessing, self._age + 1
        now = n_rows, n_asked
        if known is not None and self._age < _REFRESHED * n_asked and self._rows == now:
            same = known.most == most and known.n_vocab == n_vocab and known.p_min == p_min
            if same:
                return known
        one, steps, n_texts = self.prices.one, self.prices.steps, self._n_texts
        guess = seconds / one if one else 0.0
        prices = [steps(n_rows + n_asked * n) for n in range(1, most + 1)]
        share = _MARGIN * n_texts / n_asked  # of a step that a right guess saves
        least = [share * (guess + max(0.0, after - price)) for price, after in pairwise(prices)]
        n_tried = self.prices.most_rows // n_asked
        least = [x if n < n_tried else 1.0 for n, x in enumerate(least, 1)]
        chances = [self._chance(level) for level in range(1, MOST_SURE + 1)]
        self._rows, self._age = now, 0
        self._should_pay = self._pays(
            [price - steps(n_rows) + guess * (n + 1) for n, price in enumerate(prices)],
            overhead / one if one else 0.0,
            n_asked / n_texts,
        )
        self._guessing = Guessing(most, n_vocab, p_min, _BOUNDS, chances, (*least, 1.0))
        return self._guessing

    def worthy(self, confidences: Sequence[Sequence[int]], most: int | None = None) -> list[int]:
        """How many of the guesses that were made for each text should be evaluated, perhaps none.

        Args:
            confidences: in each text's guesses.
            most: guesses of all texts that a step has time for, at most.
        """
        most = self.prices.most_rows if most is None else min(most, self.prices.most_rows)
        steps, (rows, _) = self.prices.steps, self._rows
        every = list[tuple[float, int]]()
        for text, levels in enumerate(confidences):
            likely = 1.0
            for level in levels:
                likely *= self._chance(level)
                every.append((likely, text))
        every.sort(key=lambda one: -one[0])
        saved, best, best_gain = 0.0, 0, 0.0
        for n, (likely, _) in enumerate(every[:most], 1):
            saved += likely / self._n_texts
            gain = saved - _MARGIN * (steps(rows + n) - steps(rows))
            if gain > best_gain:
                best, best_gain = n, gain
        numbers = [0] * len(confidences)
        for _, text in every[:best]:
            numbers[text] += 1
        return numbers

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
        """Count time, as `Pace.spent` has it, once for each text of a step."""
        one, seconds = self.prices.one, self.prices.usual(n_rows, seconds)
        if n_rows > 1 or (n_texts == 1 and self._is_after_drafts):
            self._lost += (seconds - (one or seconds)) / n_drafted
        else:
            self._make_up(seconds / n_texts)
        self._is_after_drafts = n_rows > 1

    def rested(self, n_steps: int) -> None:
        """Take note of steps that were not measured, each with one token and no drafts."""
        self._make_up(n_steps * self.prices.one / self._n_texts)

    def saved(self) -> None:
        """A drafted token was right: one step less, or the text's share of one."""
        self._gain(self.prices.one / self._n_texts)

    def _pays(self, prices: Sequence[float], overhead: float, share: float = 1.0) -> bool:
        """Whether the guesses that the draft is most sure about save more steps than they take.

        Args:
            prices: steps that 1, 2, ... guesses take.
            overhead: steps of a draft, however many they are.
            share: steps that a guess saves which is right for all texts.
        """
        chance, likely, saved = self._chance(MOST_SURE), 1.0, 0.0
        for price in prices:
            likely *= chance
            saved += share * likely
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
