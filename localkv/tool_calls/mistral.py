"""`[TOOL_CALLS]`: Mistral's calls, as a JSON list, or `NAME[ARGS]{...}` each after a mark.

Ids are nine letters and digits. (mistral-common; Mistral Small 3.2's form has `[CALL_ID]`, too.)
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from localkv.tool_calls.family import (
    MOST_NAME,
    CallRules,
    Family,
    Term,
    any_call,
    arguments_of,
    call_of_object,
    everything_between,
    json_calls,
    quoted,
)
from localkv.tool_calls.json_call import json_calls_in_list
from localkv.tool_calls.source import Source, Steps
from localkv.tool_calls.tools import Tool, Tools

CALLS, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


def parse(source: Source, tools: Tools) -> Steps[None]:
    """Take all of a text, in either form."""

    def call() -> Steps[bool]:
        yield from source.spaces()
        if (yield from source.peek()) in ("[", "{"):
            return (yield from json_calls_in_list(source))
        return (yield from _named(source))

    yield from everything_between(source, CALLS, call)


def _named(source: Source) -> Steps[bool]:
    name = yield from source.up_to((ARGS, "{"), MOST_NAME)
    if name is None:
        return False
    name = name.partition(CALL_ID)[0].strip()
    if source.text[source.at - 1] == "{":
        source.at -= 1
    yield from source.spaces()
    if not name or (yield from source.peek()) != "{":
        return False
    yield from call_of_object(source, name)
    return True


def _list_rules(tools: Sequence[Tool], term: Term) -> CallRules:
    calls, rules = json_calls(tools)
    return CallRules(CALLS, f'"[" {calls} "]"', f'"[" {calls} (", " {calls})* "]"', rules)


def _named_rules(tools: Sequence[Tool], term: Term, *, has_id: bool) -> CallRules:
    id = f"{term(CALL_ID)} /[a-zA-Z0-9]{{9}}/ " if has_id else ""
    rules = [
        f"call_{i}: {quoted(tool.name)} {id}{term(ARGS)} {arguments_of(tool)}"
        for i, tool in enumerate(tools)
    ]
    calls = any_call(tools)
    return CallRules(CALLS, calls, f"{calls} ({term(CALLS)} {calls})*", rules)


MISTRAL_LIST = Family("mistral", parse, _list_rules, id_size=9)
MISTRAL = Family("mistral-args", parse, partial(_named_rules, has_id=False), id_size=9)
MISTRAL_ID = Family("mistral-call-id", parse, partial(_named_rules, has_id=True), id_size=9)
