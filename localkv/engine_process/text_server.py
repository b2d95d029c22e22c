"""Texts of a server, many at the same time: the engine's process writes them step by step."""

from __future__ import annotations

import math
import os
import time
import traceback
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Condition, Thread
from typing import NoReturn

import msgspec
import numpy as np
from numpy.typing import NDArray

from localkv.chat.engine import WARM_UP, EngineOptions, LoadProgress
from localkv.engine.embedding import Pooling, normalised
from localkv.engine.logprobs import TokenLogprob
from localkv.engine.saved_state import forget_text
from localkv.engine.stream import LineLimits, TextStream
from localkv.engine_process.conversation import engine_facts
from localkv.engine_process.texts import (
    Accepted,
    Adapter,
    Again,
    DiskStatus,
    Embed,
    Ended,
    Event,
    Facts,
    Opening,
    Piece,
    Reading,
    SlotDone,
    Status,
    Step,
    Submit,
    ToEngine,
    Vectors,
    Warned,
    to_engine,
)
from localkv.engine_process.wire import Cancel, Message, Progress, Refused, SlotAction
from localkv.errors import LocalKVError, UsageError
from localkv.llm import LLM, TextModel
from localkv.loader.chat_prompt import ChatPrompt
from localkv.structured.constraint import GrammarTokens
from localkv.system.limits import before_model

END_SECONDS = 30.0
"""How long the process may go on without its client, to write texts to the disk."""
SAVE_SECONDS = 0.02
"""How long nothing happens between two texts that are written while nobody asks for anything."""
SAVE_BYTES = 64 << 20
"""No further ones are copied while more than this waits to be written."""


def placed(places: Sequence[int], running: Sequence[int]) -> tuple[int, ...]:
    """The places after some requests have begun to run, or no longer do.

    A request keeps its place as long as it runs.

    Args:
        places: before, the number of a request each; 0 for none.
        running: numbers of the requests that run, at most as many as there are places.

    >>> placed((4, 7, 0), [7, 8])
    (8, 7, 0)
    """
    stay = [number if number in running else 0 for number in places]
    new = [number for number in running if number not in stay]
    for place, number in enumerate(stay):
        if not number and new:
            stay[place] = new.pop(0)
    return tuple(stay)


