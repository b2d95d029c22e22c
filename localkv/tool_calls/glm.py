"""GLM 4.5 to 4.7: `<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>`.

Up to GLM 4.6 each tag is in a line of its own. Values are text, or JSON where the schema says so.
"""

from __future__ import annotations

from collections.abc import Sequence

from localkv.tool_calls.family import (
    MOST_NAME,
    CallRules,
    Family,
    Term,
    any_call,
    everything_between,
    quoted,
    text_rule,
)
from localkv.tool_calls.source import Source, Steps
from localkv.tool_calls.tagged_arguments import (
    BROKEN_OFF,
    TEXT_RULE,
    Argument,
    argument_terms,
    tagged_call,
)
from localkv.tool_calls.tools import Tool, Tools

OPEN, CLOSE = "<tool_call>", "</tool_call>"
KEY, KEY_END, VALUE, VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
_NOT_IN_NAMES = frozenset(' \n\t"{}[]:,')


def parse(source: Source, tools: Tools) -> Steps[None]:
    """Take all of a text."""
    yield from everything_between(source, OPEN, lambda: _call(source, tools))


def _call(source: Source, tools: Tools) -> Steps[bool]:
    name = yield from source.up_to(("<",), MOST_NAME)
    if name is None:
        return False
    source.at, name = source.at - 1, name.strip()
    if not name or _NOT_IN_NAMES & set(name):
        return False
    begin = source.at
    has_arguments = yield from source.follows(KEY)
    if not has_arguments and not (tools.has(name) and (yield from source.follows(CLOSE))):
        return False
    source.at = begin

    def argument() -> Steps[Argument | None]:
        if not (yield from source.follows(KEY)):
            return None
        key = yield from source.up_to((KEY_END,), MOST_NAME)
        if not key:
            return BROKEN_OFF
        yield from source.spaces()
        if not (yield from source.follows(VALUE)):
            return BROKEN_OFF
        return Argument(key, tools.types_of(name, key))

    yield from tagged_call(source, name, argument, VALUE_END, CLOSE)
    return True


def _rules(tools: Sequence[Tool], term: Term) -> CallRules:
    def opening(key: str, is_text: bool) -> str:
        return f'"\\n"? {term(KEY)} {quoted(key)} {term(KEY_END)} "\\n"? {term(VALUE)}'

    rules = [text_rule(TEXT_RULE, VALUE_END, term)]
    for i, tool in enumerate(tools):
        given = argument_terms(tool, term, opening, VALUE_END, between="")
        rules.append(f'call_{i}: {quoted(tool.name)} {given} "\\n"? {term(CLOSE)}')
    calls = any_call(tools)
    return CallRules(OPEN, calls, f'{calls} ("\\n"? {term(OPEN)} {calls})*', rules)


GLM = Family("glm", parse, _rules)
