"""Ids of calls in a conversation, for templates that want them: whoever kept it may have none."""

from __future__ import annotations

import hashlib
import re
import string
from collections.abc import Mapping, Sequence

from localkv.loader.chat_template import ChatTemplate

_LETTERS = string.digits + string.ascii_letters
_NINE = re.compile(r"length\s*(?:!=|==)\s*9")
"""In Mistral's templates, which refuse ids of another length."""

Message = Mapping[str, object]


def with_ids(template: ChatTemplate, messages: Sequence[Message]) -> list[Message]:
    """The messages with an id for every call, and for every result that of its call.

    Ids that are null, or that this template refuses, are replaced; a result without one belongs to
    the first call that has none yet.
    """
    if not any(_has_null(message) for message in messages) and not _NINE.search(template.source):
        return list(messages)
    wants_nine = _NINE.search(template.source) is not None
    shaped, open_ids, n_calls = list[Message](), list[str](), 0
    for message in messages:
        calls = message.get("tool_calls")
        if isinstance(calls, list):
            named = []
            for call in calls:
                id = _id(call.get("id"), n_calls, nine=wants_nine)
                named.append({**call, "id": id})
                open_ids.append(id)
                n_calls += 1
            message = {**message, "tool_calls": named}
        elif message.get("role") == "tool":
            given = message.get("tool_call_id")
            is_next = given is None and bool(open_ids)
            id = open_ids[0] if is_next else _id(given, n_calls, nine=wants_nine)
            if id in open_ids:
                open_ids.remove(id)
            message = {**message, "tool_call_id": id}
        shaped.append(message)
    return shaped


def _has_null(message: Message) -> bool:
    calls = message.get("tool_calls")
    calls = calls if isinstance(calls, list) else []
    return any("id" in call and call["id"] is None for call in calls) or (
        "tool_call_id" in message and message["tool_call_id"] is None
    )


def _id(given: object, number: int, *, nine: bool) -> str:
    """The id that a template gets: the given one, if it takes that."""
    if not isinstance(given, str) or not given:
        return f"call{number:05d}"
    if not nine or (len(given) == 9 and given.isalnum()):
        return given
    digest = hashlib.sha256(given.encode(errors="replace")).digest()
    return "".join(_LETTERS[byte % len(_LETTERS)] for byte in digest[:9])
