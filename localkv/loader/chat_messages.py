"""Messages as OpenAI's API and transformers have them, checked and put as a template takes them.

Templates differ in the values that they read. Some read the parts of a message, others its text
alone. Some know a role `developer`. Arguments of tool calls are objects or JSON text, an earlier
answer's reasoning has one name or another, and beside calls a text is null or empty. Rendering a
message with a value shows whether a template reads it. Some templates want ids of calls, which
whoever kept the conversation may not have (`with_ids`).

Roles come in an order that the template takes, too (`in_turns`). Clients send system messages
anywhere, two turns of the user in a row, and results of tools without their calls. Many templates
refuse some of these, or leave them out in silence. Rendering short conversations of the same roles
shows which. A message that a template does not take moves to the nearest place where it takes it.
Then a longer conversation begins with the prompt of a shorter one, and the rows in the cache are
used again.
"""

from __future__ import annotations

import hashlib
import json
import re
import string
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import cast

from localkv.errors import ChatTemplateError, UsageError
from localkv.loader.answer_tags import THINK_TAGS, writes_channels
from localkv.loader.chat_template import REASONING_FIELDS, ChatTemplate

Message = Mapping[str, object]

_WORD = "localkv-probe"
_JSON_STEP = re.compile(r'\\.|["{}\[\],]', re.DOTALL)
_MOST_ARGUMENTS = 100_000
"""Commas, lists and objects of a call's arguments: they are read in one go, while no other thread
goes on."""
_LONGEST_CUT, _MOST_STEPS_BACK, _MOST_NESTED = 1 << 18, 16, 64
_NULL = re.compile("None|null")


def messages_for(template: ChatTemplate, messages: Sequence[Message]) -> list[Message]:
    """The messages as this template takes them.

    The role `developer` becomes `system` where the template has no such role. Parts of text become
    one text, with a line break between, where it reads texts only. Arguments of tool calls become
    objects where it reads those, else JSON text; a call that was cut keeps as much of them as it
    has. Calls without an id get one. Reasoning is there by the names that templates read, as in
    transformers. A null or missing content becomes what the template takes. Other fields that are
    null are left out, and so is an empty list of calls.

    Raises:
        UsageError: a message is not one, or has a part that is not text.
    """
    shaped = [_message(template, message, f"messages[{i}]") for i, message in enumerate(messages)]
    return with_ids(shaped, lambda id: _takes_id(template, _like(id)))


def checked_tools(tools: Sequence[Message] | None) -> list[Message] | None:
    """Descriptions of tools; None instead of an empty list.

    Raises:
        UsageError: one is not a JSON schema.
    """
    for number, tool in enumerate(tools or ()):
        if not isinstance(tool, Mapping):
            raise UsageError(
                f"tools[{number}] is a {type(tool).__name__}, not a JSON schema",
                hint='as in {"type": "function", "function": {"name": ..., "parameters": ...}}',
            )
    return list(tools) if tools else None


def tools_for(template: ChatTemplate, tools: Sequence[Message] | None) -> list[Message] | None:
    """Descriptions of tools as this template takes them; None instead of an empty list.

    A function that is described without the object about it is put into one. Fields that are null
    are left out, and where the template fails without a description, parameters or properties,
    there are empty ones.

    Raises:
        UsageError: one is not a JSON schema.
    """
    checked = checked_tools(tools)
    return None if checked is None else [_tool(template, tool) for tool in checked]


def _tool(template: ChatTemplate, tool: Message) -> Message:
    """A description of a tool as this template takes it."""
    function = tool.get("function", tool)
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        return tool
    said = {name: value for name, value in function.items() if value is not None}
    if function is tool:
        said.pop("type", None)
        if "input_schema" in said:  # Anthropic's name
            said.setdefault("parameters", said.pop("input_schema"))
        tool = {"type": "function"}
    if not _takes_bare_tools(template):
        parameters = said.get("parameters", {})
        if isinstance(parameters, Mapping):
            parameters = {"type": "object", "properties": {}, **parameters}
        said = {"description": "", **said, "parameters": parameters}
    return {**tool, "function": said}


