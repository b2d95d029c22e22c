"""Calls as JSON objects, `{"name": ..., "arguments": {...}}`, with and without marks.

| Family | What it writes |
|---|---|
| Hermes, Qwen 2.5 and 3, Granite 4 | `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` |
| gpt-oss | a message, `<|channel|>commentary to=functions.NAME` |
| Command R7B, A | a list of `{"tool_call_id", "tool_name", "parameters"}` between marks |
| Command R, R+ | a list without ids in a fence, after `Action:` |
| Llama 3.x | `{"name": ..., "parameters": {...}}` as its answer, or after `<|python_tag|>` |

Where a model was told of tools in plain words, a call without a mark is found in several shapes.
These are a list of calls, a fence of three backticks, Hermes' mark, and `functools`, which is
Firefunction's. The name has to be the name of a tool, so JSON that is an answer stays one. After
`<|python_tag|>` Llama 3 may write `NAME.call(KEY="value")`, too.
(https://www.llama.com/docs/model-cards-and-prompt-formats/llama3_1)

`localkv.loader.answer_tags` turns gpt-oss's messages into Hermes' calls before anybody reads the
text, so only the grammar follows what the model itself writes.
(https://cookbook.openai.com/articles/openai-harmony)
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Sequence

from localkv.tool_calls.family import (
    CallRules,
    Family,
    Term,
    after,
    any_call,
    arguments_of,
    everything_between,
    quoted,
    text_rule,
)
from localkv.tool_calls.source import Source, Steps
from localkv.tool_calls.tools import Tool, Tools

_NAMES = ("name", "tool_name")
_ARGUMENTS = ("arguments", "parameters", "args")
_OTHERS = ("id", "type", "index")


def json_call(
    source: Source, accepts: Callable[[str], bool] = bool, *, is_marked: bool = True
) -> Steps[bool]:
    """Take a call, whose arguments are handed on as they come if the name is there before them.

    Args:
        source: at the call's brace.
        accepts: whether a tool may have this name.
        is_marked: something said that this is a call; else it is none once a member says so.

    Returns:
        whether it is one. If not, the source is where it was, unless the call has begun: then it is
        ended where it ceases to be one.
    """
    begin, name, held, has_begun = source.at, "", "{}", False

    def begin_call() -> bool:
        nonlocal has_begun
        if not name or not accepts(name):
            return False
        source.begin_call(name)
        has_begun = True
        return True

    def members() -> Steps[bool]:
        nonlocal name, held
        if not (yield from source.follows("{")):
            return False
        while True:
            yield from source.spaces()
            key = yield from source.string()
            yield from source.spaces()
            if key is None or not (yield from source.follows(":")):
                return False
            yield from source.spaces()
            if not (is_marked or key in _NAMES + _ARGUMENTS + _OTHERS):
                return False
            if key in _NAMES and not name:
                name = (yield from source.string()) or ""
                if not name or not accepts(name):
                    return False
            elif key in _ARGUMENTS and not has_begun and name and (yield from source.peek()) == "{":
                if not begin_call():
                    return False
                if (yield from source.value(source.argue)) is None:
                    return False
            else:
                value = yield from source.value()
                if value is None:
                    return False
                if key in _ARGUMENTS and not has_begun:
                    held = _object(value)
            yield from source.spaces()
            if (yield from source.follows("}")):
                return True
            if not (yield from source.follows(",")):
                return False

    is_whole = yield from members()
    if is_whole and not has_begun:
        is_whole = held != "" and begin_call()
        if is_whole:
            source.argue(held)
    if has_begun:
        source.end_call(is_whole=is_whole)
        return True
    source.at = begin
    return False


def json_calls_in_list(source: Source, accepts: Callable[[str], bool] = bool) -> Steps[bool]:
    """Take a call, or a list of them, as far as they are calls; False if there is none.

    Args:
        source: at the bracket or the brace.
        accepts: as of `json_call`.
    """
    is_list, n_calls = (yield from source.follows("[")), source.n_calls
    while True:
        yield from source.spaces()
        if not (yield from json_call(source, accepts)):
            break
        yield from source.spaces()
        if not (yield from source.follows(",")):
            break
    at = source.at
    if is_list and source.n_calls > n_calls:
        yield from source.spaces()
        if not (yield from source.follows("]")):
            source.at = at
    return source.n_calls > n_calls


def _object(value: str) -> str:
    """Arguments as the text of an object: also of a string that holds one; "" if they are none."""
    parsed = json.loads(value, strict=False)
    if isinstance(parsed, str):
        value = parsed
        try:
            parsed = json.loads(parsed)
        except (ValueError, RecursionError):
            return ""
    if parsed is None:
        return "{}"
    return value if isinstance(parsed, dict) else ""


HERMES_OPEN, HERMES_CLOSE = "<tool_call>", "</tool_call>"
_TAG, _FENCE, _FUNCTIONS = "<|python_tag|>", "```", "functools"
_FENCED = ("json", "tool_call", "tool_code", "")


def _parse_unmarked(source: Source, tools: Tools) -> Steps[None]:
    """Take all of a text."""
    begin = source.at
    yield from source.spaces()
    if not (yield from _calls(source, tools)):
        source.at = begin
    while mark := (yield from source.text_up_to(_TAG, _FENCE, HERMES_OPEN, _FUNCTIONS)):
        at, n_calls = source.at, source.n_calls
        if mark == _FENCE:
            found = yield from _fenced(source, tools)
        else:
            found = yield from _calls(source, tools)
        if mark == HERMES_OPEN:
            yield from after(source, *(HERMES_CLOSE,) * found)
        elif mark == _TAG and not found:
            found = yield from _python(source, tools)
        if not found and source.n_calls == n_calls:
            source.at = at
            source.say(mark)


def _calls(source: Source, tools: Tools) -> Steps[bool]:
    """Take calls that follow each other, or a list of them; False if there is none."""
    begin, n_calls = source.at, source.n_calls
    yield from source.spaces()
    is_list = yield from source.follows("[")
    yield from source.spaces()
    while (yield from source.peek()) == "{" and (
        yield from json_call(source, tools.has, is_marked=False)
    ):
        at = source.at
        yield from source.spaces()
        if not (yield from source.follows("," if is_list else ";")):
            source.at = at
        at = source.at
        yield from source.spaces()
        if (yield from source.peek()) != "{":
            source.at = at
    if source.n_calls == n_calls:
        source.at = begin
        return False
    if is_list:
        yield from after(source, "]")
    return True


def _fenced(source: Source, tools: Tools) -> Steps[bool]:
    for name in _FENCED:
        if (yield from source.follows(name)):
            break
    if not (yield from _calls(source, tools)):
        return False
    yield from after(source, _FENCE)
    return True


def _python(source: Source, tools: Tools) -> Steps[bool]:
    """A call of a built-in tool as code, which is all of the rest."""
    while not source.is_all:
        yield
    try:
        call = ast.parse(source.text[source.at :].strip(), mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            return False
        function = call.func
        if isinstance(function, ast.Attribute) and function.attr == "call":
            function = function.value
        values = {one.arg: ast.literal_eval(one.value) for one in call.keywords if one.arg}
        arguments = json.dumps(values, ensure_ascii=False)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return False
    if not isinstance(function, ast.Name) or not tools.has(function.id):
        return False
    source.at = len(source.text)
    source.begin_call(function.id)
    source.argue(arguments)
    source.end_call(is_whole=True)
    return True


def json_calls(
    tools: Sequence[Tool], key: str = "arguments", *, name_key: str = "name", id_key: str = ""
) -> tuple[str, list[str]]:
    """A call as a JSON object: the term, and the rules that it names.

    Args:
        key: of the arguments.
        name_key: of the name.
        id_key: of a number before it, if there is one.
    """
    rules, before = [], quoted("{")
    if id_key:
        id_begin, id_end = quoted(f'{{"{id_key}": "'), quoted('", ')
        before = f"{id_begin} /[0-9]{{1,3}}/ {id_end}"
    for i, tool in enumerate(tools):
        begin = f'"{name_key}": {json.dumps(tool.name, ensure_ascii=False)}, "{key}": '
        rules.append(f'call_{i}: {before} {quoted(begin)} {arguments_of(tool)} "}}"')
    return any_call(tools), rules


def _llama_rules(tools: Sequence[Tool], term: Term) -> CallRules:
    calls, rules = json_calls(tools, "parameters")
    return CallRules("", calls, f'{calls} ("; " {calls})*', rules)


def _generic_rules(tools: Sequence[Tool], term: Term) -> CallRules:
    calls, rules = json_calls(tools)
    return CallRules("", calls, f'{calls} ("\\n" {calls})*', rules)


LLAMA3 = Family("llama3", _parse_unmarked, _llama_rules)
GENERIC = Family("generic", _parse_unmarked, _generic_rules)
"""For templates that show no syntax of their own, Gemma 3's among them."""


