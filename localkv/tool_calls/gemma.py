"""Gemma 4's calls: `<|tool_call>call:NAME{key:<|"|>text<|"|>,n:1}<tool_call|>`."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

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
from localkv.tool_calls.tools import JSON_TYPES, Tool, Tools

GEMMA4_OPEN, CLOSE, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
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

    yield from everything_between(source, GEMMA4_OPEN, call)


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
        "INTEGER: /-?(0|[1-9][0-9]*)/",
        "NUMBER: /-?(0|[1-9][0-9]*)(\\.[0-9]+)?/",
        'value: text | NUMBER | "true" | "false" | "null" | list | object',
        'list: "[" (value ("," value)*)? "]"',
        'object: "{" (KEY ":" value ("," KEY ":" value)*)? "}"',
        "KEY: /[a-zA-Z_][a-zA-Z0-9_-]*/",
    ]
    for i, tool in enumerate(tools):
        written = _Written(tool, f"c{i}", term)
        forms = alternatives([written.members(form.properties, form.wanted) for form in tool.forms])
        head = quoted(f"{_CALL}{tool.name}")
        rules += [*written.rules, f"call_{i}: {head} {forms} {term(CLOSE)}"]
    calls = any_call(tools)
    return CallRules(GEMMA4_OPEN, calls, f"{calls} ({term(GEMMA4_OPEN)} {calls})*", rules)


class _Written:
    """The rules of a tool's arguments.

    Args:
        prefix: of the rules' names.

    Attributes:
        rules: they.
    """

    def __init__(self, tool: Tool, prefix: str, term: Term) -> None:
        self.rules = list[str]()
        self._tool = tool
        self._prefix = prefix
        self._term = term
        self._n_rules = 0
        self._of_definitions = dict[int, str]()

    def members(
        self, properties: Mapping[str, Any], wanted: Collection[str], depth: int = 0
    ) -> str:
        """The term of an object with these properties, and no others.

        The template writes keys in the order of the alphabet.
        """
        name, keys = self._name(), sorted(properties)
        parts = [f"{quoted(key + ':')} {self._value(properties[key], depth + 1)}" for key in keys]
        self.rules += _members_rules(name, parts, [key in wanted for key in keys])
        return f'"{{" {name}_none_0 "}}"'

    def _name(self) -> str:
        self._n_rules += 1
        return f"{self._prefix}_{self._n_rules}"

    def _value(self, schema: Any, depth: int) -> str:
        """The term of a value; any value if its schema has no term."""
        target = self._tool.resolved(schema)
        if not isinstance(target, Mapping) or depth > _DEEPEST:
            return "value"
        if target is schema:
            return self._own(target, depth)
        if id(target) not in self._of_definitions:
            name = self._of_definitions[id(target)] = self._name()
            self.rules.append(f"{name}: {self._own(target, depth)}")
        return self._of_definitions[id(target)]

    def _own(self, schema: Mapping[str, Any], depth: int) -> str:
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(values, list):
            return self._listed(values)
        several = schema.get("anyOf", schema.get("oneOf"))
        if isinstance(several, list) and several and "properties" not in schema:
            return alternatives(sorted({self._value(one, depth + 1) for one in several}))
        kinds = schema.get("type")
        kinds = [kinds] if isinstance(kinds, str) else kinds
        kinds = kinds if isinstance(kinds, list) else []
        if not kinds or not all(isinstance(one, str) and one in JSON_TYPES for one in kinds):
            return "value"
        return alternatives(sorted({self._typed(kind, schema, depth) for kind in kinds}))

    def _listed(self, values: Sequence[object]) -> str:
        """The term of listed values."""
        terms = list[str]()
        for value in values:
            if isinstance(value, str) and value and QUOTE not in value:
                terms.append(f"{self._term(QUOTE)} {quoted(value)} {self._term(QUOTE)}")
            elif isinstance(value, str | list | dict):
                return "value"
            else:
                terms.append(quoted(json.dumps(value)))
        return alternatives(terms) if terms else "value"

    def _typed(self, kind: str, schema: Mapping[str, Any], depth: int) -> str:
        properties, items = schema.get("properties"), schema.get("items")
        if kind == "object" and isinstance(properties, Mapping) and properties:
            wanted = schema.get("required")
            wanted = wanted if isinstance(wanted, list) else ()
            are_keys = all(_KEY.fullmatch(key) for key in properties)
            return self.members(properties, wanted, depth) if are_keys else "object"
        if kind == "array" and isinstance(items, Mapping):
            item = self._value(items, depth + 1)
            least, most = (schema.get(key) for key in ("minItems", "maxItems"))
            least = least if isinstance(least, int) and 0 < least <= _MOST_COUNTED else 0
            most = most if isinstance(most, int) and 0 <= most <= _MOST_COUNTED else None
            if most == 0:
                return '"[" "]"'
            others = f"{{{max(least - 1, 0)},{'' if most is None else most - 1}}}"
            some = f'{item} ("," {item}){others}'
            return f'"[" {some} "]"' if least else f'"[" ({some})? "]"'
        return _TERMS[kind]


_MOST_COUNTED, _DEEPEST = 1000, 40
_KEY = re.compile("[a-zA-Z_][a-zA-Z0-9_-]*")
_TERMS = {
    "string": "text",
    "integer": "INTEGER",
    "number": "NUMBER",
    "boolean": '("true" | "false")',
    "array": "list",
    "object": "object",
    "null": '"null"',
}


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