@lru_cache(maxsize=16)
def _takes_bare_tools(template: ChatTemplate) -> bool:
    """Whether the template shows a tool that has only a name, and parameters without
    properties."""
    described: tuple[Message, ...] = ({}, {"description": "a", "parameters": {"type": "object"}})
    for fields in described:
        tool = {"type": "function", "function": {"name": _WORD, **fields}}
        try:
            template.render([{"role": "user", "content": "a"}], tools=[tool])
        except ChatTemplateError:
            return False
    return True


def _message(template: ChatTemplate, message: Message, where: str) -> Message:
    if not isinstance(message, Mapping):
        raise UsageError(f'{where} is a {type(message).__name__}, not {{"role": ..., ...}}')
    role = message.get("role")
    if not isinstance(role, str):
        raise UsageError(f"{where} has no role", hint="system, user, assistant, tool, developer")
    if role == "developer" and not template.reads(role):
        role = "system"
    role, message = _without_functions(role, message)
    shaped = {name: value for name, value in message.items() if _says_something(name, value)}
    shaped["role"] = role
    content = message.get("content")
    if content is None and role == "assistant":
        content = shaped["content"] = message.get("refusal")
    if isinstance(content, list | tuple):
        texts = [_part(part, f"{where}.content[{i}]") for i, part in enumerate(content)]
        is_read = _reads_parts(template, role)
        parts = [{"type": "text", "text": text} for text in texts]
        shaped["content"] = parts if is_read else "\n".join(texts)
    elif not (content is None or isinstance(content, str)):
        raise UsageError(f"{where}.content is a {type(content).__name__}, not text")
    if not content and not isinstance(content, list | tuple):
        has_calls, is_answer = bool(message.get("tool_calls")), role == "assistant"
        shaped["content"] = _no_content(template, content, has_calls) if is_answer else ""
    if calls := message.get("tool_calls"):
        shaped["tool_calls"] = _calls(template, calls, f"{where}.tool_calls")
    if role == "assistant" and writes_channels(template.source):
        shaped = _out_of_tags(shaped)
    reasoning = next((shaped[name] for name in REASONING_FIELDS if shaped.get(name)), None)
    return shaped if reasoning is None else with_reasoning(shaped, reasoning)


def _without_functions(role: str, message: Message) -> tuple[str, Message]:
    """A role and a message with `tool_calls` and the role `tool` instead of what they replaced in
    OpenAI's API: `function_call`, and the role `function`."""
    if role == "function":
        return "tool", {"tool_call_id": None, **message}
    called = message.get("function_call")
    if role != "assistant" or not called:
        return role, message
    plain = {name: value for name, value in message.items() if name != "function_call"}
    if plain.get("tool_calls"):
        return role, plain
    return role, {**plain, "tool_calls": [{"id": None, "type": "function", "function": called}]}


def _says_something(name: object, value: object) -> bool:
    """Whether a field is not just an empty one of an API's answer: templates that find
    `tool_calls` read them."""
    if name == "tool_calls":
        return value is not None and value != []
    return value is not None or name == "tool_call_id"


def _out_of_tags(message: dict[str, object]) -> dict[str, object]:
    """A message with its reasoning as a field: tags stand for channels only in what a user gets."""
    content = message.get("content")
    if not isinstance(content, str) or not content.startswith(THINK_TAGS.open):
        return message
    reasoning, _, answer = content.removeprefix(THINK_TAGS.open).partition(THINK_TAGS.close)
    return {"thinking": reasoning.strip(), **message, "content": answer.lstrip("\n")}


