"""Steps that the scheduler puts together, run and drawn from, for one request or many.

`StepRunner` runs a step. `RequestRows` moves the rows of requests that begin and end. `ModelSteps`
evaluates parts of several requests in a batch, or in a recorded one if all of them decode.
`BatchDrafts` adds guesses. Where one request generates and nobody waits there is nothing to plan,
and a step is what evaluates its next token.

A step has guesses if all that it evaluates was generated. They have no place beside a prompt's
piece, which fills the step's time. What guesses cost is a matter of how many texts share a step,
since all of them wait for the rows of one. So prices are known for each number of texts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from localkv.cache.arrays import Array, Draw, Wanted
from localkv.cache.kv_cache import KVCache
from localkv.cache.pages import NoPageError
from localkv.cache.pages import Sequence as CachedSequence
from localkv.engine.cache_slot import CacheSlot
from localkv.engine.generation import Generation, checked
from localkv.engine.prefix import KeptText, PrefixCache, Text
from localkv.engine.recorded import DecodeLoop, NextTokens
from localkv.engine.scheduler import Part, Request, Scheduler, SchedulerConfig, StepShape
from localkv.engine.speculation.draft_model import ModelSpeculator, draft_together
from localkv.engine.speculation.speculator import Prices, Speculator

if TYPE_CHECKING:
    from localkv.engine.disk_cache import DiskReading

LEARN_FROM = 8
"""The cost model learns from every eighth step without a prompt, and from all with one."""


@dataclass
class BatchStats:
    """What the steps did so far.

    Attributes:
        n_steps: how many there were.
        n_generated: tokens that were drawn.
        n_prompt: tokens of prompts that were evaluated.
        n_reused: tokens of prompts that were found evaluated.
        n_preempted: how often a request gave its pages to others.
        n_drafted: tokens that were guessed and evaluated.
        n_accepted: of those, which were right.
        seconds: that the steps took.
    """

    n_steps: int = 0
    n_generated: int = 0
    n_prompt: int = 0
    n_reused: int = 0
    n_preempted: int = 0
    n_drafted: int = 0
    n_accepted: int = 0
    seconds: float = 0.0


class StepRunner:
    """Runs the steps of requests, in turns that somebody else takes.

    Args:
        slot: whose text is continued, where one request runs at a time.
        rows: of the requests.
        model_steps: evaluates the parts of a step.
        config: of the scheduler.
        prices: of batches of one text.
        clock: seconds.
        reads_late: a result is only told to be computed until somebody reads it, as on a GPU.

    Attributes:
        generations: of the requests that are waiting or running, by their numbers. Only their
            readers keep them: a request whose generation is gone ends with the next step.
    """

    def __init__(
        self,
        slot: CacheSlot,
        rows: RequestRows,
        model_steps: ModelSteps,
        config: SchedulerConfig,
        prices: Prices,
        clock: Callable[[], float],
        *,
        reads_late: bool,
    ) -> None:
        self.rows = rows
        self.scheduler = Scheduler(rows, config)
        self.stats = BatchStats()
        self.generations = WeakValueDictionary[int, Generation]()
        self._model_steps = model_steps
        self._drafts = BatchDrafts(rows, prices, config)
        self._clock = clock
        self._reads_late = reads_late
        self._learns = config.n_parallel > 1
        self._unfinished = False
        self._slot = slot
        self._drawn_ahead: tuple[Text, Iterator[int]] | None = None

    def add(self, generation: Generation) -> None:
        """Have a request served, unless nothing is wanted of it."""
        if not generation.has_ended:
            self.generations[generation.request.number] = generation
            self.scheduler.add(generation.request)

    @property
    def n_waiting(self) -> int:
        """Requests that wait, and that somebody reads."""
        generations = [self.generations.get(one.number) for one in [*self.scheduler.waiting]]
        return sum(one is not None and not one.has_ended for one in generations)

    def end(self, request: Request) -> None:
        """A request is done, or cancelled; its rows are kept as long as there is room."""
        self.generations.pop(request.number, None)
        self.scheduler.end(request)
        self.rows.forget(request)

    def step(self, asked: Generation | None = None) -> None:
        """Run a step for all requests that are there, or for one.

        What follows a token that was drawn for that one needs no plan.

        Args:
            asked: whose token is wanted, where one request runs at a time.

        Raises:
            LocalKVError: the model can't be run.
        """
        scheduler, cache, started = self.scheduler, self.rows.cache, self._clock()
        self.rows.read_seconds = 0.0
        if self._unfinished:
            self._start_over()
        self._unfinished = True
        before = None if cache.ladder is None else cache.requantised
        if asked is not None:
            slot, request, speculator = self._slot, asked.request, asked.speculator
            text = request.text
            is_next = (
                slot.is_taken_by(text)
                and request.sequence is not None
                and text.n_prompt <= slot.sequence.length == len(text.ids) - 1
                and not asked.cancelled.is_set()
                and request.deadline is None
            )
            if not is_next:
                self._drawn_ahead = None
            if is_next and (speculator is None or speculator.is_resting):
                draw, n_before = asked.device_draw, len(text.ids)
                if draw is None:
                    goes_on = asked.draw(slot.advance(text, 1)[0])
                else:
                    goes_on = asked.take(self._drawn(asked, draw))
                if before is not None:
                    asked.stats.requantised.add(cache.requantised - before)
                if not goes_on:
                    self.end(request)
                self.stats.n_generated += len(text.ids) - n_before
                self._count(None, self._clock() - started)
                self._unfinished = False
                return
        for request in self.rows.enter(scheduler.running):
            scheduler.restart(request)
        for request in (*scheduler.running, *scheduler.waiting):
            generation = self.generations.get(request.number)
            if generation is None or generation.cancelled.is_set():
                self._end(request, generation)
            elif generation.has_ended:  # its tokens that are there may still be read
                self.end(request)
        part = None
        if asked is None and (not self._learns or self.stats.n_steps % LEARN_FROM):
            part = scheduler.next_alone()
        parts = self._planned(started, asked) if part is None else [part]
        taken = list[Part]()
        takers = dict[int, Generation]()
        for each in parts:
            number = each.request.number
            generation = self.generations.get(number)
            if generation is None:  # nobody reads it since it was planned
                self.end(each.request)
            else:
                taken.append(each)
                takers[number] = generation
        if taken:
            shape = self.run(taken, takers, is_planned=part is None)
            if before is not None:
                for generation in takers.values():
                    generation.stats.requantised.add(cache.requantised - before)
            self._count(shape, self._clock() - started - self.rows.read_seconds)
        self._unfinished = False

    def _drawn(self, generation: Generation, draw: Draw) -> int:
        """A token that the device draws while the one before is on its way."""
        slot, text, ahead = self._slot, generation.request.text, self._drawn_ahead
        token = generation.forced()
        if token is not None:
            self._drawn_ahead = None  # they follow another one
            return token
        if ahead is None or ahead[0] is not text:
            assert slot.loop is not None
            tokens = slot.loop.tokens(
                slot.sequence,
                text.ids[-1],
                draw,
                seed=generation.seed,
                number=generation.n_drawn,
                limit=generation.room + 1,
            )
            ahead = self._drawn_ahead = text, tokens
        return checked(slot.following(text, ahead[1]))

    def _planned(self, now: float, asked: Generation | None) -> list[Part]:
        for request in self.scheduler.overdue(now):
            self._end(request, self.generations.get(request.number))
        if asked is None:
            return self.scheduler.step(now)
        return [] if asked.has_ended else self.scheduler.step_for(asked.request)

    def run(
        self, parts: list[Part], generations: Mapping[int, Generation], *, is_planned: bool = False
    ) -> StepShape | None:
        """Evaluate the parts of a step, with guesses where they are worth it, and draw.

        Args:
            generations: of the parts' requests, by their numbers.

        Returns:
            what the cost model learns from, if the step was planned.
        """
        guesses, began = False, 0.0
        for one in generations.values():
            guesses |= one.speculator is not None and not one.speculator.is_resting
        if guesses:
            parts = self._drafts.added(parts, generations)
            began = self._clock()
        shape = self.scheduler.shape(parts) if is_planned else None
        ends = self._model_steps.evaluate(parts)
        measures = guesses and (shape is None or not shape.n_prompt)
        if measures and not self._reads_late:
            self._drafts.measured(parts, generations, self._clock() - began)
        self._draw(ends, generations)
        if measures and self._reads_late:
            self._drafts.measured(parts, generations, self._clock() - began)
        return shape

    def _count(self, shape: StepShape | None, seconds: float) -> None:
        stats = self.stats
        if shape is not None:
            stats.n_prompt += shape.n_prompt
            stats.n_reused = self.rows.n_reused
            stats.n_preempted = self.scheduler.n_preempted
            if self._learns and (shape.n_prompt or stats.n_steps % LEARN_FROM == 0):
                self.scheduler.cost.learn(shape, 1e3 * seconds)
        stats.n_steps += 1
        stats.seconds += seconds

    def _start_over(self) -> None:
        """Have all requests start over: the slot has forgotten their rows, as work broke off."""
        for request in [*self.scheduler.running]:
            self.scheduler.restart(request)

    def _draw(
        self, ends: Sequence[tuple[Part, Array]], generations: Mapping[int, Generation]
    ) -> None:
        """Draw the next tokens of the requests whose tokens are all evaluated."""
        for part, rows in ends:
            request, drafts = part.request, part.drafts
            generation = generations[request.number]
            if generation.cancelled.is_set():
                self._end(request, generation)
                continue
            n_before, n_right = len(request.text.ids), 0
            try:
                if drafts:
                    n_right = generation.draw_verified(rows, drafts)
                else:
                    generation.draw(rows[0])
            except Exception as error:  # this request's; the others go on
                generation.fail(error)
            self.stats.n_generated += len(request.text.ids) - n_before
            if drafts:
                self.stats.n_drafted += len(drafts)
                self.stats.n_accepted += n_right
                self.rows.retract(request, n_before + n_right)
            if generation.has_ended:
                self.end(request)

    def _end(self, request: Request, generation: Generation | None) -> None:
        """End a request early, and its generation if there still is one."""
        if generation is not None:
            generation.cancel()
        self.end(request)


class DraftRows(Protocol):
    """The rows of requests in the cache."""

    def reserve_drafts(self, request: Request, n_tokens: int, n_drafts: int) -> bool:
        """Take the pages of guesses, too, that follow its next tokens and may be taken back; False
        if there is no room."""
        ...


class BatchDrafts:
    """Adds guesses to steps.

    Args:
        rows: of the requests.
        prices: of batches of one text.
        config: has the milliseconds that a step of several texts may take with guesses.
    """

    def __init__(self, rows: DraftRows, prices: Prices, config: SchedulerConfig) -> None:
        self.rows = rows
        self.config = config
        self._prices = {1: prices}

    def added(self, parts: Sequence[Part], generations: Mapping[int, Generation]) -> list[Part]:
        """The parts of a step, with the guesses that are worth their rows.

        Args:
            generations: by their requests' numbers.
        """
        if not all(part.request.is_decoding for part in parts):
            return [*parts]
        if len(parts) == 1:
            return [self._of_one(parts[0], generations[parts[0].request.number])]
        prices, made = self._prices_of(len(parts)), list[Part]()
        missing = sum(part.n_tokens for part in parts) - len(parts)
        together = self._together(parts, generations, prices, missing)
        for part in parts:
            generation = generations[part.request.number]
            speculator, room = generation.speculator, self._room(part, generation)
            drafts = together.get(part.request.number, ())
            if speculator is not None and room > 0 and part.request.number not in together:
                speculator.priced(prices)
                drafts = speculator.draft(room, missing=missing, others=len(parts) - 1)
            drafts = generation.valid(drafts)
            if drafts and self._fits(part, drafts, prices, missing, len(parts)):
                part = Part(part.request, part.n_tokens, tuple(drafts))
                missing += len(drafts)
            made.append(part)
        return made

    def _together(
        self,
        parts: Sequence[Part],
        generations: Mapping[int, Generation],
        prices: Prices,
        missing: int,
    ) -> dict[int, Sequence[int]]:
        """Guesses of models that draft for several texts together, by the requests' numbers."""
        asked = dict[int, list[tuple[int, ModelSpeculator[Any], int]]]()
        for part in parts:
            number = part.request.number
            speculator, room = generations[number].speculator, self._room(part, generations[number])
            if isinstance(speculator, ModelSpeculator) and speculator.drafts_together and room > 0:
                speculator.priced(prices)
                asked.setdefault(id(speculator.model), []).append((number, speculator, room))
        found, most = dict[int, Sequence[int]](), 0
        while most < prices.most_rows and self._has_time(prices, 1 + missing + most + 1):
            most += 1
        for of_model in asked.values():
            drafts = draft_together(
                [one[1:] for one in of_model], missing=missing, others=len(parts) - 1, most=most
            )
            found |= zip([number for number, *_ in of_model], drafts, strict=True)
        return found

    def _of_one(self, part: Part, generation: Generation) -> Part:
        """The only part of a step, with the guesses that are worth their rows."""
        request, n_tokens, _ = part
        speculator = generation.speculator
        room = self._room(part, generation)
        if speculator is None or room < 1:
            return part
        speculator.priced(self._prices[1])
        drafts = generation.valid(speculator.draft(room, missing=n_tokens - 1))
        if not drafts or not self.rows.reserve_drafts(request, n_tokens, len(drafts)):
            return part
        return Part(request, n_tokens, tuple(drafts))

    def _room(self, part: Part, generation: Generation) -> int:
        """The most guesses that fit into a batch and that any text may want."""
        config, request = self.config, part.request
        ahead = config.ahead - 1 - request.n_unread
        return min(generation.room, ahead, config.n_batch - part.n_tokens)

    def _fits(
        self, part: Part, drafts: Sequence[int], prices: Prices, missing: int, n_texts: int
    ) -> bool:
        """Whether there is room for guesses in the cache, and in the time of a step."""
        if n_texts > 1 and not self._has_time(prices, 1 + missing + len(drafts)):
            return False
        return self.rows.reserve_drafts(part.request, part.n_tokens, len(drafts))

    def _has_time(self, prices: Prices, n_rows: int) -> bool:
        return 1e3 * prices.one * prices.steps(n_rows) <= self.config.step_ms

    def measured(
        self, parts: Sequence[Part], generations: Mapping[int, Generation], seconds: float
    ) -> None:
        """Note what a step took, all of whose requests generate."""
        n_texts, prices = len(parts), self._prices_of(len(parts))
        if n_texts == 1:
            alone = generations[parts[0].request.number].speculator
            if alone is not None:
                alone.measured(parts[0].n_rows, seconds)
            return
        n_rows = 1 + sum(part.n_rows for part in parts) - n_texts
        n_drafted = sum(bool(part.drafts) for part in parts)
        prices.measured(n_rows, seconds)
        for part, speculator in _speculators(parts, generations):
            pace = speculator.pace
            if part.drafts:
                pace.spent(n_rows, seconds, n_texts=n_texts, n_drafted=n_drafted)
            else:  # the guesses of others are not its loss
                pace.spent(1, min(seconds, prices.one or seconds), n_texts=n_texts)

    def _prices_of(self, n_texts: int) -> Prices:
        """Prices of 1, 2, ... rows in addition to the rows of the other texts."""
        if n_texts not in self._prices:
            one = self._prices[1]

            def guess(n_rows: int) -> float:
                return one.steps(n_texts - 1 + n_rows) / one.steps(n_texts)

            self._prices[n_texts] = Prices(guess)
        return self._prices[n_texts]


