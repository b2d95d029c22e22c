"""Messages as OpenAI's API and transformers have them, checked and put as a template takes them.

Templates differ in the values that they read: parts of a message or its text alone, a role
`developer` or none, arguments of tool calls as objects or as JSON text, an earlier answer's
reasoning by one name or another, a null or an empty text beside calls. Rendering a message with a
value shows whether a template reads it. `localkv.loader.chat_roles` puts roles in order.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import cast

from localkv.errors import ChatTemplateError, UsageError
from localkv.loader.call_ids import with_ids
from localkv.loader.channels import writes_channels
from localkv.loader.chat_template import ChatTemplate
from localkv.loader.continued_message import REASONING_FIELDS
from localkv.loader.reasoning_tags import THINK_TAGS

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