def with_reasoning(message: Message, reasoning: object) -> Message:
    """A message with its reasoning under the names that templates read, gpt-oss's among them."""
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _part(part: object, where: str) -> str:
    """The text of a part of a message."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    text = part.get("text") if isinstance(part, Mapping) else None
    if isinstance(part, Mapping) and kind == "refusal":  # OpenAI's answers have it as a text
        text = part.get("refusal")
    if kind in ("text", "refusal", "input_text", "output_text") and isinstance(text, str):
        return text
    what = f"a part of type {kind!r}" if isinstance(kind, str) else "this part"
    raise UsageError(
        f"{where}: {what} is not supported", hint='only {"type": "text", "text": ...} is'
    )


def _calls(template: ChatTemplate, calls: object, where: str) -> list[Message]:
    """Tool calls with arguments of the kind that the template reads."""
    if not isinstance(calls, list | tuple):
        raise UsageError(f"{where} is a {type(calls).__name__}, not a list")
    shaped: list[Message] = []
    for number, call in enumerate(calls):
        function = call.get("function", call) if isinstance(call, Mapping) else None
        custom = call.get("custom") if isinstance(call, Mapping) else None
        if isinstance(custom, Mapping):  # whose input is a text
            function = {"name": custom.get("name"), "arguments": {"input": custom.get("input")}}
            call = {"id": call.get("id"), "type": "function", "function": function}
        if not isinstance(function, Mapping):
            raise UsageError(f"{where}[{number}] has no function")
        if not isinstance(function.get("name"), str):
            raise UsageError(f"{where}[{number}] has no name")
        at = f"{where}[{number}].function.arguments"
        arguments = _arguments(template, function.get("arguments"), at)
        function = {**function, "arguments": arguments}
        shaped.append({**call, "function": function} if "function" in call else function)
    return shaped


def _arguments(template: ChatTemplate, arguments: object, where: str) -> object:
    if arguments is None or arguments == "":
        arguments = {}
    if isinstance(arguments, str):
        text = arguments
        if text.count(",") + text.count("[") + text.count("{") > _MOST_ARGUMENTS:
            raise UsageError(f"{where} has more than {_MOST_ARGUMENTS:,} values")
        try:
            arguments = json.loads(text)
        except (ValueError, RecursionError):
            arguments = _completed(text)
            if arguments is None:
                raise UsageError(f"{where} is not JSON") from None
    if not isinstance(arguments, Mapping):
        raise UsageError(f"{where} is not an object")
    if _reads_objects(template):
        return arguments
    try:
        return json.dumps(arguments, ensure_ascii=False)
    except (TypeError, RecursionError):
        raise UsageError(f"{where} holds something that is not JSON") from None


def _completed(text: str) -> object:
    """The object that a text begins: the arguments of a call that was cut, as far as they go; None
    if the text does not begin an object."""
    if not text.lstrip().startswith("{") or len(text) > _LONGEST_CUT:
        return None
    closing, is_inside = list[str](), False
    ends = deque([(0, "{}")], maxlen=_MOST_STEPS_BACK)  # places to cut at, and what closes there
    for match in _JSON_STEP.finditer(text):
        step = match[0]
        if step == '"':
            is_inside = not is_inside
        elif not is_inside and step in "{[":
            closing.append("}" if step == "{" else "]")
        elif not is_inside and step in "}]" and (not closing or closing.pop() != step):
            return None
        if len(closing) > _MOST_NESTED:
            return None
        ends.append((match.end() - (step == ","), '"' * is_inside + "".join(reversed(closing))))
    if not closing:
        return None
    ends.append((len(text), ends[-1][1]))
    for end, rest in reversed(ends):
        with suppress(ValueError, RecursionError):
            return cast("object", json.loads(text[:end] + rest, strict=False))
    return {}


def text_of(message: Message) -> str:
    """The text of a message that `messages_for` made."""
    content = message.get("content")
    if isinstance(content, list | tuple):
        return "\n".join(_part(part, "content") for part in content)
    return "" if content is None else str(content)


@lru_cache(maxsize=64)
def _no_content(template: ChatTemplate, given: str | None, has_calls: bool) -> str | None:
    """The content of an answer without text: null or an empty text, or the given one if both work.

    Some templates fail with null, or write "None"; others show calls beside null only.
    """
    answer: dict[str, object] = {"role": "assistant"}
    if has_calls:
        function = {"name": _WORD, "arguments": "{}"}
        call = {"id": "call00000", "type": "function", "function": function}
        answer["tool_calls"] = _calls(template, [call], "tool_calls")
    prompts = dict[str | None, str]()
    for form in (given, None if given is not None else ""):
        with suppress(ChatTemplateError):
            prompts[form] = _probed(template, {**answer, "content": form})

    def loss(form: str | None) -> tuple[bool, int]:
        return _WORD not in prompts[form], len(_NULL.findall(prompts[form]))

    return min(prompts, key=loss, default="")  # the given one, if both work as well


@lru_cache(maxsize=16)
def shows_tools(template: ChatTemplate) -> bool:
    """Whether the model is told of tools."""
    schema = {"name": _WORD, "description": "", "parameters": {"type": "object", "properties": {}}}
    system, user = ({"role": role, "content": "a"} for role in ("system", "user"))
    prompts = list[str]()
    for messages in ([user], [system, user]):
        with suppress(ChatTemplateError):
            tools = [{"type": "function", "function": schema}]
            prompts.append(template.render(messages, tools=tools))
    return any(_WORD in prompt for prompt in prompts) if prompts else template.takes_tools


@lru_cache(maxsize=16)
def shows_calls(template: ChatTemplate) -> bool:
    """Whether the model is told of earlier calls of tools."""
    function = {"name": _WORD, "arguments": json.dumps({"argument": _WORD})}
    calls = _calls(template, [{"id": "call00000", "type": "function", "function": function}], "")
    answer = {"role": "assistant", "content": _no_content(template, "", True), "tool_calls": calls}
    try:
        return _WORD in _probed(template, answer)
    except ChatTemplateError:
        return template.reads("tool_calls")


def _probed(template: ChatTemplate, *answer: Message) -> str:
    """The prompt with an answer of the assistant, and what follows it.

    Raises:
        ChatTemplateError: the template fails, whether there are tools or not.
    """
    schema = {"name": "probe", "description": "", "parameters": {"type": "object"}}
    messages = [{"role": "user", "content": "a"}, *answer]
    try:
        return template.render(messages)
    except ChatTemplateError:  # some fail without any
        return template.render(messages, tools=[{"type": "function", "function": schema}])


@lru_cache(maxsize=64)
def _reads_parts(template: ChatTemplate, role: str) -> bool:
    """Whether the template takes the parts of a message of this role and writes their texts."""
    user = {"role": "user", "content": "a"}
    parts = [{"type": "text", "text": word} for word in (_WORD, "localkv-other")]
    probes: dict[str, list[Message]] = {
        "system": [{"role": "system", "content": parts}, user],
        "assistant": [user, {"role": "assistant", "content": parts}],
    }
    try:
        if role == "tool":
            prompt = _probed_result(template, "call00000", parts)
        else:
            prompt = template.render(probes.get(role, [{"role": "user", "content": parts}]))
    except ChatTemplateError:
        return False
    # a template that expects text may write the list itself
    shown = all(str(part["text"]) in prompt for part in parts)
    return shown and "'text'" not in prompt and '"text"' not in prompt


def _like(id: str) -> str:
    """An id for probes that is as long as others of its kind."""
    if len(id) == 9 and id.isalnum():
        return "call00000"
    return "c1" if len(id) < 9 else _WORD


@lru_cache(maxsize=64)
def _takes_id(template: ChatTemplate, id: str) -> bool:
    """Whether the template takes this id of a call: Mistral's want nine letters and digits."""
    try:
        _probed_result(template, id, "a")
    except ChatTemplateError:
        with suppress(ChatTemplateError):
            _probed_result(template, "call00000", "a")
            return False
    return True


