"""Hermes' calls, `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, and gpt-oss's.

Hermes, Qwen 2.5 and 3 and Granite 4 write the former. gpt-oss writes messages to a recipient,
`<|channel|>commentary to=functions.NAME`. `localkv.loader.answer_tags` turns them into Hermes'
calls before anybody reads the text, so that only the grammar follows what the model itself writes.
(https://cookbook.openai.com/articles/openai-harmony)
"""

from __future__ import annotations

from collections.abc import Sequence

from localkv.tool_calls.family import (
    CallRules,
    Family,
    Term,
    after,
    any_call,
    arguments_of,
    everything_between,
    json_calls,
    quoted,
    text_rule,
)
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


HARMONY = Family("harmony", parse, _harmony_rules)
