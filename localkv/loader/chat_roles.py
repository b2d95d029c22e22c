"""Roles in an order that a chat template takes.

Clients send system messages anywhere, two turns of the user in a row, and results of tools without
their calls. Many templates refuse some of these, or leave them out in silence. Rendering short
conversations of the same roles shows which. A message that a template does not take moves to the
nearest place where it takes it. Then a longer conversation begins with the prompt of a shorter one,
and the rows in the cache are used again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache

from localkv.errors import ChatTemplateError, UsageError
from localkv.loader.chat_messages import (
    Message,
    messages_for,
    shows_calls,
    text_of,
    with_reasoning,
)
from localkv.loader.chat_template import ChatTemplate
from localkv.loader.continued_message import REASONING_FIELDS

SYSTEM = ("system", "developer")
"""Roles of whoever runs the application."""

_ROLES = (*SYSTEM, "user", "assistant", "tool")

CALL = "call"
"""In the roles of a probe: the assistant calls a tool, and says nothing."""

_SCHEMA = {"name": "probe", "description": "", "parameters": {"type": "object", "properties": {}}}
_TOOLS = [{"type": "function", "function": _SCHEMA}]
_GAP = "\n\n"


def in_turns(
    template: ChatTemplate, messages: Sequence[Message], *, has_tools: bool = False
) -> tuple[list[Message], tuple[str, ...]]:
    """Messages in an order of roles that this template takes.

    Args:
        messages: as `messages_for` makes them.
        has_tools: the template is given tools with them.

    Returns:
        the messages, and one line for each way in which they were changed.

    Raises:
        UsageError: a message has a role that the template does not show.
    """
    if not _takes(template, ("user",), has_tools):
        return list(messages), ()  # nothing is known of it
    arranged = _Arranged(template, has_tools)
    arranged.check_roles(messages)
    n_first = next((i for i, m in enumerate(messages) if m["role"] not in SYSTEM), len(messages))
    lead = arranged.first_system(messages[:n_first], messages[n_first:])
    turns = arranged.without_late_systems(messages[n_first:])
    turns = arranged.with_calls_shown(turns)
    turns = arranged.without_odd_results(turns)
    turns = arranged.after_the_user(lead, turns)
    turns = arranged.with_texts_shown(arranged.merged([*lead, *turns]))
    return turns, tuple(arranged.warnings)


class _Arranged:
    """Puts one conversation in order.

    Attributes:
        warnings: a line for each way in which it was changed.
    """

    def __init__(self, template: ChatTemplate, has_tools: bool) -> None:
        self.warnings = list[str]()
        self._template = template
        self._has_tools = has_tools
        self._lead: tuple[str, ...] = ()
        self._moved = ""

    def _takes(self, *roles: str) -> bool:
        """Whether the template takes turns of these roles after the system message, if any."""
        return _takes(self._template, (*self._lead, *roles), self._has_tools)

    def _takes_result(self, *roles: str) -> bool:
        """Whether the template takes a tool's result after these roles, and not as the assistant's:
        some templates do so with any role that they don't know."""
        result = _rendered(self._template, (*self._lead, *roles, "tool"), self._has_tools)
        same = _rendered(self._template, (*self._lead, *roles, "assistant"), self._has_tools)
        return result is not None and result != same

    def _warn(self, line: str) -> None:
        if line not in self.warnings:
            self.warnings.append(line)

    def check_roles(self, messages: Sequence[Message]) -> None:
        """Refuse roles that nobody knows.

        Raises:
            UsageError: a message has one.
        """
        for i, message in enumerate(messages):
            role = str(message["role"])
            if role not in _ROLES and not self._takes("user", role):
                raise UsageError(
                    f"messages[{i}] has the role {role!r:.60}, of which the chat template shows "
                    "nothing",
                    hint=f"roles are {', '.join(_ROLES)}",
                )

    def first_system(self, systems: Sequence[Message], others: Sequence[Message]) -> list[Message]:
        """The system messages at the beginning, or none if the user's turn has to have them."""
        if not systems:
            return []
        roles = tuple(str(message["role"]) for message in systems)
        is_shown = self._takes(roles[0], "user")
        if any(message.get("tool_calls") for message in others):
            loop = ("user", CALL, "tool")  # in which Mistral's leave it out
            is_shown = is_shown and (self._takes(roles[0], *loop) or not self._takes(*loop))
        if not is_shown:
            self._warn("the chat template takes no system message: the user's first turn has it")
            self._moved = _joined(systems)
            return []
        self._lead = roles[:1]
        if len(systems) == 1:
            return list(systems)
        if _takes(self._template, (*roles[:3], "user"), self._has_tools):
            return list(systems)
        self._warn("the chat template takes one system message: the others are joined to it")
        return [{**systems[0], "content": _joined(systems)}]

    def without_late_systems(self, messages: Sequence[Message]) -> list[Message]:
        """The messages, with later system messages in the user's turns unless the template takes
        them."""
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

    def with_calls_shown(self, messages: Sequence[Message]) -> list[Message]:
        """The messages with results in the order of their calls, and with the calls as the template
        shows them: several at a time, one by one, or as text."""
        turns = list[Message]()
        n_taken = 0
        for i, message in enumerate(messages):
            calls = _list(message.get("tool_calls"))
            if i < n_taken or not calls:
                turns += [message] if i >= n_taken else []
                continue
            n_taken = i + 1
            while n_taken < len(messages) and messages[n_taken]["role"] == "tool":
                n_taken += 1
            turns += self._calling(message, calls, messages[i + 1 : n_taken])
        return turns

    def _calling(
        self, message: Message, calls: Sequence[object], results: Sequence[Message]
    ) -> list[Message]:
        """An answer with calls, and their results."""
        places = dict[object, int]()
        for place, call in enumerate(calls):
            places.setdefault(call.get("id") if isinstance(call, Mapping) else None, place)
        of_call: list[list[Message]] = [[] for _ in calls]
        for number, result in enumerate(results):
            id = result.get("tool_call_id")
            last = min(number, len(calls) - 1)
            of_call[last if id is None else places.get(id, last)].append(result)
        ordered = [result for several in of_call for result in several]
        if not shows_calls(self._template):
            self._warn("the chat template shows no calls of tools: the text says them as JSON")
            is_hermes = "<tool_call>" in self._template.source  # whose models write them so
            said = [text_of(message), *(_as_json(call, in_marks=is_hermes) for call in calls)]
            plain = {name: value for name, value in message.items() if name != "tool_calls"}
            plain["content"] = "\n".join(text for text in said if text)
            return [plain, *ordered]
        if len(calls) == 1 or _shows_several(self._template, self._has_tools):
            return [message, *ordered]
        self._warn("the chat template shows one call at a time: others come after its result")
        turns = list[Message]()
        for number, (call, found) in enumerate(zip(calls, of_call, strict=True)):
            first = message if number == 0 else {"role": "assistant", "content": ""}
            turns += [{**first, "tool_calls": [call]}, *found]
        return turns

    def with_texts_shown(self, messages: Sequence[Message]) -> list[Message]:
        """The messages, with texts beside calls as answers of their own if the template shows them
        only there."""
        turns = list[Message]()
        for message in messages:
            text = text_of(message) if message.get("tool_calls") else ""
            is_reasoned = any(message.get(name) for name in REASONING_FIELDS)
            if not text or _shows_beside(self._template, self._has_tools, is_reasoned):
                turns.append(message)
            elif self._takes("user", "assistant", CALL, "tool", "assistant", "user"):
                turns.append({"role": "assistant", "content": text})
                turns.append({**message, "content": ""})
            else:
                self._warn("the chat template shows no text beside calls: it is left out")
                turns.append(message)
        return turns

    def without_odd_results(self, messages: Sequence[Message]) -> list[Message]:
        """The messages, with results of tools as the user's turns where the template takes none."""
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
        """The turns, with an empty one of the user first if the template needs one there."""
        begins = str(turns[0]["role"]) if turns else ""
        if self._moved:
            first = _user(self._moved)
            return [_together(first, turns[0]), *turns[1:]] if begins == "user" else [first, *turns]
        if begins == "user" or not (lead or turns):
            return list(turns)
        asks = ["user"] if any(message["role"] == "user" for message in turns) else []
        if begins == "assistant" and turns[0].get("tool_calls"):
            taken = self._takes(CALL, "tool", *asks)
        else:
            taken = self._takes(begins, *asks) if begins else self._takes()
        if taken:
            return list(turns)
        self._warn("the chat template wants the user to begin: an empty turn comes first")
        return [_user(""), *turns]

    def merged(self, messages: Sequence[Message]) -> list[Message]:
        """The messages, with turns of one role in a row joined if the template wants that."""
        turns, kinds = list[list[Message]](), list[str]()
        for message in messages:
            before, kind = kinds[-1] if kinds else None, _kind_of(message)
            match before, kind:
                case "user", "user":
                    is_taken = self._takes("user", "user")
                case "assistant", "assistant":
                    is_taken = self._takes("user", "assistant", "assistant", "user")
                case "assistant", "call":
                    is_taken = self._takes("user", "assistant", CALL, "tool", "assistant", "user")
                case "call", "assistant":
                    is_taken = self._takes("user", CALL, "assistant", "user")
                case "call", "call":
                    is_taken = self._takes("user", CALL, CALL, "tool")
                case "tool", "user":
                    is_taken = self._takes("user", CALL, "tool", "user")
                case _:
                    is_taken = True
            if is_taken:
                turns.append([message])
                kinds.append(kind)
                continue
            turns[-1].append(message)
            kinds[-1] = CALL if kind == CALL else kinds[-1]
            if before == "tool":
                self._warn(
                    "the chat template takes no user's turn after a result: the result has its text"
                )
            else:
                self._warn(
                    "the chat template wants roles to take turns: two in a row are joined to one"
                )
        return [_together(*several) for several in turns]