def _speculators(
    parts: Sequence[Part], generations: Mapping[int, Generation]
) -> Iterator[tuple[Part, Speculator]]:
    for part in parts:
        speculator = generations[part.request.number].speculator
        if speculator is not None:
            yield part, speculator


class ModelSteps:
    """Evaluates the parts of steps.

    Args:
        slot: whose model and cache it uses, in a turn.
        rows: of the requests.

    Attributes:
        loop: decodes a token of each of several requests, where the backend records.
    """

    def __init__(self, slot: CacheSlot, rows: RequestRows) -> None:
        self.slot = slot
        self.rows = rows
        self.loop = slot.loop
        self._next = NextTokens(slot.model, slot.cache)

    def evaluate(self, parts: Sequence[Part]) -> list[tuple[Part, Array]]:
        """Run the model on the parts of a step.

        Returns:
            of those that have no more, float32 [1 + drafts, n_vocab] after their last token and
            after each draft.
        """
        if self.rows.in_place is not None:
            return self._evaluate_in_place(self.rows.in_place, parts)
        slot = self.slot
        n_tokens = sum(part.n_rows for part in parts)
        if n_tokens > len(parts):
            slot.check_source()
        slot.use_threads(n_tokens)
        ends, others = list[tuple[Part, Array]](), parts
        with slot.scratch_of(n_tokens):
            if self.loop is not None:
                single = [part for part in parts if part.request.is_decoding and part.n_rows == 1]
                logits = self._decode_recorded(self.loop, single)
                if logits is not None:
                    ends = [(part, row[None]) for part, row in zip(single, logits, strict=True)]
                    others = [part for part in parts if part not in single]
            if self.loop is None:
                ends = self._evaluate_next(others) or self._evaluate_batch(others)
            elif others:
                ends += self._evaluate_batch(others)
        for part in parts:
            self.rows.hold(part.request, part.n_rows)
        return ends

    @staticmethod
    def _evaluate_in_place(slot: CacheSlot, parts: Sequence[Part]) -> list[tuple[Part, Array]]:
        """Evaluate the only part of a step with the rows of a slot."""
        (part,) = parts
        text = part.request.text
        if part.drafts or part.n_tokens == 1:
            out = slot.advance(text, part.n_tokens, part.drafts)
        else:
            end = slot.sequence.length + part.n_tokens
            while slot.sequence.length < end:
                out = slot.advance(text, slot.piece(text, end - slot.sequence.length))
        return [(part, out)] if slot.sequence.length >= len(text.ids) else []

    @staticmethod
    def _decode_recorded(loop: DecodeLoop, parts: Sequence[Part]) -> Array | None:
        requests = [part.request for part in parts]
        sequences = [request.sequence for request in requests if request.sequence is not None]
        if not sequences:
            return None
        return loop.logits(sequences, [request.text.ids[-1] for request in requests])

    def _evaluate_next(self, parts: Sequence[Part]) -> list[tuple[Part, Array]] | None:
        """A step of generated tokens, if they are like those before but for their positions."""
        pieces = list[tuple[CachedSequence, Sequence[int]]]()
        for part in parts:
            request = part.request
            if part.n_tokens != 1 or not request.is_decoding:
                return None
            assert request.sequence is not None
            pieces.append((request.sequence, (request.text.ids[-1], *part.drafts)))
        logits = self._next.logits(pieces)
        if logits is None:
            return None
        if any(part.request.text.saw for part in parts):
            self._tell(parts, self.slot.model.last_hidden())
        ends, end = list[tuple[Part, Array]](), 0
        for part in parts:
            start, end = end, end + part.n_rows
            ends.append((part, logits[start:end]))
        return ends

    def _evaluate_batch(self, parts: Sequence[Part]) -> list[tuple[Part, Array]]:
        pieces, generated, wanted = [], [], list[Wanted]()
        ends, n_rows = list[tuple[Part, int]](), 0
        for part in parts:
            request, drafts = part.request, part.drafts
            assert request.sequence is not None
            at = request.n_held
            ids = request.text.ids[at : at + part.n_tokens]
            pieces.append((request.sequence, [*ids, *drafts]))
            generated.append(at >= request.n_prompt)
            is_end = part.n_tokens == request.n_missing
            wanted.append("none" if not is_end else "all" if drafts else "last")
            if is_end:
                n_rows += part.n_rows if drafts else 1
                ends.append((part, n_rows))
        cache, model = self.slot.cache, self.slot.model
        batch = cache.batch(pieces, logits=wanted, generated=generated)
        with model.backend.arrays.inference():
            if any(part.request.text.saw for part in parts):
                logits, hidden = model.forward_with_hidden(batch, cache)
                self._tell(parts, hidden)
            else:
                logits = model.forward(batch, cache)
        if all(generated) and len(logits) == batch.starts[-1]:
            self._next.note([sequence for sequence, _ in pieces], batch)
        return [(part, logits[end - 1 - len(part.drafts) : end]) for part, end in ends]

    @staticmethod
    def _tell(parts: Sequence[Part], hidden: Array) -> None:
        """Tell texts of the hidden states [rows, n_embd] of the parts, before these count."""
        end = 0
        for part in parts:
            start, end = end, end + part.n_rows
            if part.request.text.saw is not None:
                part.request.text.saw(part.request.n_held, hidden[start:end])