class RunningText:
    """A text that grows with the steps of the engine.

    Args:
        id: the front's number of it.
        stream: the text.
        tells_tokens: pieces name the tokens that they consist of.
        place: by which it can be saved; -1 for the one in which it runs.
    """

    def __init__(
        self, id: int, stream: TextStream, *, tells_tokens: bool = False, place: int = -1
    ) -> None:
        generation = stream.generation
        self.id, self.place = id, place
        self.stream = stream
        self.has_ended = False
        self._generation = generation
        self._n_held = -1  # no row of its prompt is known
        self._tells_tokens = tells_tokens
        self._n_told = 0

    @classmethod
    def begun(cls, model: TextModel, submit: Submit) -> RunningText:
        """Let a request wait for its turn.

        Raises:
            LocalKVError: it can't be served.
        """
        prompt = submit.ids if submit.chat is None else chat_prompt(submit.ids, submit.chat)
        stream = model.batch_stream(
            prompt,
            params=submit.params,
            max_tokens=submit.max_tokens,
            stop=submit.stop,
            ignore_eos=submit.ignore_eos,
            logprobs=submit.logprobs,
            grammar=submit.grammar,
            lora=submit.lora,
            salt=submit.salt,
            origin=submit.origin,
            reuses=submit.reuses,
            ranks_after_samplers=submit.after_samplers,
            lines=LineLimits(submit.n_indent, submit.line_seconds),
        )
        return cls(submit.id, stream, tells_tokens=submit.tells_tokens, place=submit.place)

    @property
    def ids(self) -> list[int]:
        """Its tokens so far, including the prompt's."""
        return self._generation.request.text.ids

    @property
    def waits(self) -> bool:
        """Whether it needs a step."""
        return not self._is_ready()

    @property
    def is_running(self) -> bool:
        """Whether it has a place among those that run at the same time."""
        return self._generation.request.state == "running"

    def _is_ready(self) -> bool:
        return self._generation.n_ready > 0 or self._generation.has_ended

    def cancel(self) -> None:
        """Nobody wants the rest."""
        self.stream.close()

    def news(self) -> list[Event]:
        """What has happened since the last call."""
        error: LocalKVError | None = None
        try:
            text = self.stream.read(self._is_ready)
        except Exception as problem:
            text, error = None, as_known(problem)
        events = self._reading()
        has_ended = text is None or self._generation.finish_reason is not None
        logprobs = self.stream.take_logprobs()
        if text or logprobs or (has_ended and self._untold()):
            events.append(self._piece(text or "", logprobs))
        if has_ended:
            self.has_ended = True
            events.append(self._ended(error))
        return events

    def _piece(self, text: str, logprobs: tuple[TokenLogprob, ...]) -> Piece:
        tokens = self._untold()
        self._n_told += len(tokens)
        return Piece(self.id, text, self.stream.stats.n_generated, logprobs, tokens)

    def _untold(self) -> tuple[int, ...]:
        """Tokens that no piece has named, if pieces do."""
        if not self._tells_tokens:
            return ()
        request = self._generation.request
        n_prompt, n_generated = request.n_prompt, self.stream.stats.n_generated
        return tuple(request.text.ids[n_prompt + self._n_told : n_prompt + n_generated])

    def _reading(self) -> list[Event]:
        """How far the prompt is evaluated, if it is further than it was: at first what was so
        before, and at last all of it."""
        request = self._generation.request
        n_prompt, n_reused = request.n_prompt, request.n_reused
        if self._n_held == n_prompt:
            return []
        n_held = min(n_prompt, request.n_held)
        if self.stream.stats.n_generated:
            n_held = n_prompt
        elif request.sequence is None:
            return []  # it waits
        news = list[Event]()
        if n_held > self._n_held:
            if self._n_held < 0 and n_reused < n_held:
                news.append(Reading(self.id, n_prompt, n_reused, n_reused))
            news.append(Reading(self.id, n_prompt, n_reused, n_held))
            self._n_held = n_held
        return news

    def _ended(self, error: LocalKVError | None) -> Ended:
        done = self.stream.completion
        return Ended(
            self.id,
            done.finish_reason,
            done.usage,
            done.timings,
            done.seed,
            context_full=done.context_full,
            stop=self.stream.stop_string,
            error=None if error is None else str(error),
            kind="" if error is None else type(error).__name__,
        )


def as_known(error: Exception) -> LocalKVError:
    """An error as its request reads it: a bug's place, but not its text, which may be private."""
    if isinstance(error, LocalKVError):
        return error
    places = traceback.extract_tb(error.__traceback__, limit=-1)
    where = "".join(f" in {Path(at.filename).name}, line {at.lineno}" for at in places)
    return LocalKVError(f"the engine has a bug: {type(error).__name__}{where}")


def chat_prompt(ids: list[int], chat: Opening) -> ChatPrompt:
    """The prompt of an answer, as the engine takes it."""
    return ChatPrompt(
        ids,
        "",
        opening=chat.opening,
        is_begun=chat.is_begun,
        reasoning=chat.reasoning,
        n_reasoned=chat.n_reasoned,
        reasoning_budget=chat.reasoning_budget,
    )


class SlotStates:
    """What `/slots/ID?action=...` does.

    Args:
        llm: keeps the texts.
    """

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._last = dict[int, list[int]]()

    def note(self, places: Sequence[int], text: RunningText) -> None:
        """A text has ended.

        Args:
            places: the numbers of texts that had them last; one that was quick never had any.
        """
        place, id = text.place, text.id
        if place < 0:
            place = places.index(id) if id in places else places.index(0) if 0 in places else 0
        self._last[place] = text.ids

    def act(self, action: SlotAction) -> SlotDone:
        """Save, restore or erase one.

        Raises:
            UsageError: there is none, or the file can't be used.
        """
        started, n_bytes = time.perf_counter(), 0
        if action.action == "restore":
            ids = self._last[action.place] = self._llm.load_state(action.path)
            n_tokens, n_bytes = len(ids), os.path.getsize(action.path)
        elif action.action == "save":
            n_tokens = self._llm.save_state(action.path, self._text(action.place))
            n_bytes = os.path.getsize(action.path)
        else:
            n_tokens = forget_text(self._llm.engine.slot, self._text(action.place))
            del self._last[action.place]
        return SlotDone(action.id, n_tokens, n_bytes, 1e3 * (time.perf_counter() - started))

    def _text(self, place: int) -> list[int]:
        if place not in self._last:
            raise UsageError(f"slot {place} has no text yet")
        return self._last[place]


