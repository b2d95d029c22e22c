"""`<invoke name="NAME"><parameter name="KEY">VALUE</parameter></invoke>`, in a block of calls.

MiniMax M2 writes the block between `<minimax:tool_call>` tags, and the schema says what is JSON.
DeepSeek V3.2 and V4 write `<｜DSML｜invoke name="NAME">`, and each value says what it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from localkv.tool_calls.family import (
    MOST_NAME,
    CallRules,
    Family,
    Term,
    any_call,
    calls_in_sections,
    quoted,
    text_rule,
)
from localkv.tool_calls.source import Source, Steps
from localkv.tool_calls.tagged_arguments import (
    BROKEN_OFF,
    TEXT,
    TEXT_RULE,
    Argument,
    argument_terms,
    tagged_call,
)
from localkv.tool_calls.tools import Tool, Tools

_JSON = frozenset(("any",))
_STRING = {"true": TEXT, "false": _JSON}
"""What a value is by its attribute `string`."""


@dataclass(frozen=True)
class InvokeTags:
    """The tags of a family.

    Attributes:
        mark, mark_end: around all calls.
        prefix: what the names of the other tags begin with.
        says_string: a parameter says whether its value is text; else the tool's schema does.
    """

    mark: str
    mark_end: str
    prefix: str = ""
    says_string: bool = False

    def open(self, name: str) -> str:
        return f"<{self.prefix}{name}"

    def close(self, name: str) -> str:
        return f"</{self.prefix}{name}>"

    def family(self, name: str) -> Family:
        """The family that writes calls so."""
        return Family(name, self._parse, self._rules)

    def _parse(self, source: Source, tools: Tools) -> Steps[None]:
        mark = f'{self.open("invoke")} name="'
        yield from calls_in_sections(
            source, self.mark, mark, lambda: self._call(source, tools), self.mark_end
        )

    def _call(self, source: Source, tools: Tools) -> Steps[bool]:
        name = yield from source.up_to(('">',), MOST_NAME)
        if not name or any(char in name for char in '<"\n'):
            return False

        def argument() -> Steps[Argument | None]:
            if not (yield from source.follows(f'{self.open("parameter")} name="')):
                return None
            key = yield from source.up_to(('"',), MOST_NAME)
            said = yield from source.up_to((">",), MOST_NAME)
            if not key or said is None:
                return BROKEN_OFF
            value = said.strip().removeprefix('string="').removesuffix('"')
            return Argument(key, _STRING.get(value, tools.types_of(name, key)))

        closing, end = self.close("parameter"), self.close("invoke")
        yield from tagged_call(source, name, argument, closing, end)
        return True

    def _rules(self, tools: Sequence[Tool], term: Term) -> CallRules:
        tag = self._term(term)

        def opening(key: str, is_text: bool) -> str:
            said = f' string="{"true" if is_text else "false"}"' if self.says_string else ""
            named = f' name="{key}"{said}>'
            return f"{tag(self.open('parameter'))} {quoted(named)}"

        rules = [text_rule(TEXT_RULE, self.close("parameter"), tag)]
        for i, tool in enumerate(tools):
            named = f' name="{tool.name}">\n'
            head = f"{tag(self.open('invoke'))} {quoted(named)}"
            given = argument_terms(tool, tag, opening, self.close("parameter"))
            rules.append(f'call_{i}: {head} {given} {tag(self.close("invoke"))} "\\n"')
        calls = any_call(tools)
        one, many = (f'"\\n" {some} {tag(self.mark_end)}' for some in (calls, f"{calls}+"))
        return CallRules(self.mark, one, many, rules, mark_term=tag(self.mark))

    def _term(self, term: Term) -> Callable[[str], str]:
        """Terms of tags, in which the prefix may be a token of its own."""
        if not self.prefix or term(self.prefix) == quoted(self.prefix):
            return term

        def tag(text: str) -> str:
            before, found, behind = text.partition(self.prefix)
            return f"{quoted(before)} {term(self.prefix)} {quoted(behind)}" if found else term(text)

        return tag


MINIMAX_OPEN, MINIMAX_CLOSE = "<minimax:tool_call>", "</minimax:tool_call>"

MINIMAX = InvokeTags(MINIMAX_OPEN, MINIMAX_CLOSE).family("minimax")


DSML_PREFIX = "｜DSML｜"
DSML_MARK, DSML_V4_MARK = f"<{DSML_PREFIX}function_calls>", f"<{DSML_PREFIX}tool_calls>"


def _dsml_family(name: str, mark: str) -> Family:
    return InvokeTags(mark, mark.replace("<", "</"), DSML_PREFIX, says_string=True).family(name)


DSML, DSML_V4 = (
    _dsml_family("deepseek-dsml", DSML_MARK),
    _dsml_family("deepseek-dsml-v4", DSML_V4_MARK),
)
