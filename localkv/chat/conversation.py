"""A conversation as a tree: every edit and every new attempt at an answer is a branch.

The model reads its own answers without their reasoning (`split_reasoning`). Nothing here knows of
engines, files or screens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from localkv.chat.engine import Finished
from localkv.loader.answer_tags import ANSWER_TAGS, REASONING_TAGS, tags_at_start

Role = Literal["user", "assistant"]

ENDINGS = ("stop", "length", "cancelled", "error")
"""How an answer ends."""


@dataclass
class Message:
    """One turn.

    Attributes:
        id, parent_id: its own, and the one it follows; None for the first.
        role: the speaker.
        content: the text; an assistant's with its reasoning.
        finish_reason: of an answer, one of `ENDINGS`; None while it is being written, or if the
            program ended then.
        stats: of an answer that was finished.
        error: why it ended with "error".
    """

    id: int
    parent_id: int | None
    role: Role
    content: str
    finish_reason: str | None = None
    stats: Finished | None = None
    error: str | None = None


@dataclass
class Conversation:
    """The messages of a session and the way through them that is shown.

    Attributes:
        messages: all of them by id, in order of their making.
        leaf_id: the last message of the branch that is shown; None shows nothing.
        dropped_id: this message and those before it are left out of the prompt, to save room.
    """

    messages: dict[int, Message] = field(default_factory=dict)
    leaf_id: int | None = None
    dropped_id: int | None = None

    def add(self, message: Message) -> None:
        """Add a message after its parent, and show it."""
        self.messages[message.id] = message
        self.leaf_id = message.id

    def path(self) -> list[Message]:
        """The branch that is shown, from its first message on."""
        path = []
        at = self.leaf_id
        while at is not None:
            path.append(self.messages[at])
            at = self.messages[at].parent_id
        return path[::-1]

    def kept(self) -> list[Message]:
        """The part of the branch that is in the prompt."""
        path = self.path()
        ids = [message.id for message in path]
        return path[ids.index(self.dropped_id) + 1 :] if self.dropped_id in ids else path

    def branches(self, message: Message) -> list[Message]:
        """A message and its alternatives, the oldest first."""
        return [
            other
            for other in self.messages.values()
            if other.parent_id == message.parent_id and other.role == message.role
        ]

    def show_branch(self, message: Message) -> None:
        """Show a message, and after it the newest reply at each turn."""
        newest = {other.parent_id: other.id for other in self.messages.values()}
        self.leaf_id = message.id
        while self.leaf_id in newest:
            self.leaf_id = newest[self.leaf_id]

    def prompt(
        self, system_prompt: str, *, since: Message | None = None, before: Message | None = None
    ) -> list[dict[str, str]]:
        """The prompt's messages, without an answer that is still empty.

        Reasoning has its own field, `reasoning_content`. Templates know in which turns a model
        reads it.

        Args:
            system_prompt: comes first, unless it is blank.
            since, before: the first message, and the one after the last, if it isn't all of them.
        """
        kept = self.kept()
        first = kept.index(since) if since is not None else 0
        end = kept.index(before) if before is not None else len(kept)
        messages = [{"role": "system", "content": system_prompt}] if system_prompt.strip() else []
        for message in kept[first:end]:
            if message.role == "user":
                messages.append({"role": "user", "content": message.content})
            elif (parts := split_reasoning(message.content)).answer:
                reasoning = {"reasoning_content": parts.reasoning} if parts.reasoning else {}
                messages.append({"role": "assistant", "content": parts.answer, **reasoning})
        return messages

    def turns(self) -> list[list[Message]]:
        """The prompt's messages, cut before each message of the user."""
        turns: list[list[Message]] = []
        for message in self.kept():
            if message.role == "user" or not turns:
                turns.append([])
            turns[-1].append(message)
        return turns


def conversation_of(messages: Iterable[Message], leaf_id: int | None) -> Conversation:
    """A conversation from its stored messages.

    Raises:
        ValueError: the messages are not a tree.
    """
    by_id = {message.id: message for message in messages}
    _check_tree(by_id)
    if leaf_id not in by_id:
        leaf_id = max(by_id, default=None)
    return Conversation(by_id, leaf_id)


def _check_tree(messages: Mapping[int, Message]) -> None:
    """From every message the way back must end."""
    rooted: set[int] = set()
    for message_id in messages:
        way: set[int] = set()
        at: int | None = message_id
        while at is not None and at not in rooted:
            if at in way:
                raise ValueError(f"message {at} follows itself")
            if at not in messages:
                raise ValueError(f"message {at}, which another one follows, is missing")
            way.add(at)
            at = messages[at].parent_id
        rooted.update(way)


@dataclass(frozen=True)
class Reasoned:
    """An answer in two parts; `open` while the reasoning has not ended."""

    reasoning: str
    answer: str
    open: bool = False


def split_reasoning(text: str) -> Reasoned:
    """The parts of an answer, also of one that is still being written.

    Only an answer that begins with the opening tag reasons: a later tag is text. The beginning
    of a possible tag belongs to neither part yet, and tags around the answer that follows are left
    out.
    """
    start = text.lstrip()
    tags = tags_at_start(start)
    if tags is None:
        waiting = any(possible.open.startswith(start) for possible in REASONING_TAGS)
        return Reasoned("", "" if waiting else text, open=waiting and bool(start))
    inside = start.removeprefix(tags.open)
    reasoning, close, answer = inside.partition(tags.close)
    if close:
        return Reasoned(reasoning.strip(), _out_of_tags(answer.lstrip("\n")))
    return Reasoned(_without_begun(reasoning, tags.close).lstrip(), "", open=True)


def _out_of_tags(answer: str) -> str:
    """An answer without the tags that some models put around it after they have reasoned."""
    start = answer.lstrip()
    for tags in ANSWER_TAGS:
        if start and tags.open.startswith(start):
            return ""
        if start.startswith(tags.open):
            inside, close, rest = start.removeprefix(tags.open).partition(tags.close)
            inside = inside.lstrip("\n")
            return inside.rstrip() + rest if close else _without_begun(inside, tags.close)
    return answer


def _without_begun(text: str, tag: str) -> str:
    """A text without an end that may become a tag."""
    for size in range(len(tag) - 1, 0, -1):
        if text.endswith(tag[:size]):
            return text[:-size]
    return text
