"""Calls as a name and a JSON object of arguments: DeepSeek's, Kimi's and Mistral's.

| Family | What it writes |
|---|---|
| DeepSeek V3.1 | `<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>` |
| DeepSeek V3, R1 | `function<｜tool▁sep｜>NAME` there, and the arguments in a fence |
| Kimi K2 | `<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}` |
| Mistral | `[TOOL_CALLS]NAME[ARGS]{...}`, or `[TOOL_CALLS]` and a JSON list |

DeepSeek and Kimi put calls in a section. Mistral's ids are nine letters and digits, and Mistral
Small 3.2 writes `[CALL_ID]` with the id before `[ARGS]` (mistral-common).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial

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
    everything_between,
    quoted,
)
from localkv.tool_calls.json_object import json_calls, json_calls_in_list
from localkv.tool_calls.source import Source, Steps
from localkv.tool_calls.tools import Tool, Tools

DEEPSEEK_CALLS, DEEPSEEK_CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
DEEPSEEK_CALL, DEEPSEEK_CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
DEEPSEEK_SEP, _KIND, _FENCE = "<｜tool▁sep｜>", "function", "```"


def _parse_deepseek(source: Source, tools: Tools) -> Steps[None]:
    """Take all of a text, in either form."""
    yield from calls_in_sections(
        source, DEEPSEEK_CALLS, DEEPSEEK_CALL, lambda: _deepseek_call(source), DEEPSEEK_CALLS_END
    )


def _deepseek_call(source: Source) -> Steps[bool]:
    name = yield from source.up_to((DEEPSEEK_SEP,), MOST_NAME)
    if name is None:
        return False
    if name.strip() == _KIND:
        at = source.at
        name = yield from source.up_to((_FENCE,), MOST_NAME)
        if name is None or "\n" not in name or "{" in name:
            source.at, name = at, _KIND
        else:
            yield from source.follows("json")
    yield from source.spaces()
    if not name.strip() or (yield from source.peek()) != "{":
        return False
    yield from call_of_object(source, name.strip())
    yield from after(source, _FENCE, DEEPSEEK_CALL_END)
    return True


def _deepseek_rules(tools: Sequence[Tool], term: Term) -> CallRules:
    return _deepseek_rules_of(tools, term, lambda name: f"{quoted(name)} {term(DEEPSEEK_SEP)}", "")


def _deepseek_fenced_rules(tools: Sequence[Tool], term: Term) -> CallRules:
    def head(name: str) -> str:
        begin = quoted(f"{name}\n{_FENCE}json\n")
        return f"{quoted(_KIND)} {term(DEEPSEEK_SEP)} {begin}"

    return _deepseek_rules_of(tools, term, head, quoted(f"\n{_FENCE}"))


def _deepseek_rules_of(
    tools: Sequence[Tool], term: Term, head: Callable[[str], str], tail: str
) -> CallRules:
    begin, end = term(DEEPSEEK_CALL), term(DEEPSEEK_CALL_END)
    rules = [
        f"call_{i}: {begin} {head(tool.name)} {arguments_of(tool)} {tail} {end}"
        for i, tool in enumerate(tools)
    ]
    calls, end = any_call(tools), term(DEEPSEEK_CALLS_END)
    return CallRules(DEEPSEEK_CALLS, f"{calls} {end}", f'{calls} ("\\n"? {calls})* {end}', rules)


DEEPSEEK = Family("deepseek", _parse_deepseek, _deepseek_rules)
DEEPSEEK_FENCED = Family("deepseek-fenced", _parse_deepseek, _deepseek_fenced_rules)


KIMI_CALLS, KIMI_CALLS_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
KIMI_CALL, KIMI_ARGUMENTS, KIMI_CALL_END = (
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
)
_KIMI_ID = re.compile(r"(?:functions\.)?([^\s:]+)(?::\d+)?")


def _parse_kimi(source: Source, tools: Tools) -> Steps[None]:
    """Take all of a text."""
    yield from calls_in_sections(
        source, KIMI_CALLS, KIMI_CALL, lambda: _kimi_call(source), KIMI_CALLS_END
    )


def _kimi_call(source: Source) -> Steps[bool]:
    id = yield from source.up_to((KIMI_ARGUMENTS,), MOST_NAME)
    named = None if id is None else _KIMI_ID.fullmatch(id.strip())
    yield from source.spaces()
    if named is None or (yield from source.peek()) != "{":
        return False
    yield from call_of_object(source, named[1])
    yield from after(source, KIMI_CALL_END)
    return True


def _kimi_rules(tools: Sequence[Tool], term: Term) -> CallRules:
    rules = [
        f"call_{i}: {term(KIMI_CALL)} {quoted(f'functions.{tool.name}:')} /[0-9]{{1,3}}/ "
        f"{term(KIMI_ARGUMENTS)} {arguments_of(tool)} {term(KIMI_CALL_END)}"
        for i, tool in enumerate(tools)
    ]
    calls, end = any_call(tools), term(KIMI_CALLS_END)
    return CallRules(KIMI_CALLS, f"{calls} {end}", f"{calls}+ {end}", rules)


KIMI = Family("kimi", _parse_kimi, _kimi_rules)


MISTRAL_CALLS, MISTRAL_CALL_ID, MISTRAL_ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


def _parse_mistral(source: Source, tools: Tools) -> Steps[None]:
    """Take all of a text, in either form."""

    def call() -> Steps[bool]:
        yield from source.spaces()
        if (yield from source.peek()) in ("[", "{"):
            return (yield from json_calls_in_list(source))
        return (yield from _mistral_call(source))

    yield from everything_between(source, MISTRAL_CALLS, call)


def _mistral_call(source: Source) -> Steps[bool]:
    name = yield from source.up_to((MISTRAL_ARGS, "{"), MOST_NAME)
    if name is None:
        return False
    name = name.partition(MISTRAL_CALL_ID)[0].strip()
    if source.text[source.at - 1] == "{":
        source.at -= 1
    yield from source.spaces()
    if not name or (yield from source.peek()) != "{":
        return False
    yield from call_of_object(source, name)
    return True


def _mistral_list_rules(tools: Sequence[Tool], term: Term) -> CallRules:
    calls, rules = json_calls(tools)
    return CallRules(MISTRAL_CALLS, f'"[" {calls} "]"', f'"[" {calls} (", " {calls})* "]"', rules)


def _mistral_rules(tools: Sequence[Tool], term: Term, *, has_id: bool) -> CallRules:
    id = f"{term(MISTRAL_CALL_ID)} /[a-zA-Z0-9]{{9}}/ " if has_id else ""
    rules = [
        f"call_{i}: {quoted(tool.name)} {id}{term(MISTRAL_ARGS)} {arguments_of(tool)}"
        for i, tool in enumerate(tools)
    ]
    calls = any_call(tools)
    return CallRules(MISTRAL_CALLS, calls, f"{calls} ({term(MISTRAL_CALLS)} {calls})*", rules)


MISTRAL_LIST = Family("mistral", _parse_mistral, _mistral_list_rules, id_size=9)
MISTRAL = Family("mistral-args", _parse_mistral, partial(_mistral_rules, has_id=False), id_size=9)
MISTRAL_ID = Family(
    "mistral-call-id", _parse_mistral, partial(_mistral_rules, has_id=True), id_size=9
)
