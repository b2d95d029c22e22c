"""`ChatApp`: the program around the screen: themes, the command palette, and the terminal.

No control character reaches the terminal, and its end is noticed.

Text of the two themes has a contrast of 4.5 to 1 at least, on every background that it has here.
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import ClassVar

from rich.cells import cell_len
from rich.console import Console
from rich.segment import Segment
from textual.app import App, SystemCommand
from textual.binding import Binding, BindingType
from textual.color import Color
from textual.events import Event, Key
from textual.filter import LineFilter
from textual.notifications import SeverityLevel
from textual.screen import Screen
from textual.theme import Theme

from localkv.errors import LocalKVError, counted
from localkv.system.terminal_text import visible, without_controls
from localkv.tui.chat_screen import ChatScreen

MUTED = 0.75
"""The share of the text's colour in what is said by the way."""

DARK = Theme(
    name="localkv",
    primary="#6cb6b0",
    secondary="#7f8ea3",
    accent="#d9a35f",
    warning="#e0b050",
    error="#e06c75",
    success="#8bbf73",
    foreground="#d8dce3",
    background="#14171c",
    surface="#1b1f26",
    panel="#222731",
    dark=True,
)
LIGHT = Theme(
    name="localkv-light",
    primary="#176b66",
    secondary="#56637a",
    accent="#8a5410",
    warning="#805700",
    error="#a52b40",
    success="#35701f",
    foreground="#23272e",
    background="#fbfaf7",
    surface="#f1efe9",
    panel="#e8e5dd",
    dark=False,
)


def own_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """The colours that the chat's styles name and Textual lacks, from the colours of a theme."""
    text = Color.parse(variables["foreground"])
    return {"muted": text.hex if text.ansi is not None else text.with_alpha(MUTED).hex}


class ControlFilter(LineFilter):
    """Drops control characters, and links that the terminal itself would open.

    Widgets show control characters of answers and names where they expect them. This filter is the
    last thing that every line of the screen goes through, and drops those that widgets miss:
    neither Textual nor Rich holds them back.
    """

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        if all(_is_harmless(segment) for segment in segments):
            return segments
        return list(map(_harmless, segments))


def _is_harmless(segment: Segment) -> bool:
    text, style, _ = segment
    return text.isprintable() and (style is None or style.link is None)


def _harmless(segment: Segment) -> Segment:
    text, style, control = segment
    kept = without_controls(text)
    kept += " " * (cell_len(text) - cell_len(kept))
    return Segment(kept, style.update_link(None) if style else None, control)


GRACE_SECONDS = 12.0
"""How long the end may take: another chat may be writing to the file of sessions (`PATIENCE`)."""
PAUSE_SECONDS = 1.0
"""Between looks at a terminal that the system can't wait for (macOS)."""
EXIT_CODE = 129
"""The exit code that shells report for a program that SIGHUP ended."""


def wait_for_end() -> None:
    """Return when the other end of the terminal is closed."""
    poll = select.poll()
    try:
        poll.register(sys.__stdin__.fileno(), 0)  # type: ignore[union-attr]
    except (AttributeError, ValueError, OSError):
        return
    while not any(event & (select.POLLHUP | select.POLLERR) for _, event in poll.poll()):
        time.sleep(PAUSE_SECONDS)


def when_terminal_ends(end: Callable[[], object]) -> None:
    """Call `end` from another thread when the terminal ends; end the process if it goes on.

    SIGHUP says that the terminal was closed, but not where it is ignored (nohup) or nobody sends
    it. Textual then goes on. The thread that reads keys finds an end of input and reads again. The
    one that writes ends with an error. After that the screen's thread waits for ever once 30 pieces
    are to be written. Windows ends programs by itself.
    """

    def watch() -> None:
        wait_for_end()
        try:
            end()
            time.sleep(GRACE_SECONDS)
        finally:
            os._exit(EXIT_CODE)

    if hasattr(select, "poll"):
        threading.Thread(target=watch, name="terminal-end", daemon=True).start()


_SCHEMES = ("http", "https", "mailto")
_LONGEST_URL = 200