def _parse_hermes(source: Source, tools: Tools) -> Steps[None]:
    """Take all of a text."""

    def call() -> Steps[bool]:
        yield from source.spaces()
        if not (yield from json_call(source)):
            return False
        yield from after(source, HERMES_CLOSE)
        return True

    yield from everything_between(source, HERMES_OPEN, call)


def _hermes_rules(tools: Sequence[Tool], term: Term) -> CallRules:
    calls, rules = json_calls(tools)
    one = f'"\\n" {calls} "\\n" {term(HERMES_CLOSE)}'
    many = f'one_call ("\\n" {term(HERMES_OPEN)} one_call)*'
    return CallRules(HERMES_OPEN, "one_call", many, [*rules, f"one_call: {one}"])


HERMES = Family("hermes", _parse_hermes, _hermes_rules)


def _harmony_rules(tools: Sequence[Tool], term: Term) -> CallRules:
    channel, message, start = term("<|channel|>"), term("<|message|>"), term("<|start|>")
    rules = [
        f"call_{i}: {quoted(f'commentary to=functions.{tool.name} ')} {term('<|constrain|>')} "
        f'"json" {message} {arguments_of(tool)}'
        for i, tool in enumerate(tools)
    ]
    rules += [
        text_rule("thinking", "<|end|>", term),
        f'thought: {channel} "analysis" {message} thinking {start} "assistant"',
    ]
    calls = any_call(tools)
    return CallRules("<|channel|>", calls, calls, rules, before="thought?")


