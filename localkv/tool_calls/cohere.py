"""Command R7B, A and later: a list of `{"tool_call_id", "tool_name", "parameters"}` between marks.

Command R and R+ write a list without ids in a fence, after `Action:`.
"""

from __future__ import annotations

from collections.abc import Sequence

from localkv.tool_calls.family import CallRules, Family, Term, after, everything_between, json_calls
from localkv.tool_calls.json_call import json_calls_in_list
from localkv.tool_calls.source import Source, Steps
from localkv.tool_calls.tools import Tool, Tools

ACTION, ACTION_END = "<|START_ACTION|>", "<|END_ACTION|>"
FENCED, _FENCE = "Action:", "```"


def parse(source: Source, tools: Tools) -> Steps[None]:
    """Take all of a text."""

    def calls() -> Steps[bool]:
        yield from source.spaces()
        if not (yield from json_calls_in_list(source)):
            return False
        yield from after(source, ACTION_END)
        return True

    yield from everything_between(source, ACTION, calls)


def parse_fenced(source: Source, tools: Tools) -> Steps[None]:
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

    yield from everything_between(source, FENCED, calls)


def _rules(tools: Sequence[Tool], term: Term) -> CallRules:
    calls, rules = json_calls(tools, "parameters", name_key="tool_name", id_key="tool_call_id")
    end = term(ACTION_END)
    many = f'"[" {calls} (", " {calls})* "]" {end}'
    return CallRules(ACTION, f'"[" {calls} "]" {end}', many, rules)


def _fenced_rules(tools: Sequence[Tool], term: Term) -> CallRules:
    calls, rules = json_calls(tools, "parameters", name_key="tool_name")
    begin, end = '"\\n```json\\n["', '"]\\n```"'
    many = f'{begin} {calls} (", " {calls})* {end}'
    return CallRules(FENCED, f"{begin} {calls} {end}", many, rules)


COMMAND = Family("command", parse, _rules)
COMMAND_R = Family("command-r", parse_fenced, _fenced_rules)
