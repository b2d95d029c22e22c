"""`Transcript`: the branch of the conversation that is shown: its messages, and notes between."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.message import Message as TextualMessage
from textual.timer import Timer
from textual.widgets import Collapsible, Markdown, Static
from textual.widgets.markdown import MarkdownBlock, MarkdownFence, MarkdownStream

from localkv.chat.conversation import Conversation, Message, Reasoned, split_reasoning
from localkv.chat.engine import PromptProgress
from localkv.system.terminal_text import visible
from localkv.tui.dialogs import ChoiceScreen
from localkv.tui.widgets.answer_markdown import AnswerMarkdown

READING_SECONDS = 0.5
"""Seconds between two drawings of the time that is left while a prompt is read."""

_ENDINGS = {
    "cancelled": "stopped",
    "length": "cut at the limit",
    "error": "ended by an error",
    None: "interrupted",
}


class PromptReading:
    """How much of a prompt is read, and how long the rest takes at the rate so far.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._first: tuple[float, int] | None = None
        self._last: tuple[float, PromptProgress] | None = None

    def note(self, progress: PromptProgress) -> None:
        """More is read."""
        now = self._clock()
        if self._first is None:
            self._first = now, progress.n_read
        elif self._first[1] < progress.n_cached:  # what was there already tells nothing of the rate
            self._first = self._first[0], progress.n_cached
        self._last = now, progress

    def seconds_left(self) -> float | None:
        """Seconds that are left; None before anything was measured."""
        if self._first is None or self._last is None:
            return None
        (began, n_before), (now, progress) = self._first, self._last
        if progress.n_read <= n_before or now <= began:
            return None
        rate = (progress.n_read - n_before) / (now - began)
        return max(0.0, (progress.n_prompt - progress.n_read) / rate - (self._clock() - now))

    def in_words(self) -> str:
        """One line."""
        if self._last is None:
            return "reading the prompt …"
        progress = self._last[1]
        line = f"reading the prompt: {progress.n_read:,} of {progress.n_prompt:,} tokens"
        left = self.seconds_left()
        if left is None:
            return f"{line} …"
        return f"{line}, {_duration(left)} left"


def _duration(seconds: float) -> str:
    whole = math.ceil(seconds)
    return f"{whole} s" if whole < 100 else f"{whole // 60}:{whole % 60:02} min"


def copy_code(app: App[Any], blocks: Sequence[str]) -> None:
    """Copy the only one of some code blocks, or the one that the user chooses."""

    def copy(chosen: str | None) -> None:
        if chosen is not None:
            code = blocks[int(chosen)]
            app.copy_to_clipboard(code)
            app.notify(f"Copied {code.count(chr(10)) + 1} lines of code")

    if len(blocks) == 1:
        copy("0")
        return
    choices = [
        (str(i), block.splitlines()[0] if block else "", f"{block.count(chr(10)) + 1} lines")
        for i, block in enumerate(blocks)
    ]
    app.push_screen(ChoiceScreen("Which block of code?", choices), copy)


@dataclass
class BranchWanted(TextualMessage):
    """The user wants to see the alternative `step` places further than a message's."""

    message_id: int
    step: int


@dataclass
class EditWanted(TextualMessage):
    """The user wants to say a message differently."""

    message_id: int


@dataclass
class RetryWanted(TextualMessage):
    """The user wants another answer beside this one."""

    message_id: int


