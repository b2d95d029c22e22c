"""Kimi K2: `<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}<|tool_call_end|>`
in a section of calls.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from localkv.tool_calls.family import (
    MOST_NAME,
    CallRules,
    Family,
    Term,
    after,
    any_call,
    arguments_of,
    call_of_object,
    calls_in_sections,
    quoted,
)
from localkv.tool_calls.source import Source, Steps
from localkv.tool_calls.tools import Tool, Tools

CALLS, CALLS_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, ARGUMENTS, CALL_END = (
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
)
_ID = re.compile(r"(?:functions\.)?([^\s:]+)(?::\d+)?")


def parse(source: Source, tools: Tools) -> Steps[None]:
    """Take all of a text."""
    yield from calls_in_sections(source, CALLS, CALL, lambda: _call(source), CALLS_END)


def _call(source: Source) -> Steps[bool]:
    id = yield from source.up_to((ARGUMENTS,), MOST_NAME)
    named = None if id is None else _ID.fullmatch(id.strip())
    yield from source.spaces()
    if named is None or (yield from source.peek()) != "{":
        return False
    yield from call_of_object(source, named[1])
    yield from after(source, CALL_END)
    return True


def _rules(tools: Sequence[Tool], term: Term) -> CallRules:
    rules = [
        f"call_{i}: {term(CALL)} {quoted(f'functions.{tool.name}:')} /[0-9]{{1,3}}/ "
        f"{term(ARGUMENTS)} {arguments_of(tool)} {term(CALL_END)}"
        for i, tool in enumerate(tools)
    ]
    calls, end = any_call(tools), term(CALLS_END)
    return CallRules(CALLS, f"{calls} {end}", f"{calls}+ {end}", rules)


KIMI = Family("kimi", parse, _rules)