HARMONY = Family("harmony", _parse_hermes, _harmony_rules)


COMMAND_ACTION, COMMAND_ACTION_END = "<|START_ACTION|>", "<|END_ACTION|>"
COMMAND_R_ACTION = "Action:"


def _parse_command(source: Source, tools: Tools) -> Steps[None]:
    """Take all of a text."""

    def calls() -> Steps[bool]:
        yield from source.spaces()
        if not (yield from json_calls_in_list(source)):
            return False
        yield from after(source, COMMAND_ACTION_END)
        return True

    yield from everything_between(source, COMMAND_ACTION, calls)


def _parse_command_r(source: Source, tools: Tools) -> Steps[None]:
    """Take all of a text in the older form. `directly-answer` is no tool, so it makes no call."""

    def calls() -> Steps[bool]:
        yield from source.spaces()
        if not (yield from source.follows(f"{_FENCE}json")):
            return False
        yield from source.spaces()
        if not (yield from json_calls_in_list(source, tools.has)):
            return False
        yield from after(source, _FENCE)
        return True

    yield from everything_between(source, COMMAND_R_ACTION, calls)


def _command_rules(tools: Sequence[Tool], term: Term) -> CallRules:
    calls, rules = json_calls(tools, "parameters", name_key="tool_name", id_key="tool_call_id")
    end = term(COMMAND_ACTION_END)
    many = f'"[" {calls} (", " {calls})* "]" {end}'
    return CallRules(COMMAND_ACTION, f'"[" {calls} "]" {end}', many, rules)


def _command_r_rules(tools: Sequence[Tool], term: Term) -> CallRules:
    calls, rules = json_calls(tools, "parameters", name_key="tool_name")
    begin, end = '"\\n```json\\n["', '"]\\n```"'
    many = f'{begin} {calls} (", " {calls})* {end}'
    return CallRules(COMMAND_R_ACTION, f"{begin} {calls} {end}", many, rules)


COMMAND = Family("command", _parse_command, _command_rules)
COMMAND_R = Family("command-r", _parse_command_r, _command_r_rules)
