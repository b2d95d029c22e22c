"""`ChatApp`: the program around the screen: themes and the command palette."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import ClassVar

from textual.app import App, SystemCommand
from textual.binding import Binding, BindingType
from textual.screen import Screen
from textual.theme import Theme

from localkv.chat.engine import EngineOptions
from localkv.chat.session import ChatSession
from localkv.errors import LocalKVError
from localkv.tui.chat_screen import ChatScreen
from localkv.tui.engine_screen import EngineFactory
from localkv.tui.themes import DARK, LIGHT


class ChatApp(App[None]):
    """`localkv chat`.

    Args:
        session: the conversation to begin or go on with.
        options: what to load.
        new_engine: makes an engine that is not loaded yet.
    """

    TITLE = "localkv"
    CSS_PATH = "chat.tcss"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+q", "quit", "Quit", show=False, priority=True),
    ]

    def __init__(
        self, session: ChatSession, options: EngineOptions, new_engine: EngineFactory
    ) -> None:
        super().__init__()
        self.store = session.store
        self.chat = ChatScreen(session, options, new_engine)

    def on_mount(self) -> None:
        self.register_theme(DARK)
        self.register_theme(LIGHT)
        chosen = None
        with self._told():
            chosen = self.store.preference("theme")
        self.theme = chosen if chosen in self.available_themes else DARK.name
        self.theme_changed_signal.subscribe(self, self._keep_theme)
        self.push_screen(self.chat)

    def _keep_theme(self, theme: Theme) -> None:
        with self._told():
            self.store.set_preference("theme", theme.name)

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Around what the chat can do without."""
        try:
            yield
        except LocalKVError as error:
            self.notify(str(error), severity="error", markup=False)

    def action_help_quit(self) -> None:
        """Ctrl+C where nothing is selected, which ends other programs."""
        self.notify("Esc stops an answer, Ctrl+Q quits")

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        for command in super().get_system_commands(screen):
            if command.title in ("Theme", "Quit", "Screenshot"):
                yield command
        if screen is not self.chat:
            return
        chat = self.chat
        for title, help, action in (
            ("New chat", "The old one is kept", chat.action_new_chat),
            ("Sessions", "Resume, search, delete", chat.action_sessions),
            ("Answer again", "On a branch beside the last answer", chat.action_retry),
            ("Reasoning", "Fold or unfold it", chat.action_reasoning),
            ("Panel", "Show or hide it", chat.action_panel),
            ("Restart engine", "Load the model again", chat.action_restart_engine),
            ("Keys and commands", "All of them", chat.action_help),
        ):
            yield SystemCommand(title, help, action)
