"""Messages of widgets and the engine's thread to the screen, named after events."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from textual.message import Message

from localkv.chat.engine import (
    Audited,
    EngineFacts,
    Finished,
    LoadProgress,
    PromptProgress,
    TextDelta,
)
from localkv.errors import LocalKVError

if TYPE_CHECKING:
    from localkv.tui.engine_driver import EngineDriver


@dataclass
class EngineMessage(Message):
    """From an engine; one that was replaced may still send some."""

    driver: EngineDriver


@dataclass
class EngineLoading(EngineMessage):
    """Loading has come further."""

    progress: LoadProgress


@dataclass
class EngineReady(EngineMessage):
    """The model is loaded."""

    facts: EngineFacts


@dataclass
class EngineFailed(EngineMessage):
    """Loading failed, or something that was asked between answers did."""

    error: LocalKVError


@dataclass
class PromptRead(EngineMessage):
    """More of the prompt is read; the answer begins after its end."""

    progress: PromptProgress


@dataclass
class AnswerGrew(EngineMessage):
    """More of the answer is there."""

    delta: TextDelta


@dataclass
class AnswerEnded(EngineMessage):
    """The answer is complete."""

    stats: Finished


@dataclass
class AnswerFailed(EngineMessage):
    """The answer ended with an error."""

    error: LocalKVError


@dataclass
class AnswerAudited(EngineMessage):
    """What the packed cache changed in the last answer; or why that is not known."""

    audited: Audited
    error: LocalKVError | None = None


@dataclass
class TokensCounted(EngineMessage):
    """The number of tokens that the conversation takes."""

    n_tokens: int


@dataclass
class StateLoaded(EngineMessage):
    """What was evaluated before is in the cache; or why it is not."""

    n_tokens: int
    error: LocalKVError | None = None


@dataclass
class StateNotSaved(EngineMessage):
    """Why what was evaluated is not in a file."""

    error: LocalKVError


@dataclass
class ContextMeasured(EngineMessage):
    """The conversation does not fit: what happened, its tokens, and those of its last turn."""

    what: str
    n_tokens: int
    n_last: int


@dataclass
class TurnsDropped(EngineMessage):
    """The oldest turns are no longer part of the prompt."""

    n_turns: int


@dataclass
class PromptSubmitted(Message):
    """The user has sent a text."""

    text: str


@dataclass
class WaitingEditWanted(Message):
    """The user wants a message back that waits to be sent."""

    at: int


@dataclass
class WaitingRemoved(Message):
    """The user no longer wants to send a message that waits."""

    at: int


@dataclass
class SettingChanged(Message):
    """The user gave a setting another value."""

    name: str
    text: str


@dataclass
class SystemPromptChanged(Message):
    """The user wrote another system prompt."""

    text: str


@dataclass
class BranchWanted(Message):
    """The user wants to see the alternative `step` places further than a message's."""

    message_id: int
    step: int


@dataclass
class EditWanted(Message):
    """The user wants to say a message differently."""

    message_id: int


@dataclass
class RetryWanted(Message):
    """The user wants another answer beside this one."""

    message_id: int
