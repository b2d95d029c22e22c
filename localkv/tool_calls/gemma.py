"""Gemma 4's calls: `<|tool_call>call:NAME{key:<|"|>text<|"|>,n:1}<tool_call|>`."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from localkv.tool_calls.family import (
    MOST_NAME,
    CallRules,
    Family,
    Term,
    after,
    alternatives,
    any_call,
    everything_between,
    quoted,
    text_rule,
)
from localkv.tool_calls.source import MOST_NESTED, Source, Steps
from localkv.tool_calls.tools import Tool, Tools

OPEN, CLOSE, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
_CALL = "call:"
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?")


def parse(source: Source, tools: Tools) -> Steps[None]:
    """Take all of a text."""

    def call() -> Steps[bool]:
        yield from source.spaces()
        if not (yield from source.follows(_CALL)):
            return False
        name = yield from source.up_to(("{",), MOST_NAME)
        if name is None or not name.strip():
            return False
        source.at -= 1
        source.begin_call(name.strip())
        source.end_call(is_whole=(yield from _value(source, 0)))
        yield from after(source, CLOSE)
        return True

    yield from everything_between(source, OPEN, call)


def _value(source: Source, depth: int) -> Steps[bool]:
    """Hand on a value as JSON; False where it is none."""
    if depth > MOST_NESTED:
        return False
    yield from source.spaces()
    if (yield from source.follows(QUOTE)):
        source.argue('"')
        is_whole = yield from source.streamed_up_to(QUOTE, lambda text: source.argue(_inner(text)))
        source.argue('"')
        return is_whole
    if (yield from source.follows("{")):
        return (yield from _members(source, depth))
    if (yield from source.follows("[")):
        return (yield from _items(source, depth))
    begin = source.at
    while (char := (yield from source.peek())) and char not in ",}]<{[":
        source.at += 1
    source.argue(_scalar(source.text[begin : source.at].strip()))
    return source.at > begin


def _members(source: Source, depth: int) -> Steps[bool]:
    source.argue("{")
    yield from source.spaces()
    if not (yield from source.follows("}")):
        while True:
            yield from source.spaces()
            key = yield from source.up_to((":",), MOST_NAME)
            if key is None:
                return False
            source.argue(json.dumps(key.strip().strip('"').replace(QUOTE, "")) + ": ")
            if not (yield from _value(source, depth + 1)):
                return False
            yield from source.spaces()
            if (yield from source.follows("}")):
                break
            if not (yield from source.follows(",")):
                return False
            source.argue(", ")
    source.argue("}")
    return True


def _items(source: Source, depth: int) -> Steps[bool]:
    source.argue("[")
    yield from source.spaces()
    if not (yield from source.follows("]")):
        while True:
            if not (yield from _value(source, depth + 1)):
                return False
            yield from source.spaces()
            if (yield from source.follows("]")):
                break
            if not (yield from source.follows(",")):
                return False
            source.argue(", ")
    source.argue("]")
    return True


def _scalar(text: str) -> str:
    """JSON of a value without marks: a number, true, false, null, or text."""
    if text in ("true", "false", "null") or _NUMBER.fullmatch(text):
        return text
    return json.dumps(text.strip('"'), ensure_ascii=False)


def _inner(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _rules(tools: Sequence[Tool], term: Term) -> CallRules:
    rules = [
        f"text: {term(QUOTE)} rest_of_text",
        text_rule("rest_of_text", QUOTE, term),
        "NUMBER: /-?(0|[1-9][0-9]*)(\\.[0-9]+)?/",
        'value: text | NUMBER | "true" | "false" | "null" | list | object',
        'list: "[" (value ("," value)*)? "]"',
        'object: "{" (KEY ":" value ("," KEY ":" value)*)? "}"',
        "KEY: /[a-zA-Z_][a-zA-Z0-9_-]*/",
    ]
    for i, tool in enumerate(tools):
        wanted = tool.parameters.get("required") or ()
        properties = tool.properties
        # the template writes keys in the order of the alphabet
        parts = [
            f"{quoted(key + ':')} {_rule_of(properties[key], tool, key)}"
            for key in sorted(properties)
        ]
        rules += _members_rules(f"m{i}", parts, [key in wanted for key in sorted(properties)])
        head = quoted(f"{_CALL}{tool.name}{{")
        rules.append(f'call_{i}: {head} m{i}_none_0 "}}" {term(CLOSE)}')
    calls = any_call(tools)
    return CallRules(OPEN, calls, f"{calls} ({term(OPEN)} {calls})*", rules)


def _rule_of(schema: object, tool: Tool, key: str) -> str:
    types = tool.types_of(key)
    if isinstance(schema, dict) and "enum" in schema:
        return "value"
    names = {
        "string": "text",
        "integer": "NUMBER",
        "number": "NUMBER",
        "boolean": '("true" | "false")',
        "array": "list",
        "object": "object",
        "null": '"null"',
    }
    if not types or not types <= set(names):
        return "value"
    return alternatives(sorted({names[one] for one in types}))


def _members_rules(name: str, parts: Sequence[str], are_wanted: Sequence[bool]) -> list[str]:
    """Rules for members with commas between those that are there; the first is `name_none_0`.

    Of each place there are two: with a member before it, and with none.
    """
    rules = []
    for i, (part, wanted) in enumerate(zip(parts, are_wanted, strict=True)):
        for before, comma in (("some", '"," '), ("none", "")):
            left_out = "" if wanted else f" | {name}_{before}_{i + 1}"
            rules.append(f"{name}_{before}_{i}: {comma}{part} {name}_some_{i + 1}{left_out}")
    return [*rules, *(f'{name}_{before}_{len(parts)}: ""' for before in ("some", "none"))]


GEMMA4 = Family("gemma4", parse, _rules)