class MessageView(Vertical, can_focus=True):
    """Shows a message; for an answer, reasoning separately and figures below.

    Args:
        message: the message to show; an answer may grow.
        author: its title.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("c", "copy", "Copy"),
        Binding("b", "copy_code", "Copy code"),
        Binding("e", "edit", "Edit"),
        Binding("r", "retry", "Retry"),
        Binding("g", "screen.continue", "Continue", show=False),
        Binding("left,left_square_bracket", "branch(-1)", "Other branch", key_display="←→"),
        Binding("right,right_square_bracket", "branch(1)", "Next branch", show=False),
        Binding("up,k", "screen.select_message(-1)", "Previous message", show=False),
        Binding("down,j", "screen.select_message(1)", "Next message", show=False),
        Binding("less_than_sign,shift+left", "scroll_code(-8)", "Code left", show=False),
        Binding("greater_than_sign,shift+right", "scroll_code(8)", "Code right", show=False),
        Binding("space", "toggle_reasoning", "Reasoning", show=False),
    ]

    def __init__(self, message: Message, author: str) -> None:
        super().__init__(classes=f"-{message.role}")
        self.message = message
        self.author = author
        self._shown = ""
        self._stream: MarkdownStream | None = None
        self._marks = ""
        self._reading: PromptReading | None = None
        self._reading_timer: Timer | None = None

    def compose(self) -> ComposeResult:
        yield Static(Content(self.author), classes="author")
        if self.message.role == "user":
            yield Static(visible(self.message.content), markup=False, classes="said")
            return
        parts = self._parts()
        with Collapsible(title=_reasoning_title(parts), classes="reasoning") as reasoning:
            reasoning.display = bool(parts.reasoning)
            yield Static(parts.reasoning, markup=False, classes="thought")
        self._shown = parts.answer
        yield AnswerMarkdown(parts.answer)
        yield Static("", classes="figures")

    def on_mount(self) -> None:
        self.show_figures()

    def _parts(self) -> Reasoned:
        return split_reasoning(visible(self.message.content))

    @property
    def writing(self) -> bool:
        """Whether the answer is being written into this view."""
        return self._stream is not None

    def begin(self) -> None:
        """The answer is about to be written."""
        self._stream = Markdown.get_stream(self.query_one(Markdown))
        self.add_class("-writing")
        self._reading = PromptReading()
        self._draw_reading()
        self._reading_timer = self.set_interval(READING_SECONDS, self._draw_reading)

    def show_progress(self, progress: PromptProgress) -> None:
        """Say how much of the prompt is read, and how long the rest takes."""
        if self._reading is not None:
            self._reading.note(progress)
            self._draw_reading()

    def _draw_reading(self) -> None:
        if self._reading is not None:
            self.query_one(".figures", Static).update(Content(self._reading.in_words()))

    def _end_reading(self) -> None:
        self._reading = None
        if self._reading_timer is not None:
            self._reading_timer.stop()

    @property
    def n_blocks(self) -> int:
        """Paragraphs and the like that have to be laid out."""
        return len(self.query(MarkdownBlock))

    async def grow(self) -> None:
        """Show the text that was added to the message."""
        self._end_reading()
        parts = self._parts()
        if parts.reasoning or parts.open:
            self._show_reasoning(parts)
        added = parts.answer[len(self._shown) :]
        if added and self._stream is not None:
            self._shown = parts.answer
            await self._stream.write(added)
        self.query_one(".figures", Static).update("")

    async def end(self) -> None:
        """The answer has come to its end."""
        await self.grow()
        stream, self._stream = self._stream, None
        if stream is not None:
            await stream.stop()
        self.remove_class("-writing")
        self.show_figures()

    def _show_reasoning(self, parts: Reasoned) -> None:
        reasoning = self.query_one(".reasoning", Collapsible)
        reasoning.display = bool(parts.reasoning)
        reasoning.title = _reasoning_title(parts)
        self.query_one(".thought", Static).update(Content(parts.reasoning))

    def mark(self, *, branch: int, n_branches: int, in_prompt: bool) -> None:
        """Show which of several branches this is, and whether it is still part of the prompt."""
        marks = [f"‹ {branch} of {n_branches} ›"] if n_branches > 1 else []
        marks += [] if in_prompt else ["not in the prompt"]
        self.set_class(not in_prompt, "-dropped")
        self._marks = "  ".join(marks)
        self.name_author(self.author)

    def name_author(self, author: str) -> None:
        """Say who said it."""
        self.author = author
        self.query_one(".author", Static).update(
            Content.assemble(self.author, (f"  {self._marks}", "$muted"))
        )

    def show_figures(self) -> None:
        """Below an answer: how it ended, and at which speed."""
        if self.message.role == "user" or self.writing:
            return
        reason, stats = self.message.finish_reason, self.message.stats
        facts = [] if reason == "stop" else [_ENDINGS[reason]]
        if self.message.error:
            facts = [self.message.error]
        if stats is not None:
            n_tokens = stats.completion_tokens
            facts.append(f"{n_tokens:,} token{'s' if n_tokens != 1 else ''}")
            if stats.decode_per_second:
                facts.append(f"{stats.decode_per_second:,.1f} tokens/s")
            facts.append(f"{stats.cached_tokens:,} of {stats.prompt_tokens:,} prompt tokens reused")
        figures = self.query_one(".figures", Static)
        figures.update(Content(" · ".join(facts)))
        figures.display = bool(facts)
        figures.set_class(reason == "error", "-error")

    def code_blocks(self) -> list[str]:
        """The code blocks of the answer, in order."""
        return [fence.code.rstrip("\n") for fence in self.query(MarkdownFence)]

    def plain_text(self) -> str:
        """The text without reasoning."""
        if self.message.role == "user":
            return self.message.content
        return split_reasoning(self.message.content).answer.strip()

    @property
    def reasoning_unfolded(self) -> bool:
        return any(not reasoning.collapsed for reasoning in self.query(Collapsible))

    def toggle_reasoning(self) -> None:
        """Fold or unfold the reasoning."""
        for reasoning in self.query(Collapsible):
            reasoning.collapsed = not reasoning.collapsed

    def action_toggle_reasoning(self) -> None:
        self.toggle_reasoning()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Offer only the actions of this message."""
        if action == "edit":
            return self.message.role == "user"
        if action == "retry":
            return self.message.role == "assistant"
        if action == "copy_code":
            return bool(self.code_blocks())
        if action == "branch":
            return "‹" in self._marks
        return True

    def action_copy(self) -> None:
        text = self.plain_text()
        self.app.copy_to_clipboard(text)
        self.notify(f"Copied {len(text):,} characters")

    def action_copy_code(self) -> None:
        copy_code(self.app, self.code_blocks())

    def action_scroll_code(self, columns: int) -> None:
        for markdown in self.query(AnswerMarkdown):
            markdown.scroll_code(columns)

    def action_edit(self) -> None:
        self.post_message(EditWanted(self.message.id))

    def action_retry(self) -> None:
        self.post_message(RetryWanted(self.message.id))

    def action_branch(self, step: int) -> None:
        self.post_message(BranchWanted(self.message.id, step))


