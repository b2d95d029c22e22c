"""`ChatScreen`: the conversation, the prompt under it, the panel beside it.

The life of an answer is in `answering.py`, messages that wait are in `queueing.py`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.widgets import Static

from localkv.chat.conversation import Message
from localkv.chat.reasoning import split_reasoning
from localkv.errors import LocalKVError
from localkv.tui.completing import Completing
from localkv.tui.figures import title_line
from localkv.tui.help_screen import HelpScreen
from localkv.tui.messages import (
    BranchWanted,
    EditWanted,
    PromptSubmitted,
    RetryWanted,
    SettingChanged,
    SystemPromptChanged,
)
from localkv.tui.model_screen import ModelScreen
from localkv.tui.sessions_screen import SessionsScreen
from localkv.tui.slash_commands import change_setting, run_command
from localkv.tui.widgets.cache_meter import CacheMeter, StatusLine
from localkv.tui.widgets.fitting_footer import FittingFooter
from localkv.tui.widgets.load_strip import LoadStrip
from localkv.tui.widgets.prompt import CommandHints, Prompt
from localkv.tui.widgets.settings import Settings, setting_text
from localkv.tui.widgets.side_panel import SidePanel
from localkv.tui.widgets.transcript import Transcript
from localkv.tui.widgets.waiting import Waiting
from localkv.tui.widgets.welcome import Welcome

_COMMAND = re.compile(r"/[a-z]+(\s|$)")


class ChatScreen(Completing):
    """The main screen."""

    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (104, "-wide")]  # noqa: RUF012
    AUTO_FOCUS = "Prompt"
    opening_note = ""
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
        Binding("tab", "complete", "Complete", show=False),
        Binding("f1", "help", "Help"),
    ]

    def compose(self) -> ComposeResult:
        with Horizontal(id="title-bar"):
            yield Static("", id="title", markup=False)
            yield Static("", id="model-name", markup=False)
        with Horizontal(id="body"):
            with Vertical(id="conversation"):
                yield Welcome("", id="welcome")
                yield Transcript(id="transcript")
                yield LoadStrip("", id="load-strip")
                yield Waiting(id="waiting")
                yield CommandHints("", id="hints")
                yield Static("", id="editing")
                yield Prompt(self._sent_before())
                yield StatusLine("", id="status")
            yield SidePanel(id="panel")
        yield FittingFooter(show_command_palette=True)

    def _sent_before(self) -> list[str]:
        try:
            return self.session.store.prompts()
        except LocalKVError as error:
            self._tell_problem(error)
            return []

    async def on_mount(self) -> None:
        self.query_one(CommandHints).display = False
        self.query_one(Welcome).show_loading(Path(self.options.model).name)
        self.show_settings()
        await self.show_conversation()
        if self.opening_note:
            await self.transcript.note(self.opening_note)
        self.show_meter()
        self.start_engine()
        await self.offer_answer()

    # the display

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

    # actions of the user

    @on(PromptSubmitted)
    async def _submitted(self, event: PromptSubmitted) -> None:
        prompt, text = self.query_one(Prompt), event.text
        if not text.strip():
            await self.send_waiting()
        elif _COMMAND.match(text):
            prompt.accept()
            try:
                await run_command(self, text)
            except LocalKVError as error:
                await self.transcript.note(str(error), error=True)
        elif self.editing is not None:
            if not self.refuse_while_busy():
                await self.say(text, prompt)
        elif self.busy or self.waiting:
            prompt.accept()
            await self.queue(text)
            await self.send_waiting()
        else:
            await self.say(text, prompt)

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

    # Actions run in the app's turn; changes of the conversation wait for the screen's own.

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

    def choose_model(self) -> None:
        """Let the user choose one of the models on this machine."""
        self.app.push_screen(ModelScreen(self.models.all, self.options.model), self._model_chosen)

    def _model_chosen(self, name: str | None) -> None:
        if name:
            self.load_model(name)

    async def retry(self, message: Message) -> None:
        """Answer once more: beside an answer, or after a message that has none."""
        if self.refuse_while_busy():
            return
        if message.role == "assistant":
            self.session.retry(message)
        self.query_one(Prompt).focus()
        await self.show_conversation()
        await self.begin_answer()

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

    async def new_chat(self) -> None:
        """Begin an empty conversation."""
        if not self.refuse_while_busy():
            await self.show_session(self.session.new())

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

    async def action_select_message(self, step: int) -> None:
        """Move the focus over the messages; past the last one to the prompt."""
        if step < 0 and self.focused in self.transcript.views()[:1]:
            await self.transcript.show_earlier(self.session.model_name or "Assistant")
        views = [*self.transcript.views(), *self.query_one(Waiting).messages()]
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
