"""Sampling settings and the system prompt, to be changed while the model is loaded."""

from __future__ import annotations

from typing import Any

from textual import on
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical
from textual.widgets import Input, Label, TextArea

from localkv.chat.session import ChatSession
from localkv.tui.messages import SettingChanged, SystemPromptChanged
from localkv.tui.widgets.text_field import TextField

SHOWN = ("temperature", "top_k", "top_p", "min_p", "repeat_penalty", "seed", "max_tokens")
"""Settings with a field of their own; `/set` reaches the others."""


class Settings(Vertical):
    """A field per setting; Enter, or leaving it, takes a value over."""

    def compose(self) -> ComposeResult:
        yield Label("Sampling", classes="heading")
        for name in SHOWN:
            with Horizontal(classes="setting"):
                yield Label(name.replace("_", " "))
                yield Input(id=f"set-{name}", compact=True, select_on_focus=True)
        yield Label("System prompt", id="system-heading", classes="heading")
        yield TextField(id="system-prompt", compact=True, placeholder="none")

    def show(self, session: ChatSession) -> None:
        """Fill the fields with a session's values."""
        for name in SHOWN:
            field = self.query_one(f"#set-{name}", Input)
            field.value = setting_text(session, name)
            field.remove_class("-invalid")
        area = self.query_one("#system-prompt", TextArea)
        if area.text != session.system_prompt:
            area.text = session.system_prompt

    def refuse(self, name: str) -> None:
        """The value that a field was given can't be had."""
        if name in SHOWN:
            self.query_one(f"#set-{name}", Input).add_class("-invalid")

    @on(Input.Submitted)
    @on(Input.Blurred)
    def _take(self, event: Input.Submitted | Input.Blurred) -> None:
        event.stop()
        name = (event.input.id or "").removeprefix("set-")
        self.post_message(SettingChanged(name, event.value))

    @on(TextArea.Changed)
    def _take_system_prompt(self, event: TextArea.Changed) -> None:
        event.stop()
        self.post_message(SystemPromptChanged(event.text_area.text))


def setting_text(session: ChatSession, name: str) -> str:
    """A setting's value as it is typed."""
    value: Any = session.max_tokens if name == "max_tokens" else getattr(session.params, name)
    if value is None:
        return "-1"
    return f"{value:g}" if isinstance(value, float) else str(value)