def _reasoning_title(parts: Reasoned) -> str:
    n_words = len(parts.reasoning.split())
    return f"Thinking … {n_words} words" if parts.open else f"Thought for {n_words} words"


AT_ONCE = 20
"""Messages that are laid out at once: hundreds would take seconds."""


class Note(Static):
    """Something the program says; it is no part of the conversation."""


class Transcript(VerticalScroll, can_focus=False):
    """Messages from top to bottom. It follows its end until the user scrolls away from it."""

    def __init__(self, *, id: str) -> None:
        super().__init__(id=id)
        self.n_hidden = 0
        self._conversation: Conversation | None = None

    def compose(self) -> ComposeResult:
        earlier = Static("", id="earlier")
        earlier.display = False
        yield earlier

    def on_mount(self) -> None:
        self.watch(self, "show_vertical_scrollbar", self.follow)

    def follow(self) -> None:
        """Keep the end in sight, from where there is more than fits."""
        # an anchored widget with less than that would show it at the bottom
        self.anchor(self.show_vertical_scrollbar)

    def views(self) -> list[MessageView]:
        return list(self.query(MessageView))

    async def show(self, conversation: Conversation, model_name: str) -> None:
        """Show a conversation's branch; messages that are on the screen already stay."""
        path = conversation.path()
        if conversation is not self._conversation or self.n_hidden >= len(path):
            self._conversation, self.n_hidden = conversation, max(0, len(path) - AT_ONCE)
        shown = path[self.n_hidden :]
        views = self.views()
        n_same = 0
        for view, message in zip(views, shown, strict=False):
            if view.message is not message:
                break
            n_same += 1
        await self.remove_children(Note)
        await self.remove_children(views[n_same:])
        added = [_view(message, model_name) for message in shown[n_same:]]
        await self.mount_all(added)
        self._mark(conversation)
        if added:
            self.follow()

    async def show_earlier(self, model_name: str) -> None:
        """Show more messages before the first one."""
        if self._conversation is None or not self.n_hidden:
            return
        start = max(0, self.n_hidden - AT_ONCE)
        earlier = self._conversation.path()[start : self.n_hidden]
        self.n_hidden = start
        views = self.views()
        await self.mount_all([_view(m, model_name) for m in earlier], before=views[0])
        self._mark(self._conversation)

    def _mark(self, conversation: Conversation) -> None:
        kept = {message.id for message in conversation.kept()}
        for view in self.views():
            branches = conversation.branches(view.message)
            view.mark(
                branch=branches.index(view.message) + 1,
                n_branches=len(branches),
                in_prompt=view.message.id in kept,
            )
        earlier = self.query_one("#earlier", Static)
        earlier.display = self.n_hidden > 0
        earlier.update(f"{self.n_hidden} earlier messages: Alt+Up at the first shows more")

    def name_model(self, model_name: str) -> None:
        """Say who answered, which is not known before a model is loaded."""
        for view in self.views():
            if view.message.role != "user":
                view.name_author(model_name)

    async def note(self, text: str | Content, *, error: bool = False) -> None:
        """Say something at the end."""
        await self.mount(Note(text, markup=False, classes="-error" if error else ""))
        self.follow()


def _view(message: Message, model_name: str) -> MessageView:
    return MessageView(message, "You" if message.role == "user" else model_name)
