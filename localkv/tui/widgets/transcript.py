"""`Transcript`: the branch of the conversation that is shown, with notes between."""

from __future__ import annotations

from textual.containers import VerticalScroll
from textual.content import Content
from textual.widgets import Static

from localkv.chat.conversation import Conversation
from localkv.tui.widgets.message_view import MessageView


class Note(Static):
    """Something the program says; it is no part of the conversation."""


class Transcript(VerticalScroll, can_focus=False):
    """Messages from top to bottom. It follows its end until the user scrolls away from it."""

    def on_mount(self) -> None:
        self.watch(self, "show_vertical_scrollbar", self.follow)

    def follow(self) -> None:
        """Keep the end in sight, from where there is more than fits."""
        # an anchored widget with less than that would show it at the bottom
        self.anchor(self.show_vertical_scrollbar)

    def views(self) -> list[MessageView]:
        return list(self.query(MessageView))

    async def show(self, conversation: Conversation, model_name: str) -> None:
        """Show a conversation's branch; what is on the screen already stays."""
        path = conversation.path()
        views = self.views()
        n_same = 0
        for view, message in zip(views, path, strict=False):
            if view.message is not message:
                break
            n_same += 1
        await self.remove_children(Note)
        for view in views[n_same:]:
            await view.remove()
        added = [MessageView(m, "You" if m.role == "user" else model_name) for m in path[n_same:]]
        await self.mount_all(added)
        told = {message.id for message in conversation.kept()}
        for view in self.views():
            branches = conversation.branches(view.message)
            view.mark(
                branch=branches.index(view.message) + 1,
                n_branches=len(branches),
                told=view.message.id in told,
            )
        if added:
            self.follow()

    async def note(self, text: str | Content, *, error: bool = False) -> None:
        """Say something at the end."""
        await self.mount(Note(text, markup=False, classes="-error" if error else ""))
        self.follow()
