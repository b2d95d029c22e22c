"""`<function=NAME><parameter=KEY>VALUE</parameter></function>`: Qwen3-Coder, Qwen 3.5, Seed-OSS.

Seed-OSS writes them between marks of its own, with values that are in no line alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from localkv.tool_calls.family import (
    MOST_NAME,
    CallRules,
    Family,
    Term,
    after,
    any_call,
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

_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"


def xml_family(name: str, mark: str, mark_end: str, *, in_lines: bool) -> Family:
    """A family that writes calls so.

    Args:
        mark, mark_end: what is around a call.
        in_lines: values are in lines of their own.
    """
    return Family(name, _parse(mark, mark_end, in_lines), _rules(mark, mark_end, in_lines))


def _parse(mark: str, mark_end: str, in_lines: bool) -> Callable[[Source, Tools], Steps[None]]:
    def parse(source: Source, tools: Tools) -> Steps[None]:
        while found := (yield from source.text_up_to(mark, _FUNCTION)):
            at, n_calls = source.at, source.n_calls
            yield from source.spaces()
            is_function = found == _FUNCTION or (yield from source.follows(_FUNCTION))
            if is_function and (yield from _call(source, tools, in_lines)):
                if found == mark:
                    yield from after(source, mark_end)
            elif source.n_calls == n_calls:
                source.at = at
                source.say(found)

    return parse


def _call(source: Source, tools: Tools, in_lines: bool) -> Steps[bool]:
    name = yield from source.up_to((">",), MOST_NAME)
    if not name or any(char in name for char in '<"\n'):
        return False

    def argument() -> Steps[Argument | None]:
        if not (yield from source.follows(_PARAMETER)):
            return None
        key = yield from source.up_to((">",), MOST_NAME)
        return Argument(key, tools.types_of(name, key)) if key else BROKEN_OFF

    yield from tagged_call(source, name, argument, _PARAMETER_END, _FUNCTION_END, in_lines=in_lines)
    return True


def _rules(mark: str, mark_end: str, in_lines: bool) -> Callable[[Sequence[Tool], Term], CallRules]:
    line = "\n" if in_lines else ""

    def rules_of(tools: Sequence[Tool], term: Term) -> CallRules:
        def opening(key: str, is_text: bool) -> str:
            return quoted(f"{_PARAMETER}{key}>{line}")

        rules = [text_rule(TEXT_RULE, _PARAMETER_END, term)]
        tail = quoted(f"{_FUNCTION_END}\n")
        for i, tool in enumerate(tools):
            head = quoted(f"\n{_FUNCTION}{tool.name}>\n")
            given = argument_terms(tool, term, opening, _PARAMETER_END, in_lines=in_lines)
            rules.append(f"call_{i}: {head} {given} {tail}")
        calls = any_call(tools)
        rules.append(f"one_call: {calls} {term(mark_end)}")
        many = f'one_call ("\\n" {term(mark)} one_call)*'
        return CallRules(mark, "one_call", many, rules)

    return rules_of


QWEN_CODER = xml_family("qwen3-coder", "<tool_call>", "</tool_call>", in_lines=True)


SEED_OPEN, SEED_CLOSE = "<seed:tool_call>", "</seed:tool_call>"

SEED_OSS = xml_family("seed-oss", SEED_OPEN, SEED_CLOSE, in_lines=False)
