"""`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen 2.5 and 3, Granite 4."""

from __future__ import annotations

from collections.abc import Sequence

from localkv.tool_calls.family import CallRules, Family, Term, after, everything_between, json_calls
from localkv.tool_calls.json_call import json_call
from localkv.tool_calls.source import Source, Steps
from localkv.tool_calls.tools import Tool, Tools

OPEN, CLOSE = "<tool_call>", "</tool_call>"


def parse(source: Source, tools: Tools) -> Steps[None]:
    """Take all of a text."""

    def call() -> Steps[bool]:
        yield from source.spaces()
        if not (yield from json_call(source)):
            return False
        yield from after(source, CLOSE)
        return True

    yield from everything_between(source, OPEN, call)


def _rules(tools: Sequence[Tool], term: Term) -> CallRules:
    calls, rules = json_calls(tools)
    one = f'"\\n" {calls} "\\n" {term(CLOSE)}'
    many = f'one_call ("\\n" {term(OPEN)} one_call)*'
    return CallRules(OPEN, "one_call", many, [*rules, f"one_call: {one}"])


HERMES = Family("hermes", parse, _rules)
