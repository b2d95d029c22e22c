"""`<function=NAME><parameter=KEY>VALUE</parameter></function>`: Qwen3-Coder, Qwen 3.5.

Values are plain text. The tool's schema says which of them are JSON.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from localkv.tool_calls.family import (
    CallRules,
    Family,
    Term,
    after,
    alternatives,
    json_of,
    quoted,
    text_rule,
)
from localkv.tool_calls.source import Source, Steps
from localkv.tool_calls.tools import Tool, Tools

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
MOST_NAME, MOST_VALUE = 200, 10_000_000


def parse(source: Source, tools: Tools) -> Steps[None]:
    """Take all of a text."""
    while mark := (yield from source.text_up_to(OPEN, _FUNCTION)):
        at, n_calls = source.at, source.n_calls
        yield from source.spaces()
        is_function = mark == _FUNCTION or (yield from source.follows(_FUNCTION))
        if is_function and (yield from _call(source, tools)):
            if mark == OPEN:
                yield from after(source, CLOSE)
        elif source.n_calls == n_calls:
            source.at = at
            source.say(mark)


def _call(source: Source, tools: Tools) -> Steps[bool]:
    name = yield from source.up_to((">",), MOST_NAME)
    if not name or any(char in name for char in '<"\n'):
        return False
    source.begin_call(name)
    source.argue("{")
    separator, is_whole = "", True
    while True:
        yield from source.spaces()
        if not (yield from source.follows(_PARAMETER)):
            break
        key = yield from source.up_to((">",), MOST_NAME)
        if key is None:
            is_whole = False
            break
        source.argue(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
        separator = ", "
        if not (yield from _value(source, tools.types_of(name, key))):
            is_whole = False
            break
    if is_whole:
        yield from after(source, _FUNCTION_END)
        source.argue("}")
    source.end_call(is_whole=is_whole)
    return True


def _value(source: Source, types: frozenset[str]) -> Steps[bool]:
    """Hand on a value as JSON; False if it does not end."""
    yield from source.follows("\n")
    if types == {"string"}:
        held = ""

        def take(piece: str) -> None:
            nonlocal held
            text = held + piece
            held = "\n" if text.endswith("\n") else ""
            source.argue(_escaped(text.removesuffix("\n")))

        source.argue('"')
        is_whole = yield from source.streamed_up_to(_PARAMETER_END, take)
        source.argue('"')
        return is_whole
    text = yield from source.up_to((_PARAMETER_END,), MOST_VALUE)
    if text is not None:
        source.argue(_typed(text.removesuffix("\n"), types))
    return text is not None


def _typed(text: str, types: frozenset[str]) -> str:
    """JSON of a value that may be text or JSON."""
    try:
        value = json.loads(text)
        as_json = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        lowered = text.strip().lower()
        if lowered in ("true", "false") and "boolean" in types:
            return lowered
        if lowered == "none" and "null" in types:
            return "null"
        return json.dumps(text, ensure_ascii=False)
    if "string" in types and _kind(value) not in types:
        return json.dumps(text, ensure_ascii=False)
    return as_json


def _kind(value: object) -> str:
    kinds = {bool: "boolean", int: "integer", float: "number", str: "", list: "array"}
    return "null" if value is None else kinds.get(type(value), "object")


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _rules(tools: Sequence[Tool], term: Term) -> CallRules:
    rules = [text_rule("text_value", _PARAMETER_END, term)]
    end = quoted(f"\n{_PARAMETER_END}\n")
    for i, tool in enumerate(tools):
        required = tool.parameters.get("required") or ()
        parts = []
        for key, schema in tool.properties.items():
            head = quoted(f"{_PARAMETER}{key}>\n")
            if tool.types_of(key) == {"string"} and "enum" not in schema:
                part = f'{head} text_value "\\n"'
            elif tool.types_of(key) == {"string"}:
                values = alternatives([quoted(str(one)) for one in schema["enum"]])
                part = f"{head} {values} {end}"
            else:
                defs = {k: v for k, v in tool.parameters.items() if k in ("$defs", "definitions")}
                part = f"{head} {json_of({**defs, **schema})} {end}"
            parts.append(part if key in required else f"({part})?")
        head = quoted(f"\n{_FUNCTION}{tool.name}>\n")
        tail = quoted(f"{_FUNCTION_END}\n")
        rules.append(f"call_{i}: {head} {' '.join(parts)} {tail}")
    calls = alternatives([f"call_{i}" for i in range(len(tools))])
    rules.append(f"one_call: {calls} {term(CLOSE)}")
    return CallRules(OPEN, "one_call", f'one_call ("\\n" {term(OPEN)} one_call)*', rules)


QWEN_CODER = Family("qwen3-coder", parse, _rules)