READ_SECONDS, READ_SECONDS_ALONE = 0.02, 0.1
"""Seconds of a step in which rows are read from the disk: beside requests that run, and without."""

WORTH_WAITING = 32
"""Tokens that a request waits for another one to evaluate, at least, instead of doing it itself."""


class RequestRows:
    """The rows of all requests that run, and of texts that are kept.

    A cache of one sequence has the rows of a request in its slot, where they stay when it is done.
    Other users of the slot may take their place between any two turns.

    Args:
        cache: has the rows.
        prefixes: the texts that are kept in it.
        slot: of others who use the cache.

    Attributes:
        in_place: the slot, if it has the rows of the request that runs; None if each request has a
            sequence. Then the slot's rows are kept as a text, before each step.
        n_reused: tokens of prompts that were found evaluated.
        reading: a request's rows that are being read from the disk; one request's at a time.
        read_seconds: that reading took since somebody set it to 0.
    """

    def __init__(
        self, cache: KVCache, prefixes: PrefixCache, slot: CacheSlot | None = None
    ) -> None:
        self.cache = cache
        self.prefixes = prefixes
        self.n_reused = 0
        self.in_place = slot if cache.n_sequences == 1 else None
        self._slot = slot
        self._n_started_over = cache.n_started_over
        self.reading: DiskReading | None = None
        self._read_for: Request | None = None
        self.read_seconds = 0.0

    def enter(self, running: Sequence[Request]) -> Sequence[Request]:
        """Begin a step: the requests that have lost their rows, to other users or because the work
        of one broke off."""
        if self.in_place is not None:
            return [one for one in running if not self.in_place.is_taken_by(one.text)]
        if self._slot is not None:
            self._slot.leave()
        if self._n_started_over == self.cache.n_started_over:
            return ()
        self._n_started_over = self.cache.n_started_over
        return [*running]

    def begin(self, request: Request, running: Sequence[Request]) -> bool:
        """Give a request a sequence, with the rows that are there of its text already.

        False if there is no room for all of its tokens and a page more for each that runs and may
        come to need one. False, too, if it does better to wait: another one evaluates now what it
        begins with.
        """
        if self.in_place is not None:
            is_new = len(request.text.ids) == request.n_prompt
            found_there = self.in_place.take(request.text, reuses=request.reuses or not is_new)
            request.sequence = self.in_place.sequence
            if is_new:
                request.n_reused, request.n_lost = found_there
                self.n_reused += request.n_reused
            return True
        found, n_found = None, 0
        if request.reuses or request.n_preempted:
            ids = request.text.marked(len(request.text.ids) - 1)
            if self._reads(request, ids, running):
                return False
            found, n_found = self.prefixes.find(ids, [_as_kept(other) for other in running])
            for other in running:
                theirs = other.text.marked(other.n_prompt)
                n_soon = self.prefixes.n_common(theirs, ids)
                if n_soon > other.n_held and n_soon - n_found >= WORTH_WAITING:
                    return False
        source = self.cache.new_sequence() if found is None else found.sequence
        if running and not self._has_room(request, source, n_found, running):
            return False
        if found is None:
            request.sequence = source
        else:
            request.sequence = self.cache.fork(source, n_found, exactly=self.prefixes.exact)
            self.prefixes.use(found)
        scales = request.text.scales
        request.sequence.scales = self.cache.scales if scales is None else scales
        if not request.n_preempted:
            request.n_reused = request.sequence.length
            self.n_reused += request.n_reused
        return True

    def _reads(self, request: Request, ids: NDArray[np.int64], running: Sequence[Request]) -> bool:
        """Read a piece of a request's rows from the disk; whether it has to wait for more, or for
        another request that reads.

        Args:
            ids: int64 [tokens], `marked`, without the last token.
        """
        disk = None if self._slot is None else self._slot.disk
        if disk is None or request.is_looked_up:
            return False
        if self._read_for not in (None, request):
            return True
        started = time.perf_counter()
        if self.reading is None:
            disk.know(request.text.salt, request.text.origin)
            n_there = self.prefixes.find(ids, [_as_kept(other) for other in running])[1]
            found = disk.find(ids, n_there)
            if found is None:
                request.is_looked_up = True
                return False
            if running and not self._has_room(request, self.cache.new_sequence(), 0, running):
                return True
            self.reading, self._read_for = disk.reading(self.prefixes, ids, found), request
            request.is_read = True
        is_done = self.reading.go_on(READ_SECONDS if running else READ_SECONDS_ALONE)
        self.read_seconds += time.perf_counter() - started
        if not is_done:
            return True
        self.reading = self._read_for = None
        request.is_read, request.is_looked_up = False, True
        return False

    def forget(self, request: Request) -> None:
        """A request is done: nobody wants what is read for it any more."""
        if self._read_for is request and self.reading is not None:
            self.reading.give_up()
            self.reading = self._read_for = None

    def _has_room(
        self, request: Request, source: CachedSequence, n_found: int, running: Sequence[Request]
    ) -> bool:
        """Whether there are pages for all tokens of a request, and one for each that runs and may
        come to need it, or can be made free."""
        length = len(request.text.ids)
        for i, pool in enumerate(self.cache.pools):
            kept = [0] * pool.n_pages
            for text in self.prefixes.texts:
                for page in text.sequence.held(i):
                    kept[page] += 1
            n_full = pool.n_full(n_found)
            shared = set(source.pages[i][:n_full])
            spare = [
                page
                for page, n in enumerate(kept)
                if n > 0 and n == pool.n_holders[page] and page not in shared
            ]
            n_needed = pool.n_needed(length, source, n_found)
            for other in running:
                assert other.sequence is not None
                n_needed += len(other.sequence.pages[i]) < pool.n_places(other.most)
            begun = source.pages[i][n_full : pool.n_places(n_found)]
            if not pool.has_room_for(n_needed, spare, begun):
                return False
        return True

    def reserve(self, request: Request, n_tokens: int) -> bool:
        """Take the pages of its next tokens; False if there are none. In a slot a batch takes
        them."""
        if self.in_place is not None:
            return True
        assert request.sequence is not None
        try:
            self.cache.reserve(request.sequence, request.n_held + n_tokens)
        except NoPageError:
            return False
        return True

    def chunk(self, request: Request, n_tokens: int) -> int:
        """The number of its next tokens, at most `n_tokens`, that are to be evaluated together:
        fewer where recurrent layers leave a checkpoint."""
        if self.in_place is not None:
            return self.in_place.piece(request.text, n_tokens)
        assert request.sequence is not None
        end = request.n_held + n_tokens
        if request.n_held < request.n_prompt:
            end = self.cache.states.boundary(request.sequence, end, request.n_prompt)
        return end - request.n_held

    def hold(self, request: Request, n_tokens: int) -> None:
        """Count tokens that were evaluated."""
        sequence = request.sequence
        assert sequence is not None
        states, end = self.cache.states, sequence.length + n_tokens
        ends_there = end <= request.n_prompt and (
            states.boundary(sequence, end + 1, request.n_prompt) == end
        )
        sequence.length = end
        if end == request.n_prompt:
            self.cache.checkpoint(sequence, exactly=False)
        elif ends_there or states.is_due(sequence):
            states.keep(sequence)

    def reserve_drafts(self, request: Request, n_tokens: int, n_drafts: int) -> bool:
        """Take the pages of guesses, too, that follow its next tokens and may be taken back; False
        if there are none."""
        sequence = request.sequence
        assert sequence is not None
        if not self.cache.may_guess(sequence, n_tokens, n_drafts):
            return False
        if self.in_place is not None:
            return True
        if self.reserve(request, n_tokens + n_drafts):
            self.cache.states.mark(sequence, n_tokens + n_drafts)
            return True
        self.cache.cut_back(sequence, sequence.length)  # gives back what was taken of some pools
        self.cache.reserve(sequence, sequence.length + n_tokens)
        return False

    def retract(self, request: Request, length: int) -> None:
        """Take back the rows of guesses from position `length` on.

        What can't be cut there is cut further back, and missing.
        """
        if self.in_place is not None:
            self.in_place.retract(request.text, length)
            return
        sequence = request.sequence
        assert sequence is not None
        if length < sequence.length:
            self.cache.cut_back(sequence, length, exactly=True)
        self.cache.states.unmark(sequence)

    def end(self, request: Request) -> None:
        """Take its sequence away, and keep its rows as long as there is room."""
        sequence, request.sequence = request.sequence, None
        request.is_looked_up = False  # if it has to begin again
        if self.in_place is not None:
            return
        assert sequence is not None
        self.cache.states.keep(sequence)
        self.prefixes.keep(sequence, request.text.marked(sequence.length))


def _as_kept(request: Request) -> KeptText:
    assert request.sequence is not None
    return KeptText(request.sequence, request.text.marked(request.n_held))
