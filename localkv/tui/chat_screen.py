"""`ChatScreen`: the conversation, the prompt under it, the panel beside it.

The screen has the session and the engine, which `EngineDriver` runs in a thread. What the user does
and what the engine tells come as messages, and what follows from them is here. Widgets own what
they show: `Waiting` the queue, `ChatAudit` the audit, `Prompt` its history and completions.
`FullContext` finds what helps a conversation that no longer fits.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from textual import on, work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.screen import Screen
from textual.timer import Timer
from textual.widgets import Static

from localkv.chat.conversation import Message, split_reasoning
from localkv.chat.engine import ChatEngine, EngineOptions, EngineStoppedError
from localkv.chat.session import ChatSession
from localkv.chat.store import KeptStates
from localkv.errors import ContextOverflowError, LocalKVError, UsageError
from localkv.tui.chat_audit import AuditDue, AuditScreen, ChatAudit
from localkv.tui.dialogs import HelpScreen, ModelScreen, SessionsScreen
from localkv.tui.engine_driver import (
    AnswerAudited,
    AnswerEnded,
    AnswerFailed,
    AnswerGrew,
    ContextMeasured,
    EngineDriver,
    EngineFailed,
    EngineLoading,
    EngineReady,
    PromptRead,
    StateLoaded,
    StateNotSaved,
    TokensCounted,
    TurnsDropped,
    as_error,
)
from localkv.tui.figures import title_line
from localkv.tui.full_context import FullContext, FullContextScreen
from localkv.tui.slash_commands import COMMANDS, change_setting, run_command
from localkv.tui.widgets.engine_view import CacheMeter, LoadStrip, MeterState, StatusLine, Welcome
from localkv.tui.widgets.prompt import (
    CommandHints,
    FittingFooter,
    Prompt,
    PromptSubmitted,
    Waiting,
    WaitingEditWanted,
    WaitingRemoved,
)
from localkv.tui.widgets.side_panel import (
    SettingChanged,
    Settings,
    SidePanel,
    Speed,
    SystemPromptChanged,
    setting_text,
)
from localkv.tui.widgets.transcript import (
    BranchWanted,
    EditWanted,
    MessageView,
    RetryWanted,
    Transcript,
)

if TYPE_CHECKING:
    from localkv.chat.model_choice import Models

PROBLEM_SECONDS = 10.0
"""Seconds before a problem is reported again."""
DRAW_SECONDS = 0.1
DRAW_SECONDS_PER_BLOCK = 0.002
"""Seconds between two drawings of an answer, more of them the more paragraphs it has to lay out. It
is saved as often: text that was on the screen is not lost, however the program ends."""

EngineFactory = Callable[[EngineOptions], ChatEngine]

_COMMAND = re.compile(r"/[a-z]+(\s|$)")
_USAGES = [(command.usage, command.description) for command in COMMANDS]


class ChatScreen(Screen[None]):
    """The main screen.

    Args:
        session: the conversation.
        options: the model to load, and how.
        new_engine: makes an engine that is not loaded yet.
        models: those that can be gone over to; None stands for `Models`.
        states: where what sessions have evaluated is kept; None if it is not.
        audits: answers are audited when nothing else goes on.
        otherwise: the model to load, and how, if that fails.
        opening_note: is said at the beginning.

    Attributes:
        queue: the messages that wait to be sent.
        audit: the audit of the last answer.
        evaluated: the session whose text the engine evaluated last; None for none.
        loaded: the model that was loaded last, and how, or that is loaded if the first can't be.
        meter: the state of the context.
        answer: the message that is being written, or None.
        wants_answer: an answer begins once the model is loaded.
        editing: the message that is said differently, or None.
    """

    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (104, "-wide")]  # noqa: RUF012
    AUTO_FOCUS = "Prompt"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "stop", "Stop", priority=False),
        Binding("ctrl+n", "new_chat", "New"),
        Binding("ctrl+o", "sessions", "Sessions"),
        Binding("ctrl+r", "retry", "Retry"),
        Binding("ctrl+g", "continue", "Continue"),
        Binding("ctrl+t", "reasoning", "Reasoning", show=False),
        Binding("f2", "panel", "Panel"),
        Binding("f5", "restart_engine", "Restart engine", show=False),
        Binding("alt+up", "select_message(-1)", "Messages", show=False),
        Binding("alt+down", "select_message(1)", "Next message", show=False),
        Binding("f1", "help", "Help"),
    ]

    def __init__(
        self,
        session: ChatSession,
        options: EngineOptions,
        new_engine: EngineFactory,
        models: Models | None = None,
        states: KeptStates | None = None,
        *,
        audits: bool = False,
        otherwise: EngineOptions | None = None,
        opening_note: str = "",
    ) -> None:
        super().__init__()
        self.session = session
        session.on_problem = self._tell_problem
        self._problem = ("", 0.0)
        self._opening_note = opening_note
        self.queue = Waiting()
        self.audit = ChatAudit(audits)
        self.options = options
        self.loaded = otherwise
        self.new_engine = new_engine
        self._models = models
        self._backend: str | None = None
        self.driver: EngineDriver | None = None
        self.states = states
        self.evaluated: int | None = None
        self.meter = MeterState()
        self.answer: Message | None = None
        self.wants_answer = False
        self.editing: Message | None = None
        self._drawn = 0.0
        self._growth: Timer | None = None
        self._written = 0

    # what is shown

    def compose(self) -> ComposeResult:
        with Horizontal(id="title-bar"):
            yield Static("", id="title", markup=False)
            yield Static("", id="model-name", markup=False)
        with Horizontal(id="body"):
            with Vertical(id="conversation"):
                yield Welcome("", id="welcome")
                yield Transcript(id="transcript")
                yield LoadStrip("", id="load-strip")
                yield self.queue
                yield (hints := CommandHints("", id="hints"))
                yield Static("", id="editing")
                yield Prompt(self._sent_before(), _USAGES, hints, self._model_names)
                yield StatusLine("", id="status")
            yield SidePanel(self.audit)
        yield FittingFooter(show_command_palette=True)

    def _sent_before(self) -> list[str]:
        try:
            return self.session.store.prompts()
        except LocalKVError as error:
            self._tell_problem(error)
            return []

    async def on_mount(self) -> None:
        self.query_one(Welcome).show_loading(Path(self.options.model).name)
        self.show_settings()
        await self.show_conversation()
        if self._opening_note:
            await self.transcript.note(self._opening_note)
        self.show_meter()
        self.start_engine()
        await self.offer_answer()

    def on_unmount(self) -> None:
        self.keep_answer()
        self.close_engine()

    async def show_conversation(self) -> None:
        """Bring the screen in line with the session."""
        conversation = self.session.conversation
        self.show_title()
        self.query_one(Welcome).display = not conversation.path()
        await self.transcript.show(conversation, self.session.model_name or "Assistant")

    def show_title(self) -> None:
        title = title_line(self.session.title)
        self.query_one("#title", Static).update(Content(title))
        self.query_one("#model-name", Static).update(Content(self.session.model_name))
        self.sub_title = title

    def show_settings(self) -> None:
        self.query_one(Settings).show(self.session)

    def show_meter(self) -> None:
        self.query_one(CacheMeter).show(self.meter)
        self.query_one(StatusLine).show(self.meter)

    def show_model(self) -> None:
        """Describe the loaded model, in the panel and on an empty screen."""
        facts = self.meter.facts
        self.show_title()
        if facts is None:
            return
        self.query_one(SidePanel).show_model(facts)
        self.query_one(Welcome).show_model(facts, self.session.carried_over())
        self.transcript.name_model(facts.name)

    async def show_queue(self) -> None:
        await self.queue.show(held=not self.busy)
        self.query_one(Prompt).has_waiting = bool(self.queue.texts)

    def _tell_problem(self, error: LocalKVError) -> None:
        """Report an error of writing, but not with every token."""
        said, when = self._problem
        if str(error) != said or time.monotonic() - when > PROBLEM_SECONDS:
            self._problem = (str(error), time.monotonic())
            self.notify(str(error), severity="error", markup=False)

    # the engine

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

    async def restart_engine(self) -> None:
        """End whatever is running, and load the model again."""
        if self.answer is not None:
            self.wants_answer = not self.answer.content
            await self.fail_answer(LocalKVError("the engine was restarted"))
        self.start_engine()
        self.show_meter()

    def lose_engine(self, error: LocalKVError) -> None:
        """There is no engine any more."""
        self.meter = replace(self.meter, facts=None)
        self.query_one(LoadStrip).fail(error)

    @on(EngineLoading)
    def _loading(self, event: EngineLoading) -> None:
        if event.driver is self.driver:
            self.query_one(LoadStrip).show_progress(event.progress)

    @on(EngineReady)
    async def _ready(self, event: EngineReady) -> None:
        if event.driver is not self.driver:
            return
        facts = event.facts
        self.audit.set_answer(None)
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

    # what sessions have evaluated, kept in files

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

    # another model

    @property
    def models(self) -> Models:
        """The models that can be gone over to; may take a while, so not for the screen's turn."""
        if self._models is None:
            from localkv.chat.model_choice import Models

            self._models = Models()
        self._models.beside = self.options.model
        return self._models

    def _model_names(self, typed: str) -> list[str]:
        return self.models.completions(typed)

    def choose_model(self) -> None:
        """Let the user choose a model: one of the server's, or one on this machine."""
        self.app.push_screen(ModelScreen(self.models.all, self.options.model), self._model_chosen)

    def _model_chosen(self, name: str | None) -> None:
        if name:
            self.load_model(name)

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
        options = replace(self.options, model=model)
        if "kv_profile" in options.arguments:
            options = self.models.carried_over(self.options, Path(model))
        self.check_options(options)
        return options

    def check_options(self, options: EngineOptions) -> None:
        """Raises LocalKVError if the engine that runs now could not be replaced by this one."""
        pid = getattr(self.driver.engine, "pid", None) if self.driver is not None else None
        self.models.check(options, backend=self._backend, running_pid=pid)

    # the life of an answer

    async def begin_answer(self) -> None:
        """Have the message at the end answered, or go on with a cut answer there.

        Without a model that happens as soon as there is one.
        """
        self.stop_audit()
        self.wants_answer = self.meter.facts is None
        if self.wants_answer or self.driver is None:
            if self.query_one(LoadStrip).has_class("-error"):
                await self.transcript.note(
                    "there is no engine: F5 or /model starts one, and this is answered then",
                    error=True,
                )
            return
        session = self.session
        if session.cut_answer is None and not session.awaits_answer:
            return
        if self.meter.facts is not None:
            session.runs_with(self.meter.facts)
        try:
            if session.cut_answer is not None:
                self.answer = session.cut_answer
                request = session.continue_request(self.answer)
            else:
                self.answer = session.begin_answer()
                request = session.request()
        except LocalKVError as error:
            await self.transcript.note(str(error), error=True)
            return
        await self.show_conversation()
        self._view().begin()
        self.query_one(Speed).begin()
        self._written = len(self.answer.content)
        self.driver.answer(replace(request, audit=self._keeps_predictions))
        self.refresh_bindings()

    @property
    def _keeps_predictions(self) -> bool:
        """Whether an audit needs to be prepared for: one of a cache with a budget can't be had
        otherwise, as pages change their types."""
        facts = self.meter.facts
        return self.audit.automatic or (facts is not None and facts.kv_budget is not None)

    def _view(self) -> MessageView:
        """The view of the answer that is being written."""
        return self.transcript.views()[-1]

    async def stop_answer(self) -> None:
        """End the answer after its next token; one that has not begun does not begin."""
        self.stop_audit()
        if self.wants_answer:
            self.wants_answer = False
            await self.offer_answer()
            await self.show_queue()
        if self.answer is not None and self.driver is not None:
            self.driver.cancel()

    @on(PromptRead)
    def _read(self, event: PromptRead) -> None:
        if event.driver is self.driver and self.answer is not None:
            self._view().show_progress(event.progress)
            self.meter = replace(self.meter, n_tokens=event.progress.n_read)
            self.show_meter()

    @on(AnswerGrew)
    async def _grew(self, event: AnswerGrew) -> None:
        if event.driver is not self.driver or self.answer is None:
            return
        self.session.extend(self.answer, event.delta.text)
        self.query_one(Speed).add(event.delta)
        self.meter = replace(
            self.meter,
            n_tokens=event.delta.n_tokens or self.meter.n_tokens,
            pages=event.delta.pages or self.meter.pages,
        )
        if self._growth is None:
            pause = DRAW_SECONDS + DRAW_SECONDS_PER_BLOCK * self._view().n_blocks
            wait = max(0.001, self._drawn + pause - time.monotonic())
            self._growth = self.set_timer(wait, self._draw_growth)

    async def _draw_growth(self) -> None:
        """Draw everything that has come since the last time, at once."""
        self._growth, self._drawn = None, time.monotonic()
        if self.answer is None:
            return
        self.session.keep(self.answer)
        await self._view().grow()
        self._draw_speed()

    def _draw_speed(self) -> None:
        speed = self.query_one(Speed)
        speed.draw()
        self.meter = replace(self.meter, tokens_per_second=speed.tokens_per_second)
        self.show_meter()

    @on(AnswerEnded)
    async def _ended(self, event: AnswerEnded) -> None:
        if event.driver is not self.driver or self.answer is None:
            return
        answer, self.answer = self.answer, None
        self.evaluated = self.session.id
        stats = event.stats
        self.audit.set_answer(answer, stats.degenerate)
        self.meter = replace(
            self.meter,
            n_tokens=stats.total_tokens,
            last=stats,
            tokens_per_second=stats.decode_per_second,
        )
        if answer.content or stats.finish_reason != "cancelled":
            self.session.finish(answer, stats)
            await self._view().end()
        else:
            await self._discard(answer)
            await self.offer_answer()
            self.count_tokens()  # a server does not tell them of an answer that never began
        speed = self.query_one(Speed)
        speed.draw(stats.decode_per_second)
        speed.show_guesses(stats.drafted_tokens, stats.accepted_tokens)
        self.show_meter()
        self.refresh_bindings()
        if not stats.context_full and stats.finish_reason != "cancelled":
            await self.send_next()
            return
        await self.show_queue()
        if stats.context_full:
            self.ask_about_full_context("The context is full, and the answer was cut.")

    @on(AnswerFailed)
    async def _answer_failed(self, event: AnswerFailed) -> None:
        if event.driver is not self.driver or self.answer is None:
            return
        is_new = not self.answer.content
        await self.fail_answer(event.error)
        if isinstance(event.error, EngineStoppedError):
            self.wants_answer = is_new
            self.lose_engine(event.error)
        elif isinstance(event.error, ContextOverflowError):
            self.ask_about_full_context(
                f"{event.error.message[:1].upper()}{event.error.message[1:]}."
            )
        else:
            await self.transcript.note(str(event.error), error=True)

    async def fail_answer(self, error: LocalKVError) -> None:
        """End the answer with the text so far."""
        assert self.answer is not None
        answer, self.answer = self.answer, None
        self._draw_speed()
        if not answer.content:
            await self._discard(answer)
            await self.show_queue()
            return
        if len(answer.content) > self._written or not answer.finish_reason:
            self.session.fail(answer, error.message)
        await self._view().end()
        await self.show_queue()
        self.refresh_bindings()

    async def _discard(self, answer: Message) -> None:
        await self._view().end()
        self.session.discard(answer)
        await self.show_conversation()

    async def continue_answer(self) -> None:
        """Go on with the answer at the end, if it was cut."""
        if self.refuse_while_busy():
            return
        if self.session.cut_answer is None:
            self.notify("There is no answer at the end that was cut", severity="warning")
            return
        await self.begin_answer()

    async def offer_answer(self) -> None:
        """Say how to get an answer, if there is none to the last message and none is coming."""
        if self.session.awaits_answer and not self.busy:
            await self.transcript.note("This message has no answer: Ctrl+R has it answered")

    def keep_answer(self) -> None:
        """Keep the text so far."""
        if self.answer is not None:
            self.session.keep(self.answer)

    # messages

    @on(PromptSubmitted)
    async def _submitted(self, event: PromptSubmitted) -> None:
        prompt, text = self.query_one(Prompt), event.text
        if not text.strip():
            await self.send_next()
        elif _COMMAND.match(text):
            prompt.accept()
            try:
                await run_command(self, text)
            except LocalKVError as error:
                await self.transcript.note(str(error), error=True)
        elif self.editing is not None:
            if not self.refuse_while_busy():
                await self.say(text, prompt)
        elif self.busy or self.queue.texts:
            prompt.accept()
            self.queue.add(text)
            await self.show_queue()
            await self.send_next()
        else:
            await self.say(text, prompt)

    async def say(self, text: str, prompt: Prompt | None = None) -> bool:
        """Send a message and have it answered.

        Args:
            text: of the message.
            prompt: it is emptied as soon as the message is stored.

        Returns:
            False if it can't be stored, which is reported.
        """
        try:
            if self.editing is not None:
                self.session.edit(self.editing, text)
            else:
                self.session.say(text)
        except LocalKVError as error:
            await self.transcript.note(str(error), error=True)
            return False
        self.set_editing(None)
        if prompt is not None:
            prompt.accept()
            self.queue.forget_place()
        await self.show_conversation()
        await self.begin_answer()
        return True

    def set_editing(self, message: Message | None) -> None:
        """Say the next message instead of this one."""
        self.editing = message
        banner = self.query_one("#editing", Static)
        banner.display = message is not None
        banner.update("Editing — Enter begins a new branch, Esc keeps the old")

    async def send_next(self) -> None:
        """Send the first message of the queue, unless an answer has to come first."""
        if self.queue.texts and not self.busy:
            text = self.queue.take_first()
            if not await self.say(text):
                self.queue.put_back(text)
        await self.show_queue()

    @on(WaitingEditWanted)
    async def _edit_waiting(self, event: WaitingEditWanted) -> None:
        """Put a message of the queue into the prompt, before the text that is there."""
        if not self.queue.texts:
            return
        prompt = self.query_one(Prompt)
        text = self.queue.take_to_edit(event.at)
        prompt.fill(f"{text}\n{prompt.text}" if prompt.text.strip() else text)
        prompt.focus()
        await self.show_queue()

    @on(WaitingRemoved)
    async def _remove_waiting(self, event: WaitingRemoved) -> None:
        self.queue.remove_text(event.at)
        await self.show_queue()
        left = self.queue.messages()
        (left[min(event.at, len(left) - 1)] if left else self.query_one(Prompt)).focus()

    @on(EditWanted)
    def _edit_wanted(self, event: EditWanted) -> None:
        if self.refuse_while_busy():
            return
        self.set_editing(self.session.conversation.messages[event.message_id])
        prompt = self.query_one(Prompt)
        assert self.editing is not None
        prompt.fill(self.editing.content)
        prompt.focus()

    @on(RetryWanted)
    async def _retry_wanted(self, event: RetryWanted) -> None:
        await self.retry(self.session.conversation.messages[event.message_id])

    async def retry(self, message: Message) -> None:
        """Answer once more: beside an answer, or after a message that has none."""
        if self.refuse_while_busy():
            return
        if message.role == "assistant":
            self.session.retry(message)
        self.query_one(Prompt).focus()
        await self.show_conversation()
        await self.begin_answer()

    @on(BranchWanted)
    async def _branch_wanted(self, event: BranchWanted) -> None:
        if self.refuse_while_busy():
            return
        conversation = self.session.conversation
        message = conversation.messages[event.message_id]
        branches = conversation.branches(message)
        at = branches.index(message) + event.step
        if not 0 <= at < len(branches):
            return
        self.session.show_branch(branches[at])
        await self.show_conversation()
        for view in self.transcript.views():
            if view.message is branches[at]:
                view.focus()
        self.count_tokens()

    # a context that is full

    def ask_about_full_context(self, what: str) -> None:
        """Find out what could help, and ask."""
        if self.driver is not None:
            self.driver.measure_context(
                what, self.session.request(), self.session.last_turn_request()
            )

    @on(ContextMeasured)
    def _measured(self, event: ContextMeasured) -> None:
        if event.driver is self.driver and not self.busy:
            self._offer(event)

    @work(group="context", exclusive=True)
    async def _offer(self, measured: ContextMeasured) -> None:
        facts, session = self.meter.facts, self.session
        assert facts is not None
        full = FullContext(measured, session, facts, self.options)
        larger = await full.larger_cache(self.check_options)
        choices = full.choices(larger)
        if session is not self.session or self.busy:
            return
        if not choices:
            await self.transcript.note(full.refusal, error=True)
            return

        def decide(choice: str | None) -> None:
            if choice == "drop" and self.driver is not None:
                self.wants_answer = True
                self.driver.drop_oldest_turns(self.session, facts.n_ctx)
            elif choice == "larger" and larger is not None:
                self.call_later(self._load_for_answer, full.options_with(larger))
            elif choice == "new":
                self.call_later(self.begin_new_chat)

        self.app.push_screen(
            FullContextScreen(measured.what, facts, choices, larger, session.awaits_answer), decide
        )

    async def _load_for_answer(self, options: EngineOptions) -> None:
        self.options = options
        self.wants_answer = True
        await self.restart_engine()

    async def begin_new_chat(self) -> None:
        """Go over to a new chat with the message that has no answer here, and with the queue."""
        old, new = self.session, self.session.new()
        moved = old.conversation.path()[-1] if old.awaits_answer else None
        if moved is not None:
            try:
                new.say(moved.content)
            except LocalKVError as error:
                await self.transcript.note(str(error), error=True)
                return
            old.take_back(moved)
        queued = self.queue.take_all()
        await self.show_session(new)
        if moved is not None:
            await self.begin_answer()
        self.queue.texts = queued
        await self.show_queue()

    @on(TurnsDropped)
    async def _dropped(self, event: TurnsDropped) -> None:
        if event.driver is not self.driver:
            return
        self.session.save()
        await self.show_conversation()
        plural = "s are" if event.n_turns != 1 else " is"
        await self.transcript.note(f"{event.n_turns} turn{plural} no longer part of the prompt")
        if self.wants_answer:
            await self.begin_answer()
        else:
            self.count_tokens()

    # audits

    def audit_answer(self) -> None:
        """Show what the packed cache changed in the last answer.

        Raises:
            UsageError: there is no answer, or one is being written.
        """
        if self.busy:
            raise UsageError("an answer is being written", hint="Esc stops it")
        answered = self.audit.answered
        if answered is None or self.session.conversation.messages.get(answered.id) is not answered:
            raise UsageError(
                "this engine has written no answer here yet", hint="Ctrl+R answers again"
            )
        if self.audit.audited is not None:
            self.app.push_screen(AuditScreen(self.audit.audited))
            return
        self.audit.is_asked_for = True
        self._begin_audit()

    @on(AuditDue)
    def _begin_audit(self) -> None:
        if self.driver is not None and self.audit.can_begin and not self.busy:
            self.audit.begin()
            self.driver.audit()

    def stop_audit(self) -> bool:
        """End an audit that is under way; whether one was."""
        is_running = self.audit.stop()
        if is_running and self.driver is not None:
            self.driver.cancel()
        return is_running

    def key_pressed(self) -> None:
        """Somebody is at the keyboard: what goes on in the background waits."""
        if self.audit.key_pressed():
            self.stop_audit()

    @on(AnswerAudited)
    async def _audit_ended(self, event: AnswerAudited) -> None:
        if event.driver is not self.driver or not self.audit.under_way:
            return
        was_asked_for = self.audit.end(event.audited)
        if isinstance(event.error, EngineStoppedError):
            self.lose_engine(event.error)
        elif event.error is not None:
            if not was_asked_for:  # else each answer would be followed by this note
                self.audit.automatic = False
            await self.transcript.note(f"no audit: {event.error}", error=True)
        elif self.audit.audited is None:
            if not self.busy:
                self.audit.retry_when_idle()
        elif was_asked_for:
            self.app.push_screen(AuditScreen(self.audit.audited))

    # sessions and settings

    async def show_session(self, session: ChatSession) -> None:
        """Go over to another session; what waits here goes back to the prompt, to be decided on."""
        if self.queue.texts:
            prompt = self.query_one(Prompt)
            waiting = self.queue.take_all()
            self.queue.forget_place()
            prompt.fill("\n\n".join([*waiting, *filter(str.strip, [prompt.text])]))
            await self.show_queue()
        self.stop_audit()
        self.audit.set_answer(None)
        self.save_state()
        session.model_name = self.session.model_name
        self.session = session
        self.load_state()
        self.editing = None
        self.meter = replace(self.meter, last=None, n_tokens=None, tokens_per_second=0.0)
        self.query_one(Speed).clear()
        self.show_settings()
        await self.show_conversation()
        self.show_model()
        await self.offer_answer()
        self.show_meter()
        self.count_tokens()
        self.refresh_bindings()

    async def new_chat(self) -> None:
        """Begin an empty conversation."""
        if not self.refuse_while_busy():
            await self.show_session(self.session.new())

    async def open_session(self, session_id: int) -> None:
        """Resume a stored session."""
        if self.refuse_while_busy():
            return
        try:
            session = self.session.resumed(session_id)
        except LocalKVError as error:  # another chat has deleted it, or it is damaged
            await self.transcript.note(str(error), error=True)
            return
        await self.show_session(session)

    @on(SettingChanged)
    async def _setting_changed(self, event: SettingChanged) -> None:
        if event.text == setting_text(self.session, event.name):
            return
        try:
            change_setting(self, event.name, event.text)
        except LocalKVError as error:
            self.query_one(Settings).refuse(event.name)
            self.notify(str(error), severity="error", markup=False)

    @on(SystemPromptChanged)
    def _system_prompt_changed(self, event: SystemPromptChanged) -> None:
        if event.text != self.session.system_prompt:
            self.session.system_prompt = event.text
            self.session.save()

    # actions, which run in the app's turn; changes of the conversation wait for the screen's own

    def action_retry(self) -> None:
        path = self.session.conversation.path()
        if path:
            self.call_later(self.retry, path[-1])

    def action_continue(self) -> None:
        self.call_later(self.continue_answer)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Offer to go on only with an answer that was cut."""
        if action == "continue":
            return not self.busy and self.session.cut_answer is not None
        return True

    async def action_stop(self) -> None:
        """Stop whatever is running, else leave whatever is begun, else go back to the prompt."""
        if self.busy:
            await self.stop_answer()
        elif self.stop_audit():
            pass
        elif self.editing is not None:
            self.set_editing(None)
            self.query_one(Prompt).fill("")
        self.query_one(Prompt).focus()

    def action_new_chat(self) -> None:
        self.call_later(self.new_chat)

    def action_sessions(self) -> None:
        if self.refuse_while_busy():
            return
        screen = SessionsScreen(self.session.store, self.session.id)

        def close(chosen: int | None) -> None:
            for deleted in screen.deleted:
                if self.states is not None:
                    self.states.forget(deleted)
                if self.evaluated == deleted:
                    self.evaluated = None
            if chosen is not None:
                self.call_later(self.open_session, chosen)
            elif self.session.id in screen.deleted:
                self.call_later(self.new_chat)

        self.app.push_screen(screen, close)

    async def action_select_message(self, step: int) -> None:
        """Move the focus over the messages; past the last one to the prompt."""
        if step < 0 and self.focused in self.transcript.views()[:1]:
            await self.transcript.show_earlier(self.session.model_name or "Assistant")
        views = [*self.transcript.views(), *self.queue.messages()]
        focused = self.focused
        at = views.index(focused) if focused in views else len(views)
        at = max(0, at + step)
        if at < len(views):
            views[at].focus()
        else:
            self.query_one(Prompt).focus()

    def action_reasoning(self) -> None:
        """Fold all reasoning if some is unfolded, else unfold the last."""
        views = [v for v in self.transcript.views() if split_reasoning(v.message.content).reasoning]
        unfolded = [view for view in views if view.reasoning_unfolded]
        for view in unfolded or views[-1:]:
            view.toggle_reasoning()

    def action_panel(self) -> None:
        self.toggle_class("-toggled")

    def action_help(self) -> None:
        self.app.push_screen(HelpScreen())

    def action_restart_engine(self) -> None:
        self.call_later(self.restart_engine)

    @property
    def transcript(self) -> Transcript:
        return self.query_one(Transcript)