def _probed_result(template: ChatTemplate, id: str, content: object) -> str:
    """The prompt with a call of a tool and its result.

    Raises:
        ChatTemplateError: the template fails, whether there are tools or not.
    """
    function = {"name": "probe", "arguments": "{}"}
    calls = _calls(template, [{"id": id, "type": "function", "function": function}], "tool_calls")
    answer = {"role": "assistant", "content": _no_content(template, "", True), "tool_calls": calls}
    result = {"role": "tool", "tool_call_id": id, "name": "probe", "content": content}
    return _probed(template, answer, result)


@lru_cache(maxsize=16)
def _reads_objects(template: ChatTemplate) -> bool:
    """Whether the template takes arguments of a tool call as an object, or only as text."""
    arguments = {"argument": _WORD}
    if _reads_arguments(template, arguments):
        return True
    return not _reads_arguments(template, json.dumps(arguments))


def _reads_arguments(template: ChatTemplate, arguments: object) -> bool:
    function = {"name": "probe", "arguments": arguments}
    call = {"id": "call00000", "type": "function", "function": function}
    probe = {"role": "assistant", "content": "", "tool_calls": [call]}
    schema = {"name": "probe", "description": "", "parameters": {"type": "object"}}
    for tools in (None, [{"type": "function", "function": schema}]):  # some fail without any
        with suppress(ChatTemplateError):
            if _WORD in template.render([{"role": "user", "content": "a"}, probe], tools=tools):
                return True
    return False


_LETTERS = string.digits + string.ascii_letters


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