def _said(turns: list[Message], systems: Sequence[Message], after: Message | None) -> Message:
    """Put system messages into the user's turn before, the one after, or a new one; return the turn
    after."""
    said = _user(_joined(systems))
    if not said["content"]:
        return after or said
    if turns and turns[-1]["role"] == "user":
        turns[-1] = _together(turns[-1], said)
    elif after is not None and after["role"] == "user":
        return _together(said, after)
    else:
        turns.append(said)
    return after or said


def _kind_of(message: Message) -> str:
    """The role of a message, as in probes."""
    return CALL if message.get("tool_calls") else str(message["role"])


def _as_json(call: object, *, in_marks: bool) -> str:
    """A call as a text."""
    function = call.get("function", call) if isinstance(call, Mapping) else {}
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with suppress(ValueError):
            arguments = json.loads(arguments)
    named = {"name": function.get("name"), "arguments": arguments}
    text = json.dumps(named, ensure_ascii=False)
    return f"<tool_call>\n{text}\n</tool_call>" if in_marks else text


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _together(*messages: Message) -> Message:
    """Messages as one, of the first's role."""
    if len(messages) == 1:
        return messages[0]
    joined = dict[str, object]()
    for message in reversed(messages):
        joined.update(message)
    joined["content"] = _joined(messages)
    calls = [call for message in messages for call in _list(message.get("tool_calls"))]
    if calls:
        joined["tool_calls"] = calls
    for name in ("reasoning_content", "thinking"):
        texts = [text for one in messages if isinstance(text := one.get(name), str)]
        if texts:
            joined[name] = _GAP.join(texts)
    return joined