class EmbedJob:
    """Texts that become vectors, or scores, a turn of the engine's at a time.

    Args:
        llm: the model.
        message: what is asked for.
        waits: as `Engine.embed_by_turns` has it.

    Raises:
        LocalKVError: the model can't do that, or a text can't be evaluated.
    """

    def __init__(self, llm: LLM, message: Embed, waits: Callable[[], bool]) -> None:
        self._engine, self._message = llm.engine, message
        if message.scores:
            pooling: Pooling = llm.engine.check_scores().pooling
        else:
            pooling = llm.pooling_of(message.pooling)
        for number, ids in enumerate(message.texts, 1):
            llm.engine.check_text(ids, f"text {number} of {len(message.texts)}")
        self._pooling = pooling
        self._turns = llm.engine.embed_by_turns(message.texts, pooling, waits)
        self._done = list[NDArray[np.float32]]()
        self._seconds = 0.0

    def step(self) -> Vectors | None:
        """Evaluate some; the answer once all are."""
        message, started = self._message, time.perf_counter()
        vectors = next(self._turns, [])
        if message.scores and vectors:
            self._done += [*self._engine.scores_of(vectors)[:, None, :1]]
        else:
            self._done += [np.atleast_2d(self._shortened(vector)) for vector in vectors]
        self._seconds += time.perf_counter() - started
        if len(self._done) < len(message.texts):
            return None
        rows = np.concatenate(self._done) if self._done else np.zeros((0, 1), np.float32)
        return Vectors(
            message.id,
            np.ascontiguousarray(rows, "<f4").tobytes(),
            rows.shape[-1],
            tuple(map(len, self._done)),
            self._seconds,
        )

    def _shortened(self, vector: NDArray[np.float32]) -> NDArray[np.float32]:
        message = self._message
        kept = vector[..., : message.dimensions] if message.dimensions else vector
        plain = -1 if self._pooling == "none" else 2
        return normalised(kept, plain if message.norm is None else message.norm)


