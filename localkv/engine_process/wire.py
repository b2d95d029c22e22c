"""The messages between an engine's process and its client, as bytes: a length, and MessagePack.

The client sends `Load` first. The engine answers with `Progress`, and at last with facts of the
model, or `Failed`. Then a chat has a conversation with it, whose messages are here; a server sends
`texts`. Nothing in this module knows of processes, and nothing imports an array library.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from typing import Any, BinaryIO, Literal, TypeAlias

import msgspec

from localkv.chat.engine import (
    Audited,
    ChatRequest,
    EngineFacts,
    EngineOptions,
    Finished,
    LoadProgress,
    PromptProgress,
    TextDelta,
)
from localkv.errors import ContextOverflowError, LocalKVError, UsageError

LENGTH = struct.Struct("<I")
"""What stands before each message: its bytes."""
LONGEST = 1 << 30
"""Bytes of a message at most."""


class Message(msgspec.Struct, tag=True, frozen=True):
    """What the processes say to each other."""


class Load(Message, frozen=True):
    """The first message to the engine: the model, how it is loaded, and whether a conversation
    follows, or texts."""

    options: EngineOptions
    converses: bool = False


class Progress(Message, frozen=True):
    """Loading has come further."""

    value: LoadProgress


class Failed(Message, frozen=True):
    """The model can't be loaded."""

    message: str
    hint: str | None
    exit_code: int


class Cancel(Message, frozen=True):
    """Nobody waits for this text, answer or audit any more."""

    id: int


class SlotAction(Message, frozen=True):
    """Save, restore or erase the text that had a place last.

    Attributes:
        id: the client's number of it.
        action: "save", "restore" or "erase".
        place: which.
        path: of the file.
    """

    id: int
    action: str
    place: int = 0
    path: str = ""


class Refused(Message, frozen=True):
    """What was asked for can't be done, or not to its end.

    Attributes:
        kind: class of the error.
    """

    id: int
    kind: str
    message: str
    hint: str | None

    @classmethod
    def of(cls, id: int, error: LocalKVError) -> Refused:
        """An error as the client reads it, or its nearest relative that has a name."""
        kind = next(name for name, kind in _ERRORS.items() if isinstance(error, kind))
        return cls(id, kind, error.message, error.hint)


class Ask(Message, frozen=True):
    """Asks for an "answer" in a conversation, for the "count" of the tokens that its prompt takes,
    or for an "audit" of the last answer."""

    id: int
    what: Literal["answer", "count", "audit"]
    request: ChatRequest = ChatRequest(())


class Told(Message, frozen=True, omit_defaults=True):
    """Says one thing of a conversation: of what was asked for, by its number, or `facts` of the
    model that is loaded. `n_tokens` are a prompt's, or a state's that is saved or restored."""

    id: int = 0
    facts: EngineFacts | None = None
    reading: PromptProgress | None = None
    delta: TextDelta | None = None
    finished: Finished | None = None
    audited: Audited | None = None
    n_tokens: int | None = None


_ERRORS: dict[str, type[LocalKVError]] = {
    cls.__name__: cls for cls in (ContextOverflowError, UsageError, LocalKVError)
}


def named_error(kind: str, message: str, hint: str | None = None) -> LocalKVError:
    """An error that the engine has reported."""
    return _ERRORS.get(kind, LocalKVError)(message, hint)


_encoder = msgspec.msgpack.Encoder()


def framed(message: Message) -> bytes:
    """A message as it is sent. MessagePack has no lone surrogates, such as names of files may
    have, but JSON does."""
    try:
        body = _encoder.encode(message)
    except UnicodeEncodeError:
        body = json.dumps(msgspec.to_builtins(message, str_keys=True)).encode()
    return LENGTH.pack(len(body)) + body


def decoder(kind: Any) -> Callable[[bytes], Any]:
    """What makes a message of some kinds from its body, or raises ValueError if it is none."""
    of_bytes = msgspec.msgpack.Decoder(kind)

    def decode(body: bytes) -> Any:
        try:
            if body.startswith(b"{"):
                return msgspec.convert(json.loads(body), kind, str_keys=True)
            return of_bytes.decode(body)
        except (msgspec.MsgspecError, UsageError, ValueError, RecursionError) as error:
            raise ValueError(f"no message: {error}") from None

    return decode


def read_message(source: BinaryIO) -> bytes | None:
    """The body of the next message; None at the end of the stream."""
    head = source.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    n_bytes = LENGTH.unpack(head)[0]
    body = source.read(n_bytes)
    return body if len(body) == n_bytes else None


ToConversation: TypeAlias = Ask | SlotAction | Cancel

decode_load = decoder(Load)
to_conversation = decoder(ToConversation)
from_conversation = decoder(Progress | Told | Failed | Refused)