def _list(value: object) -> list[object]:
    return list(value) if isinstance(value, list | tuple) else []


def _joined(messages: Sequence[Message]) -> str:
    return _GAP.join(text for text in map(text_of, messages) if text)


def _takes(template: ChatTemplate, roles: tuple[str, ...], has_tools: bool) -> bool:
    """Whether the template writes out what messages of these roles say, one after the other."""
    return _rendered(template, roles, has_tools) is not None


@lru_cache(maxsize=512)
def _rendered(template: ChatTemplate, roles: tuple[str, ...], has_tools: bool) -> str | None:
    """The prompt of messages of these roles; None if it lacks the text of one, or has the texts in
    another order. A later message at the beginning would change all of the prompt."""
    words = [f"localkv-probe-{number}" for number in range(len(roles))]
    messages = [_probe(role, word) for role, word in zip(roles, words, strict=True)]
    has_calls = shows_calls(template)
    said = [word for role, word in zip(roles, words, strict=True) if role != CALL or has_calls]
    return _with_words(template, messages, said, has_tools)


@lru_cache(maxsize=16)
def _shows_several(template: ChatTemplate, has_tools: bool) -> bool:
    """Whether the template writes out several calls of one answer."""
    calls = [_call(number, f"localkv-call-{number}") for number in range(2)]
    answer = {"role": "assistant", "content": "", "tool_calls": calls}
    messages = [_probe("user", "a"), answer, _probe("tool", "b")]
    words = ["localkv-call-0", "localkv-call-1"]
    return _with_words(template, messages, words, has_tools) is not None


@lru_cache(maxsize=16)
def _shows_beside(template: ChatTemplate, has_tools: bool, is_reasoned: bool) -> bool:
    """Whether the template writes out a text beside a call; gpt-oss's refuses one if there is
    reasoning, too."""
    answer: Message = {**_probe(CALL, ""), "content": "localkv-text"}
    answer = with_reasoning(answer, "localkv-reason") if is_reasoned else answer
    messages = [_probe("user", "a"), answer, _probe("tool", "b")]
    return _with_words(template, messages, ["localkv-text"], has_tools) is not None


def _with_words(
    template: ChatTemplate, messages: Sequence[Message], words: Sequence[str], has_tools: bool
) -> str | None:
    """The prompt of messages, if it has all words in this order."""
    for tools in (_TOOLS,) if has_tools else (None, _TOOLS):  # some fail without any
        with suppress(ChatTemplateError):
            prompt = template.render(messages_for(template, messages), tools=tools)
            places = [prompt.find(word) for word in words]
            if -1 not in places and places == sorted(places):
                return prompt
    return None


def _probe(role: str, word: str) -> Mapping[str, object]:
    if role == CALL:
        return {"role": "assistant", "content": "", "tool_calls": [_call(0, word)]}
    if role == "tool":
        return {"role": role, "tool_call_id": "call00000", "name": "probe", "content": word}
    return {"role": role, "content": word}


def _call(number: int, word: str) -> Mapping[str, object]:
    function = {"name": "probe", "arguments": {"argument": word}}
    return {"id": f"call0000{number}", "type": "function", "function": function}