class TextServer:
    """Serves a model. One thread runs its steps, and nothing else.

    Args:
        options: the model to load, and how.
        send: sends the client a message.
    """

    decode = staticmethod(to_engine)

    def __init__(self, options: EngineOptions, send: Callable[[Message], None]) -> None:
        self.options = options
        self.send = send
        self.inbox = Inbox()
        self.take = self.inbox.put
        self.texts = dict[int, RunningText]()
        self.embeds = dict[int, EmbedJob]()
        self._has_ended = self._saved = False
        self._n_embed_steps = 0
        self._events = list[Event]()
        self._answers = {
            Submit: self._submit,
            Embed: self._embed,
            Cancel: self._cancel,
            SlotAction: self._act,
        }

    def load(self) -> None:
        """Load the model, and tell the client of it. Raises LocalKVError."""
        started = time.perf_counter()
        before_model()
        options, send = self.options, self.send
        self.llm = llm = LLM(
            options.model,
            **options.arguments,
            on_progress=lambda *progress: send(Progress(LoadProgress(*progress))),
        )
        if llm.disk is not None:
            llm.disk.tell(lambda line: send(Warned(line)))
        cache, pools = llm.cache, llm.engine.cache.pools
        send(Progress(LoadProgress(WARM_UP)))
        loaded_at = time.perf_counter()
        llm.engine.prepare()
        send(
            Facts(
                engine=engine_facts(llm, loaded_at - started),
                warm_up_seconds=time.perf_counter() - loaded_at,
                n_vocab=llm.config.n_vocab,
                n_params=sum(math.prod(tensor.shape) for tensor in llm.gguf.tensors.values()),
                n_embd=llm.config.n_embd,
                n_parallel=cache.n_sequences,
                cache_tokens=_cache_tokens(llm),
                cache_bytes=llm.memory.cache_k + llm.memory.cache_v,
                n_pages=sum(pool.n_pages for pool in pools),
                kernels=llm.kernels,
                warnings=tuple(dict.fromkeys(llm.warnings)),
                adapters=tuple(Adapter(one.path, one.scale) for one in llm.lora_adapters),
            )
        )
        self._places = (0,) * cache.n_sequences
        self._slots = SlotStates(llm)

    def run(self) -> None:
        """Serve until the process ends."""
        self.inbox.make_matchers(self.llm.grammar_tokens)
        while True:
            self.serve_some()

    def end(self) -> None:
        """The client is gone: end the process, once texts that are kept are on the disk. What
        runs now may take longer than a client waits."""
        if self.__dict__.get("llm") is not None and self.llm.disk is not None:
            self._has_ended = True
            self.inbox.messages.put(Cancel(0))  # wakes the other thread
            time.sleep(END_SECONDS)
        os._exit(0)

    def _finish(self) -> NoReturn:
        """Write what the cache has to the disk, and end the process."""
        for request in [*self.llm.batch.scheduler.running]:
            with suppress(LocalKVError):
                self.llm.batch.end(request)  # what is evaluated of it is kept
        self.llm.close()
        os._exit(0)

    def serve_some(self) -> None:
        """Take what is asked for, and make one step for all; wait if there is nothing to do."""
        is_idle = not self.texts and not self.embeds
        saves = is_idle and self._saves()
        self._take_all(is_idle, SAVE_SECONDS if saves or self._saved else None)
        self._saved = saves  # what came of it is told once more
        if self._has_ended:
            self._finish()
        step_ms, rows = self._step()
        self._embed_some()
        for text in list(self.texts.values()):
            self._events += text.news()
            if text.has_ended:
                self._slots.note(self._places, text)
                del self.texts[text.id]
        events, self._events = self._events, []
        self.send(Step(events, self._status(step_ms, rows)))

    def _saves(self) -> bool:
        """Have a text that is kept written to the disk; whether there is more to write."""
        disk, slot = self.llm.disk, self.llm.engine.slot
        if disk is None:
            return False
        if disk.n_queued > SAVE_BYTES:  # it is written as fast as it can be
            return True
        return slot.turn(slot.save_some) or disk.n_queued > 0

    def _take_all(self, waits: bool, seconds: float | None) -> None:
        """Do what the front asks for.

        Args:
            waits: until there is something, or for some seconds.
        """
        try:
            while True:
                message = self.inbox.messages.get(block=waits, timeout=seconds)
                self._answers[type(message)](message)  # type: ignore[operator]
                waits = False
        except Empty:
            pass

    def _submit(self, message: Submit) -> None:
        with self._refusing(message.id):
            self.texts[message.id] = RunningText.begun(self.llm, message)
            self._events.append(Accepted(message.id))
        if message.grammar is not None:
            self.llm.grammar_tokens.release(message.grammar)

    def _embed(self, message: Embed) -> None:
        with self._refusing(message.id):
            self.embeds[message.id] = EmbedJob(self.llm, message, lambda: bool(self.texts))

    def _embed_some(self) -> None:
        """Evaluate some texts that become vectors, so that texts that are written go on between."""
        if not self.embeds:
            return
        id, job = next(iter(self.embeds.items()))
        self._n_embed_steps += 1
        with self._refusing(id):
            try:
                if (vectors := job.step()) is None:
                    self.embeds[id] = self.embeds.pop(id)  # behind the others
                    return
                self._events.append(vectors)
            except BaseException:
                del self.embeds[id]
                raise
            del self.embeds[id]

    def _act(self, action: SlotAction) -> None:
        with self._refusing(action.id):
            self._events.append(self._slots.act(action))

    @contextmanager
    def _refusing(self, id: int) -> Iterator[None]:
        """Let an error be the answer to this message alone."""
        try:
            yield
        except Exception as error:
            self._events.append(Refused.of(id, as_known(error)))

    def _cancel(self, message: Cancel) -> None:
        self.embeds.pop(message.id, None)
        if (text := self.texts.get(message.id)) is not None:
            text.cancel()

    def _step(self) -> tuple[float, tuple[int, int]]:
        """Milliseconds of one step for all, and how many requests and tokens of prompts it had."""
        if not any(text.waits for text in self.texts.values()):
            return 0.0, (0, 0)
        stats = self.llm.batch.stats
        n_generated, n_prompt, started = stats.n_generated, stats.n_prompt, time.perf_counter()
        self.llm.batch.step()
        rows = stats.n_generated - n_generated, stats.n_prompt - n_prompt
        return 1e3 * (time.perf_counter() - started), rows

    def _status(self, step_ms: float, rows: tuple[int, int]) -> Status:
        batch = self.llm.batch
        stats, pages, scheduler = batch.stats, batch.pages, batch.scheduler
        running = [text.id for text in self.texts.values() if text.is_running]
        self._places = placed(self._places, running)
        return Status(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            pages_running=pages.running,
            pages_shared=pages.shared,
            pages_kept=pages.kept,
            pages_lost=pages.lost,
            n_steps=stats.n_steps + self._n_embed_steps,
            n_generated=stats.n_generated,
            n_prompt=stats.n_prompt,
            n_reused=stats.n_reused,
            n_preempted=stats.n_preempted,
            busy_seconds=stats.seconds,
            rows=rows,
            step_ms=step_ms,
            places=self._places,
            disk=_disk_status(self.llm),
        )


