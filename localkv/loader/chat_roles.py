"""Roles in an order that a chat template takes.

Clients put system messages anywhere, two turns of the user in a row, results of tools without their
calls. Many templates refuse one or the other, or leave it out in silence. Which do is found out by
rendering short conversations of the same roles. What a template does not take is put where it takes
it, as near to its place as can be: then a longer conversation begins with the prompt of a shorter
one, and what the cache has of it is reused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache

from localkv.errors import ChatTemplateError
from localkv.loader.chat_messages import Message, messages_for, text_of
from localkv.loader.chat_template import ChatTemplate

SYSTEM = ("system", "developer")
"""Roles of whoever runs the application."""

CALL = "call"
"""In the roles of a probe: the assistant calls a tool, and says nothing."""

_SCHEMA = {"name": "probe", "description": "", "parameters": {"type": "object", "properties": {}}}
_TOOLS = [{"type": "function", "function": _SCHEMA}]
_GAP = "\n\n"


def in_turns(
    template: ChatTemplate, messages: Sequence[Message]
) -> tuple[list[Message], tuple[str, ...]]:
    """Messages in an order of roles that this template takes.

    Args:
        messages: as `messages_for` makes them.

    Returns:
        the messages, and one line for each way in which they were changed.
    """
    if not _takes(template, ("user",)):
        return list(messages), ()  # nothing is known of it
    arranged = _Arranged(template)
    n_first = next((i for i, m in enumerate(messages) if m["role"] not in SYSTEM), len(messages))
    lead = arranged.first_system(messages[:n_first])
    turns = arranged.without_late_systems(messages[n_first:])
    turns = arranged.without_odd_results(turns)
    turns = arranged.after_the_user(lead, turns)
    return arranged.merged([*lead, *turns]), tuple(arranged.warnings)


class _Arranged:
    """One conversation that is put in order.

    Attributes:
        warnings: a line for each way in which it was changed.
    """

    def __init__(self, template: ChatTemplate) -> None:
        self.warnings = list[str]()
        self._template = template
        self._lead: tuple[str, ...] = ()
        self._moved = ""

    def _takes(self, *roles: str) -> bool:
        """Whether the template takes turns of these roles after the system message, if any."""
        return _takes(self._template, (*self._lead, *roles))

    def _takes_result(self, *roles: str) -> bool:
        """Whether a tool's result may follow these as such: some templates take any role that they
        do not know for the assistant's."""
        result = _rendered(self._template, (*self._lead, *roles, "tool"))
        same = _rendered(self._template, (*self._lead, *roles, "assistant"))
        return result is not None and result != same

    def _warn(self, line: str) -> None:
        if line not in self.warnings:
            self.warnings.append(line)

    def first_system(self, systems: Sequence[Message]) -> list[Message]:
        """The system messages at the beginning, or none if the user has to say them."""
        if not systems:
            return []
        roles = tuple(str(message["role"]) for message in systems)
        if not _takes(self._template, (roles[0], "user")):
            self._warn("the chat template takes no system message: the user's first turn has it")
            self._moved = _joined(systems)
            return []
        self._lead = roles[:1]
        if len(systems) == 1:
            return list(systems)
        if _takes(self._template, (*roles[:3], "user")):
            return list(systems)
        self._warn("the chat template takes one system message: the others are joined to it")
        return [{**systems[0], "content": _joined(systems)}]

    def without_late_systems(self, messages: Sequence[Message]) -> list[Message]:
        """The messages with what the system says later in the user's turns, unless it may."""
        roles = {str(m["role"]) for m in messages}
        late = roles.intersection(SYSTEM)
        before: list[tuple[str, ...]] = [("user",), ("user", "assistant")]
        if "tool" in roles and self._takes("user", CALL, "tool"):
            before.append(("user", CALL, "tool"))
        if all(
            self._takes(*turns, role, "user") and self._takes(*turns, role)
            for role in late
            for turns in before
        ):
            return list(messages)
        self._warn(
            "the chat template takes system messages at the beginning only: the user's turn beside "
            "a later one has it"
        )
        turns, waiting = list[Message](), list[Message]()
        for message in messages:
            if message["role"] in SYSTEM:
                waiting.append(message)
                continue
            last = turns[-1] if turns else {}
            is_calling = last.get("role") == "tool" or bool(last.get("tool_calls"))
            if waiting and not (is_calling and message["role"] == "tool"):
                message = _said(turns, waiting, message)
                waiting = []
            turns.append(message)
        if waiting:
            _said(turns, waiting, None)
        return turns

    def without_odd_results(self, messages: Sequence[Message]) -> list[Message]:
        """The messages with results of tools as the user's, if the template takes none there."""
        turns, has_call = list[Message](), False
        for message in messages:
            role = message["role"]
            if role == "tool":
                before = [("user", CALL)] if has_call else [("user",), ("user", "assistant")]
                if not all(self._takes_result(*roles) for roles in before):
                    which = "results of tools" if has_call else "results of tools without calls"
                    self._warn(f"the chat template takes no {which}: the user's turn has them")
                    message = {"role": "user", "content": text_of(message)}
            else:
                has_call = bool(message.get("tool_calls"))
            turns.append(message)
        return turns

    def after_the_user(self, lead: Sequence[Message], turns: Sequence[Message]) -> list[Message]:
        """The turns after one of the user, if the template wants the user to begin."""
        begins = str(turns[0]["role"]) if turns else ""
        if self._moved:
            first = _user(self._moved)
            return [_pair(first, turns[0]), *turns[1:]] if begins == "user" else [first, *turns]
        if begins == "user" or not (lead or turns):
            return list(turns)
        if begins == "assistant" and turns[0].get("tool_calls"):
            taken = self._takes(CALL, "tool", "user")
        else:
            taken = self._takes(begins, "user") if begins else self._takes()
        if taken:
            return list(turns)
        self._warn("the chat template wants the user to begin: an empty turn comes first")
        return [_user(""), *turns]

    def merged(self, messages: Sequence[Message]) -> list[Message]:
        """The messages with turns of one role as one, if the template wants roles to change."""
        turns = list[Message]()
        for message in messages:
            before = turns[-1]["role"] if turns else None
            match before, message["role"]:
                case "user", "user":
                    is_taken = self._takes("user", "user")
                case "assistant", "assistant":
                    is_taken = self._takes("user", "assistant", "assistant", "user")
                case "tool", "user":
                    is_taken = self._takes("user", CALL, "tool", "user")
                case _:
                    is_taken = True
            if is_taken:
                turns.append(message)
                continue
            turns[-1] = _pair(turns[-1], message)
            if before == "tool":
                self._warn(
                    "the chat template takes nothing of the user after a result: the result has it"
                )
            else:
                self._warn(
                    "the chat template wants roles to take turns: two in a row are joined to one"
                )
        return turns


