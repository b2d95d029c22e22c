"""DeepSeek's calls: `<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>` (V3.1), and
`function<｜tool▁sep｜>NAME` with the arguments in a fence (V3, R1)."""

from __future__ import annotations

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

CALLS, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEP, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_KIND, _FENCE = "function", "```"


def parse(source: Source, tools: Tools) -> Steps[None]:
    """Take all of a text, in either form."""
    yield from calls_in_sections(source, CALLS, CALL, lambda: _call(source), CALLS_END)


def _call(source: Source) -> Steps[bool]:
    name = yield from source.up_to((SEP,), MOST_NAME)
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
    yield from after(source, _FENCE, CALL_END)
    return True


def _rules(tools: Sequence[Tool], term: Term) -> CallRules:
    return _rules_of(tools, term, lambda name: f"{quoted(name)} {term(SEP)}", "")


def _fenced_rules(tools: Sequence[Tool], term: Term) -> CallRules:
    def head(name: str) -> str:
        begin = quoted(f"{name}\n{_FENCE}json\n")
        return f"{quoted(_KIND)} {term(SEP)} {begin}"

    return _rules_of(tools, term, head, quoted(f"\n{_FENCE}"))


def _rules_of(tools: Sequence[Tool], term: Term, head: object, tail: str) -> CallRules:
    assert callable(head)
    rules = [
        f"call_{i}: {term(CALL)} {head(tool.name)} {arguments_of(tool)} {tail} {term(CALL_END)}"
        for i, tool in enumerate(tools)
    ]
    calls, end = any_call(tools), term(CALLS_END)
    return CallRules(CALLS, f"{calls} {end}", f'{calls} ("\\n"? {calls})* {end}', rules)


DEEPSEEK = Family("deepseek", parse, _rules)
DEEPSEEK_FENCED = Family("deepseek-fenced", parse, _fenced_rules)
