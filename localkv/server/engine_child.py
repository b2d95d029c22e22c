"""The engine's process: `python -m localkv.server.engine_child`, messages of `wire` in and out.

One thread runs the steps of the model, and nothing else; another reads what the front sends. It
ends when its input does, so it never outlives the front, however that ended.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from queue import Empty, SimpleQueue
from threading import Condition, Thread
from typing import BinaryIO

import msgspec

from localkv.chat.local_engine import engine_facts
from localkv.engine.batch_engine import BatchEngine
from localkv.errors import LocalKVError
from localkv.llm import LLM
from localkv.server.places import placed
from localkv.server.running_text import RunningText, as_known
from localkv.server.slot_states import SlotStates
from localkv.server.wire import (
    WARM_UP,
    Accepted,
    Again,
    Cancel,
    Event,
    Facts,
    Failed,
    Load,
    Message,
    Progress,
    Refused,
    SlotAction,
    Status,
    Step,
    Submit,
    ToEngine,
    framed,
    read_message,
    to_engine,
)
from localkv.structured.constraint import GrammarTokens
from localkv.system.bus_errors import end_cleanly
from localkv.system.limits import before_model, exhausted


class EngineServer:
    """Serves a loaded model.

    Args:
        llm: the model.
        inbox: what the front sends.
        send: sends it a message.
    """

    def __init__(
        self, llm: LLM, inbox: SimpleQueue[ToEngine], send: Callable[[Message], None]
    ) -> None:
        self.llm = llm
        self.batch: BatchEngine = llm.batch
        self.inbox = inbox
        self.send = send
        self.texts = dict[int, RunningText]()
        self._events = list[Event]()
        self._places = (0,) * llm.cache.n_sequences
        self._slots = SlotStates(llm)
        self._answers = {Submit: self._submit, Cancel: self._cancel, SlotAction: self._act}

    def run(self) -> None:
        """Serve until the process ends."""
        while True:
            self._take_all(waits=not self.texts)
            step_ms, rows = self._step()
            for text in list(self.texts.values()):
                self._events += text.news()
                if text.has_ended:
                    self._slots.note(self._places, text)
                    del self.texts[text.id]
            events, self._events = self._events, []
            self.send(Step(events, self._status(step_ms, rows)))

    def _take_all(self, *, waits: bool) -> None:
        """Do what the front asks for."""
        try:
            while True:
                message = self.inbox.get(block=waits)
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

    def _act(self, action: SlotAction) -> None:
        with self._refusing(action.id):
            self._events.append(self._slots.act(action))

    @contextmanager
    def _refusing(self, id: int) -> Iterator[None]:
        """Let an error be the answer to this message alone."""
        try:
            yield
        except Exception as error:
            known = as_known(error)
            self._events.append(Refused(id, type(known).__name__, known.message, known.hint))

    def _cancel(self, message: Cancel) -> None:
        if (text := self.texts.get(message.id)) is not None:
            text.cancel()

    def _step(self) -> tuple[float, tuple[int, int]]:
        """Milliseconds of one step for all, and how many requests and tokens of prompts it had."""
        if not any(text.waits for text in self.texts.values()):
            return 0.0, (0, 0)
        stats = self.batch.stats
        n_generated, n_prompt, started = stats.n_generated, stats.n_prompt, time.perf_counter()
        self.batch.step()
        rows = stats.n_generated - n_generated, stats.n_prompt - n_prompt
        return 1e3 * (time.perf_counter() - started), rows

    def _status(self, step_ms: float, rows: tuple[int, int]) -> Status:
        stats, pages, scheduler = self.batch.stats, self.batch.pages, self.batch.scheduler
        running = [text.id for text in self.texts.values() if text.is_running]
        self._places = placed(self._places, running)
        return Status(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            pages_running=pages.running,
            pages_shared=pages.shared,
            pages_kept=pages.kept,
            pages_lost=pages.lost,
            n_steps=stats.n_steps,
            n_generated=stats.n_generated,
            n_prompt=stats.n_prompt,
            n_reused=stats.n_reused,
            n_preempted=stats.n_preempted,
            busy_seconds=stats.seconds,
            rows=rows,
            step_ms=step_ms,
            places=self._places,
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


def loaded(load: Load, send: Callable[[Message], None]) -> LLM:
    """Load the model that the front asks for, and tell the front of it.

    Raises:
        LocalKVError: it can't be loaded.
    """
    started = time.perf_counter()
    before_model()
    options = load.options
    llm = LLM(
        options.model,
        **options.arguments,
        on_progress=lambda stage, done, total: send(Progress(stage, done, total)),
    )
    cache, pools = llm.cache, llm.engine.cache.pools
    send(Progress(WARM_UP))
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
        )
    )
    return llm


def _cache_tokens(llm: LLM) -> int:
    """Tokens that the cache holds of all requests together; with a budget, when all pages that may
    change their types have the last ones."""
    cache, ladder = llm.cache, llm.engine.cache.ladder
    if ladder is None:
        return cache.n_tokens or cache.n_sequences * cache.n_ctx
    return ladder.sizes.room_together(cache.n_sequences, cache.n_ctx, llm.engine.n_batch)


def serve(source: BinaryIO, out: BinaryIO) -> int:
    """Serve until `source` ends; the process's exit code, if the model can't be loaded."""
    inbox = Inbox()
    body = read_message(source)
    load = None if body is None else to_engine.decode(body)
    if not isinstance(load, Load):
        raise ValueError("the first message must name the model to load")

    def listen() -> None:
        try:
            while (body := read_message(source)) is not None:
                inbox.put(to_engine.decode(body))
        finally:  # even if a message is damaged: nobody would notice the end any more
            os._exit(0)

    def send(message: Message) -> None:
        out.write(framed(message))
        out.flush()

    Thread(target=listen, daemon=True).start()
    try:
        llm = loaded(load, send)
    except (LocalKVError, MemoryError, OSError) as error:
        known = error if isinstance(error, LocalKVError) else exhausted(error)
        if known is None:
            raise
        send(Failed(known.message, known.hint, known.exit_code))
        return known.exit_code
    inbox.make_matchers(llm.grammar_tokens)
    EngineServer(llm, inbox.messages, send).run()
    return 0


def main() -> int:
    """Keep stdout for the protocol: libraries' prints go to stderr."""
    end_cleanly()
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return serve(sys.stdin.buffer, out)


if __name__ == "__main__":
    sys.exit(main())
