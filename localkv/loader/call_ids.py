"""Ids of calls in a conversation, for templates that want them: whoever kept it may have none."""

from __future__ import annotations

import hashlib
import string
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence

_LETTERS = string.digits + string.ascii_letters

Message = Mapping[str, object]


def with_ids(messages: Sequence[Message], is_taken: Callable[[str], bool]) -> list[Message]:
    """The messages, where every call has an id, and every result its call's id and name.

    Ids that are missing, or that the template refuses, are replaced. A result without an id belongs
    to the first call of its name without a result, or else to the first call without one. Results
    get names since some templates write them, and the APIs' results have only ids.

    Args:
        is_taken: whether the template takes an id of this length and these characters.
    """
    are_missing = any(_lacks_id(message) for message in messages)
    shaped, names, n_calls = list[Message](), dict[str, object](), 0
    open_ids, of_name = OrderedDict[str, None](), dict[object, deque[str]]()

    def id_of(given: object, number: int) -> str:
        if not isinstance(given, str) or not given:
            return f"call{number:05d}"
        return given if is_taken(given) else _nine_of(given)

    def next_id(name: object) -> str:
        waiting = of_name.get(name) if isinstance(name, str) else None
        while waiting:
            if (id := waiting.popleft()) in open_ids:
                return id
        return next(iter(open_ids))

    for message in messages:
        calls = message.get("tool_calls")
        if isinstance(calls, list):
            named = []
            for call in calls:
                if are_missing or "id" in call:
                    call = {**call, "id": id_of(call.get("id"), n_calls)}
                    name = names[call["id"]] = call.get("function", call).get("name")
                    open_ids[call["id"]] = None
                    of_name.setdefault(name, deque()).append(call["id"])
                named.append(call)
                n_calls += 1
            message = {**message, "tool_calls": named}
        elif message.get("role") == "tool" and (are_missing or "tool_call_id" in message):
            given = message.get("tool_call_id")
            is_next = given is None and bool(open_ids)
            id = next_id(message.get("name")) if is_next else id_of(given, n_calls)
            open_ids.pop(id, None)
            message = {**message, "tool_call_id": id}
            if not message.get("name") and isinstance(names.get(id), str):
                message["name"] = names[id]
        shaped.append(message)
    return shaped


def _lacks_id(message: Message) -> bool:
    calls = message.get("tool_calls")
    if message.get("role") == "tool":
        return message.get("tool_call_id") is None
    return isinstance(calls, list) and any(call.get("id") is None for call in calls)


def _nine_of(id: str) -> str:
    """Nine letters and digits, as Mistral's templates want ids, that stand for an id."""
    digest = hashlib.sha256(id.encode(errors="replace")).digest()
    return "".join(_LETTERS[byte % len(_LETTERS)] for byte in digest[:9])