def has_shell() -> bool:
    """Whether the process was started by a shell that can have it go on again."""
    if not hasattr(os, "getsid"):
        return False
    try:
        return os.getpgid(os.getsid(0)) != os.getpgrp()
    except OSError:
        return False


class ChatApp(App[None]):
    """`localkv chat`.

    Args:
        chat: its screen.
    """

    TITLE = "localkv"
    CSS_PATH = "chat.tcss"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+q", "quit", "Quit", show=False, priority=True),
        Binding("ctrl+z", "suspend_process", "Suspend", show=False, priority=True),
    ]

    def __init__(self, chat: ChatScreen) -> None:
        super().__init__()
        self._controls = ControlFilter()
        # an error that ends the program may quote an answer: Rich would send its control characters
        self.error_console = Console(file=sys.stderr, color_system=None, markup=False)
        self.store = chat.session.store
        self.chat = chat

    async def on_event(self, event: Event) -> None:
        """Tell the chat of keys, whoever takes them."""
        if isinstance(event, Key):
            self.chat.key_pressed()
        await super().on_event(event)

    def on_mount(self) -> None:
        self.register_theme(DARK)
        self.register_theme(LIGHT)
        chosen = None
        with self._told():
            chosen = self.store.preference("theme")
        self.theme = chosen if chosen in self.available_themes else DARK.name
        self.theme_changed_signal.subscribe(self, self._keep_theme)
        self.push_screen(self.chat)
        if not self.is_headless:
            soon = asyncio.get_running_loop().call_soon_threadsafe
            when_terminal_ends(partial(soon, self._end_without_terminal))

    def _end_without_terminal(self) -> None:
        """End as SIGHUP would."""
        self.chat.keep_answer()
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        signal.raise_signal(signal.SIGHUP)

    def get_css_variables(self) -> dict[str, str]:
        variables = super().get_css_variables()
        self.theme_variables = {**own_variables(variables), **variables}
        return self.theme_variables

    def _keep_theme(self, theme: Theme) -> None:
        with self._told():
            self.store.set_preference("theme", theme.name)

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Around steps that the chat can do without."""
        try:
            yield
        except LocalKVError as error:
            self.notify(str(error), severity="error")

    def get_line_filters(self) -> Sequence[LineFilter]:
        return [*super().get_line_filters(), self._controls]

    def notify(
        self,
        message: str,
        *,
        title: str = "",
        severity: SeverityLevel = "information",
        timeout: float | None = None,
        markup: bool = False,
    ) -> None:
        """Say something, but only once while it shows.

        It is never read as markup, since it may quote a model or a file.
        """
        shown = visible(message)
        if all(other.message != shown for other in self._notifications):
            super().notify(shown, title=title, severity=severity, timeout=timeout, markup=False)

    def action_suspend_process(self) -> None:
        """Ctrl+Z: leave the terminal to the shell until `fg`."""
        if not has_shell():
            self.notify("There is no shell to come back from", severity="warning")
            return
        self.app_suspend_signal.publish(self)
        os.killpg(0, signal.SIGTSTP)  # as a terminal does: `make chat` stops with it

    def open_url(self, url: str, *, new_tab: bool = True) -> None:
        """Open a link of an answer that was clicked, if it is one to open without a thought."""
        shown = url if len(url) <= _LONGEST_URL else f"{url[:_LONGEST_URL]} …"
        if url.split(":", 1)[0].lower() not in _SCHEMES:
            self.notify(f"Not opened, as it is no address on the web: {shown}", severity="warning")
            return
        self.notify(f"Opened {shown}")
        super().open_url(url, new_tab=new_tab)

    async def action_quit(self) -> None:
        """Quit; with messages that were never sent only once more is pressed."""
        n_waiting = len(self.chat.queue.texts)
        text = f"{counted(n_waiting, 'message')} not sent yet: Ctrl+Q again quits without"
        if n_waiting and all(other.message != text for other in self._notifications):
            self.notify(text, severity="warning")
            return
        await super().action_quit()

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
