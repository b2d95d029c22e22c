"""`Queueing`: messages that are sent while an answer is still being written."""

from __future__ import annotations

from textual import on
from textual.widgets import Static

from localkv.chat.conversation import Message
from localkv.chat.session import ChatSession
from localkv.errors import LocalKVError
from localkv.tui.full_context import FullContext
from localkv.tui.messages import WaitingEditWanted, WaitingRemoved
from localkv.tui.widgets.prompt import Prompt
from localkv.tui.widgets.waiting import Waiting


class Queueing(FullContext):
    """Sends them in order, each after the answer to the one before.

    After an answer that was stopped, cut or failed they are held until the user sends again.

    Attributes:
        waiting: their texts.
    """

    waiting: tuple[str, ...] = ()
    _place: int | None = None

    async def queue(self, text: str) -> None:
        """Send a text after all that wait, or in the place that it was taken from."""
        place = len(self.waiting) if self._place is None else self._place
        self._place = None
        self.waiting = (*self.waiting[:place], text, *self.waiting[place:])
        await self.show_waiting()

    async def send_waiting(self) -> None:
        """Send the first one, unless an answer has to come first."""
        if self.waiting and not self.busy:
            text, *rest = self.waiting
            self.waiting = tuple(rest)
            if self._place:
                self._place -= 1
            if not await self.say(text):
                self.waiting = (text, *self.waiting)
        await self.show_waiting()

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
            self._place = None
        await self.show_conversation()
        await self.begin_answer()
        return True

    def set_editing(self, message: Message | None) -> None:
        """Say the next message instead of this one."""
        self.editing = message
        banner = self.query_one("#editing", Static)
        banner.display = message is not None
        banner.update("Editing — Enter begins a new branch, Esc keeps the old")

    async def show_waiting(self) -> None:
        await self.query_one(Waiting).show(self.waiting, held=not self.busy)
        self.query_one(Prompt).has_waiting = bool(self.waiting)

    @on(WaitingEditWanted)
    async def _edit_waiting(self, event: WaitingEditWanted) -> None:
        """Put one into the prompt, before the text that is there."""
        if not self.waiting:
            return
        prompt = self.query_one(Prompt)
        self._place = event.at % len(self.waiting)
        text = self.waiting[self._place]
        self._remove(self._place)
        prompt.fill(f"{text}\n{prompt.text}" if prompt.text.strip() else text)
        prompt.focus()
        await self.show_waiting()

    @on(WaitingRemoved)
    async def _remove_waiting(self, event: WaitingRemoved) -> None:
        self._remove(event.at)
        await self.show_waiting()
        left = self.query_one(Waiting).messages()
        (left[min(event.at, len(left) - 1)] if left else self.query_one(Prompt)).focus()

    def _remove(self, at: int) -> None:
        self.waiting = (*self.waiting[:at], *self.waiting[at + 1 :])

    async def begin_new_chat(self) -> None:
        """Go over to a new chat with all that wait, since the message before them goes along."""
        waiting, self.waiting = self.waiting, ()
        await super().begin_new_chat()
        self.waiting = waiting
        await self.show_waiting()

    async def show_session(self, session: ChatSession) -> None:
        """Go over to another session; what waits here goes back to the prompt, to be decided on."""
        if self.waiting:
            prompt = self.query_one(Prompt)
            prompt.fill("\n\n".join([*self.waiting, *filter(str.strip, [prompt.text])]))
            self.waiting, self._place = (), None
            await self.show_waiting()
        await super().show_session(session)
