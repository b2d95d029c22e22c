"""`Transcript`: the branch of the conversation that is shown, with notes between."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.content import Content
from textual.widgets import Static

from localkv.chat.conversation import Conversation, Message
from localkv.tui.widgets.message_view import MessageView

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