class Inbox:
    """What the front sends, in order. A text with a grammar comes once a thread has made its
    matcher, unless it was cancelled before; clients have this thread in turn.

    Attributes:
        messages: that the engine may take. It has to release the grammars of texts.
    """

    def __init__(self) -> None:
        self.messages = SimpleQueue[ToEngine]()
        self._later = OrderedDict[str, deque[Submit]]()
        self._ids = set[int]()
        self._changed = Condition()
        self._tokens: GrammarTokens | None = None
        self._last: Submit | None = None

    def put(self, message: ToEngine) -> None:
        """Take a message."""
        if isinstance(message, Again):
            assert self._last is not None
            params = replace(self._last.params, seed=message.seed)
            message = msgspec.structs.replace(self._last, id=message.id, params=params)
        elif isinstance(message, Submit):
            self._last = message
        with self._changed:
            if isinstance(message, Submit) and message.grammar is not None and self._tokens:
                if not self._tokens.has_matcher(message.grammar):
                    self._ids.add(message.id)
                    self._later.setdefault(message.client, deque()).append(message)
                    self._changed.notify()
                    return
                self._tokens.hold(message.grammar)
            elif isinstance(message, Cancel):
                self._ids.discard(message.id)
            self.messages.put(message)

    def make_matchers(self, tokens: GrammarTokens) -> None:
        """Begin to make a model's matchers in a thread."""
        self._tokens = tokens
        Thread(target=self._make, args=(tokens,), name="localkv-matchers", daemon=True).start()

    def _make(self, tokens: GrammarTokens) -> None:
        while True:
            message = self._next()
            assert message.grammar is not None
            with suppress(Exception):  # which the text's own constraint meets again
                tokens.hold(message.grammar)
            with self._changed:
                if message.id in self._ids:
                    self._ids.discard(message.id)
                    self.messages.put(message)
                else:
                    tokens.release(message.grammar)

    def _next(self) -> Submit:
        """The next text of the client whose turn it is."""
        with self._changed:
            while True:
                self._changed.wait_for(lambda: self._later)
                client, waiting = self._later.popitem(last=False)
                message = waiting.popleft()
                if waiting:
                    self._later[client] = waiting
                if message.id in self._ids:
                    return message


def _disk_status(llm: LLM) -> DiskStatus | None:
    disk = llm.disk
    if disk is None:
        return None
    return DiskStatus(
        **vars(disk.counts), bytes_now=disk.folder.n_bytes, bytes_queued=disk.n_queued
    )


def _cache_tokens(llm: LLM) -> int:
    """Tokens that the cache holds of all requests together; with a budget, when all pages that may
    change their types have the last ones."""
    cache, ladder = llm.cache, llm.engine.cache.ladder
    if ladder is None:
        return cache.n_tokens or cache.n_sequences * cache.n_ctx
    return ladder.sizes.room_together(cache.n_sequences, cache.n_ctx, llm.engine.n_batch)
