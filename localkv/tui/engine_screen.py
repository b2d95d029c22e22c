"""`EngineScreen`: the life of an engine, on any screen that shows it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from textual import on, work
from textual.screen import Screen

from localkv.chat.conversation import Message
from localkv.chat.engine import ChatEngine, EngineOptions, EngineStoppedError
from localkv.chat.kept_states import KeptStates
from localkv.chat.session import ChatSession
from localkv.errors import LocalKVError
from localkv.tui.engine_driver import EngineDriver, as_error
from localkv.tui.messages import (
    EngineFailed,
    EngineLoading,
    EngineReady,
    StateLoaded,
    StateNotSaved,
    TokensCounted,
)
from localkv.tui.widgets.cache_meter import MeterState
from localkv.tui.widgets.load_strip import LoadStrip
from localkv.tui.widgets.transcript import Transcript

if TYPE_CHECKING:
    from localkv.chat.model_choice import Models

PROBLEM_SECONDS = 10.0
"""Seconds before a problem is reported again."""

EngineFactory = Callable[[EngineOptions], ChatEngine]


class EngineScreen(Screen[None]):
    """Owns the engine and the session; subclasses draw.

    Args:
        session: the conversation.
        options: the model to load, and how.
        new_engine: makes an engine that is not loaded yet.
        models: those that can be gone over to; None stands for `Models`.
        states: where what sessions have evaluated is kept; None if it is not.

    Attributes:
        evaluated: the session whose text the engine evaluated last; None for none.
        loaded: the model that was loaded last, and how, or that is loaded if the first can't be.
        meter: the state of the context.
        answer: the message that is being written, or None.
        wants_answer: an answer begins once the model is loaded.
    """

    def __init__(
        self,
        session: ChatSession,
        options: EngineOptions,
        new_engine: EngineFactory,
        models: Models | None = None,
        states: KeptStates | None = None,
    ) -> None:
        super().__init__()
        self.states = states
        self.evaluated: int | None = None
        self.session = session
        session.on_problem = self._tell_problem
        self._problem = ("", 0.0)
        self.options = options
        self.loaded: EngineOptions | None = None
        self.new_engine = new_engine
        self._models = models
        self._backend: str | None = None
        self.driver: EngineDriver | None = None
        self.meter = MeterState()
        self.answer: Message | None = None
        self.wants_answer = False

    def _tell_problem(self, error: LocalKVError) -> None:
        """Report an error of writing, but not with every token."""
        said, when = self._problem
        if str(error) != said or time.monotonic() - when > PROBLEM_SECONDS:
            self._problem = (str(error), time.monotonic())
            self.notify(str(error), severity="error", markup=False)

    # for subclasses to fill in

    async def show_conversation(self) -> None:
        raise NotImplementedError

    def show_meter(self) -> None:
        raise NotImplementedError

    def show_model(self) -> None:
        raise NotImplementedError

    def show_settings(self) -> None:
        raise NotImplementedError

    async def begin_answer(self) -> None:
        raise NotImplementedError

    async def fail_answer(self, error: LocalKVError) -> None:
        raise NotImplementedError

    @property
    def transcript(self) -> Transcript:
        raise NotImplementedError

    def start_engine(self) -> None:
        """Begin to load; the engine before is given up."""
        self.close_engine()
        self.meter = replace(self.meter, facts=None, n_kept=0)
        self.query_one(LoadStrip).start()
        self.driver = EngineDriver(self.new_engine(self.options), self.post_message)
        self.driver.load()

    def close_engine(self) -> None:
        """Give the engine up; what it has evaluated is kept, if that is wanted."""
        if self.driver is not None:
            self.driver.close(saves=self._state_to_save())
        self.evaluated = None

    def _state_to_save(self) -> Path | None:
        if self.states is None or self.evaluated is None or self.meter.facts is None:
            return None
        try:
            return self.states.prepared(self.evaluated)
        except OSError as error:
            self._tell_problem(LocalKVError(f"{self.states.folder}: {error.strerror}"))
            return None

    def save_state(self) -> None:
        """Keep what was evaluated, before something else is."""
        if self.driver is not None and (path := self._state_to_save()) is not None:
            self.driver.save_state(path)
        self.evaluated = None

    def load_state(self) -> None:
        """Go on with what was kept of this session."""
        self.meter = replace(self.meter, n_kept=0)
        if self.states is None or self.driver is None or self.meter.facts is None:
            return
        if self.session.id != self.evaluated and (path := self.states.found(self.session.id)):
            self.driver.load_state(path)

    @on(StateLoaded)
    def _state_loaded(self, event: StateLoaded) -> None:
        if event.driver is not self.driver:
            return
        if event.error is not None:
            text = f"what was kept of this session is not used: {event.error}"
            self.notify(text, severity="warning", markup=False)
        self.meter = replace(self.meter, n_kept=event.n_tokens)
        self.show_meter()

    @on(StateNotSaved)
    def _state_not_saved(self, event: StateNotSaved) -> None:
        self._tell_problem(event.error)

    async def restart_engine(self) -> None:
        """End whatever is running, and load anew."""
        if self.answer is not None:
            self.wants_answer = not self.answer.content
            await self.fail_answer(LocalKVError("the engine was restarted"))
        self.start_engine()
        self.show_meter()

    @property
    def models(self) -> Models:
        """The models that can be gone over to; may take a while, so not for the screen's turn."""
        if self._models is None:
            from localkv.chat.model_choice import Models

            self._models = Models()
        self._models.beside = self.options.model
        return self._models

    def load_model(self, name: str) -> None:
        """Load another model for this session, if it can be."""
        if self.answer is not None:
            self.refuse_while_busy()
            return
        self._change_model(name)

    @work(group="model", exclusive=True)
    async def _change_model(self, name: str) -> None:
        try:
            options = await asyncio.to_thread(self._found, name)
        except Exception as error:
            kept = f"; {self.meter.facts.name} stays loaded" if self.meter.facts else ""
            await self.transcript.note(f"{as_error(error)}{kept}", error=True)
            return
        if self.answer is not None:  # begun meanwhile
            self.refuse_while_busy()
            return
        if "kv_profile" in self.options.arguments and "kv_profile" not in options.arguments:
            k, v = (options.arguments.get(f"cache_type_{side}") or "f16" for side in "kv")
            await self.transcript.note(f"this model has no KV profile: K {k}, V {v} in all layers")
        self.options = options
        await self.restart_engine()

    def _found(self, name: str) -> EngineOptions:
        """The model that a name means, checked. Raises LocalKVError."""
        model = self.models.find(name)
        options = replace(self.options, model=str(model))
        if "kv_profile" in options.arguments:
            options = self.models.carried_over(self.options, model)
        self.check_options(options)
        return options

    def check_options(self, options: EngineOptions) -> None:
        """Raises LocalKVError if the engine that runs now could not be replaced by this one."""
        pid = getattr(self.driver.engine, "pid", None) if self.driver is not None else None
        self.models.check(options, backend=self._backend, running_pid=pid)

    @on(EngineLoading)
    def _loading(self, event: EngineLoading) -> None:
        if event.driver is self.driver:
            self.query_one(LoadStrip).show_progress(event.progress)

    @on(EngineReady)
    async def _ready(self, event: EngineReady) -> None:
        if event.driver is not self.driver:
            return
        facts = event.facts
        self.loaded, self._backend = self.options, facts.backend
        self.meter = replace(self.meter, facts=facts, n_tokens=None)
        self.session.model, self.session.model_name = self.options.model, facts.name
        self.session.save()
        self.query_one(LoadStrip).done()
        self.show_model()
        self.show_meter()
        for line in facts.warnings:
            self.notify(line, severity="warning", timeout=10, markup=False)
        self.load_state()
        if self.wants_answer:
            await self.begin_answer()
        else:
            self.count_tokens()

    @on(EngineFailed)
    async def _failed(self, event: EngineFailed) -> None:
        if event.driver is not self.driver:
            return
        if self.meter.facts is None and self.loaded not in (None, self.options):
            await self._return_to_loaded(event.error)
        elif self.meter.facts is None or isinstance(event.error, EngineStoppedError):
            self.lose_engine(event.error)
        else:
            self.wants_answer = False
            await self.transcript.note(str(event.error), error=True)

    async def _return_to_loaded(self, error: LocalKVError) -> None:
        """Load again what was loaded before something else failed to."""
        assert self.loaded is not None
        self.options = self.loaded
        before = self.session.model_name or "the usual context"
        await self.transcript.note(f"{error}; back to {before}", error=True)
        self.start_engine()

    def lose_engine(self, error: LocalKVError) -> None:
        """There is no engine any more."""
        self.meter = replace(self.meter, facts=None)
        self.query_one(LoadStrip).fail(error)

    def count_tokens(self) -> None:
        """Find out how full the context is, if no answer has reported it."""
        if self.driver is None or self.meter.facts is None or self.answer is not None:
            return
        request = self.session.request()
        if request.messages:
            self.driver.count_tokens(request)
        else:
            self.meter = replace(self.meter, n_tokens=0)
            self.show_meter()

    @on(TokensCounted)
    def _counted(self, event: TokensCounted) -> None:
        if event.driver is self.driver and self.answer is None:
            self.meter = replace(self.meter, n_tokens=event.n_tokens)
            self.show_meter()

    @property
    def busy(self) -> bool:
        """Whether an answer is being written, or waits for the model."""
        return self.answer is not None or self.wants_answer

    def refuse_while_busy(self) -> bool:
        """Say so if an answer is being written."""
        if self.busy:
            self.notify("First Esc, to stop the answer", severity="warning")
        return self.busy
