"""A conversation as a document: Markdown to read, JSON to go on with."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path

from localkv.chat.conversation import Message
from localkv.chat.reasoning import split_reasoning
from localkv.chat.session import ChatSession
from localkv.errors import UsageError, printable

NAME_BYTES = 100
"""Most bytes of a name that is made from a title: file systems take 255, some fewer."""


def to_markdown(session: ChatSession) -> str:
    """The branch that is shown, with reasoning folded away."""
    parts = [f"# {session.title}"]
    if session.system_prompt.strip():
        parts.append(f"**System:** {session.system_prompt.strip()}")
    for message in session.conversation.path():
        parts += _turn(message, session.model_name)
    return "\n\n".join(parts) + "\n"


def _turn(message: Message, model_name: str) -> list[str]:
    if message.role == "user":
        return ["## You", message.content.strip()]
    parts = split_reasoning(message.content)
    turn = [f"## {model_name or 'Assistant'}"]
    if parts.reasoning:
        summary = "<summary>Reasoning</summary>"
        turn.append(f"<details>{summary}\n\n{parts.reasoning}\n\n</details>")
    turn.append(parts.answer.strip())
    if message.finish_reason not in ("stop", "length"):
        turn.append(f"*({message.finish_reason or 'interrupted'})*")
    return turn


def to_json(session: ChatSession) -> str:
    """All branches; `shown` lists the ids of the one that is shown."""
    fields = {
        "title": session.title,
        "model": session.model_name,
        "system_prompt": session.system_prompt,
        "sampling": asdict(session.params),
        "shown": [message.id for message in session.conversation.path()],
        "messages": [asdict(message) for message in session.conversation.messages.values()],
    }
    return json.dumps(fields, ensure_ascii=False, indent=2) + "\n"


def default_name(title: str, suffix: str) -> str:
    """A file name that says which conversation it holds."""
    words = "-".join(re.findall(r"\w+", title[:1000].lower())[:8])
    short = words.encode()[:NAME_BYTES].decode(errors="ignore")
    return f"{short or 'chat'}.{suffix}"


def export(session: ChatSession, path: Path) -> None:
    """Write a conversation, in the format that the file's name ends with; never over a file.

    Raises:
        UsageError: the ending is neither .md nor .json, or the file is there or can't be made.
    """
    write = {".md": to_markdown, ".json": to_json}.get(path.suffix)
    if write is None:
        raise UsageError(f"{printable(path)}: the name must end in .md or .json")
    text = write(session)
    try:
        with path.open("x", encoding="utf-8", errors="backslashreplace") as file:
            try:
                file.write(text)
                file.flush()
            except OSError:
                path.unlink()  # a part of a conversation is none
                raise
    except FileExistsError:
        raise UsageError(f"{printable(path)} exists already", hint="name another file") from None
    except OSError as error:
        raise UsageError(f"{printable(path)}: {error.strerror}") from error