def _said(turns: list[Message], systems: Sequence[Message], after: Message | None) -> Message:
    """Let the user say what systems do: in the turn before, in the one after, or between; the turn
    after."""
    said = _user(_joined(systems))
    if not said["content"]:
        return after or said
    if turns and turns[-1]["role"] == "user":
        turns[-1] = _pair(turns[-1], said)
    elif after is not None and after["role"] == "user":
        return _pair(said, after)
    else:
        turns.append(said)
    return after or said


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _pair(one: Message, other: Message) -> Message:
    """Two messages as one, of the first's role."""
    pair = {**other, **one, "content": _joined((one, other))}
    calls = [*_list(one.get("tool_calls")), *_list(other.get("tool_calls"))]
    if calls:
        pair["tool_calls"] = calls
    for name in ("reasoning_content", "thinking"):
        texts = [text for text in (one.get(name), other.get(name)) if isinstance(text, str)]
        if texts:
            pair[name] = _GAP.join(texts)
    return pair


def _list(value: object) -> list[object]:
    return list(value) if isinstance(value, list | tuple) else []


def _joined(messages: Sequence[Message]) -> str:
    return _GAP.join(text for text in map(text_of, messages) if text)


def _takes(template: ChatTemplate, roles: tuple[str, ...]) -> bool:
    """Whether the template writes out what messages of these roles say, one after the other."""
    return _rendered(template, roles) is not None


@lru_cache(maxsize=512)
def _rendered(template: ChatTemplate, roles: tuple[str, ...]) -> str | None:
    """The prompt of messages of these roles; None if it lacks what one of them says, or has it in
    another order: what is put at the beginning later would change all of the prompt."""
    words = [f"localkv-probe-{number}" for number in range(len(roles))]
    messages = [_probe(role, word) for role, word in zip(roles, words, strict=True)]
    said = [word for role, word in zip(roles, words, strict=True) if role != CALL]
    for tools in (None, _TOOLS):  # some fail without any
        with suppress(ChatTemplateError):
            prompt = template.render(messages_for(template, messages), tools=tools)
            places = [prompt.find(word) for word in said]
            if -1 not in places and places == sorted(places):
                return prompt
    return None


def _probe(role: str, word: str) -> Mapping[str, object]:
    if role == CALL:
        function = {"name": "probe", "arguments": {}}
        call = {"id": "call00000", "type": "function", "function": function}
        return {"role": "assistant", "content": "", "tool_calls": [call]}
    if role == "tool":
        return {"role": role, "tool_call_id": "call00000", "name": "probe", "content": word}
    return {"role": role, "content": word}
