"""Arguments between tags: a text, or JSON where the tool's schema or a mark says so.

| Family | What it writes |
|---|---|
| Qwen3-Coder, Qwen 3.5, Seed-OSS | `<function=NAME><parameter=KEY>VALUE</parameter>` |
| GLM 4.5 to 4.7 | `<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>` |
| MiniMax M2, DeepSeek V3.2, V4 | `<invoke name="NAME"><parameter name="KEY">VALUE</parameter>` |

Each closes its other tags, too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from localkv.errors import UsageError
from localkv.structured.schema import plain_schema
from localkv.tool_calls.family import (
    MOST_NAME,
    CallRules,
    Family,
    Term,
    after,
    alternatives,
    any_call,
    calls_in_sections,
    everything_between,
    json_of,
    quoted,
    text_rule,
)
from localkv.tool_calls.source import Source, Steps
from localkv.tool_calls.tools import Form, Tool, Tools

MOST_VALUE = 10_000_000
TEXT = frozenset(("string",))
"""The types of a value that is text in any case."""
TEXT_RULE = "text_value"
"""The name of the rule that `argument_terms` has for texts (`family.text_rule`)."""


class Argument(NamedTuple):
    """The beginning of an argument: its key, and the JSON types that its value may have.

    An empty key says that the text breaks off in it.
    """

    key: str
    types: frozenset[str] = frozenset()


BROKEN_OFF = Argument("")


def tagged_call(
    source: Source,
    name: str,
    argument: Callable[[], Steps[Argument | None]],
    closing: str,
    end: str,
    *,
    in_lines: bool = False,
) -> Steps[None]:
    """Hand on a call whose arguments are between tags, up to its end.

    Args:
        argument: takes the beginning of the next one; None if none follows.
        closing: the tag after a value.
        end: the tag after the call.
        in_lines: values are in lines of their own.
    """
    source.begin_call(name)
    is_whole = yield from _arguments(source, argument, closing, in_lines)
    source.end_call(is_whole=is_whole)
    if is_whole:
        yield from after(source, end)


def _arguments(
    source: Source, argument: Callable[[], Steps[Argument | None]], closing: str, in_lines: bool
) -> Steps[bool]:
    """Hand on the open call's arguments as a JSON object; False if they break off."""
    source.argue("{")
    separator = ""
    while True:
        yield from source.spaces()
        found = yield from argument()
        if found is None:
            source.argue("}")
            return True
        if not found.key:
            return False
        source.argue(f"{separator}{json.dumps(found.key, ensure_ascii=False)}: ")
        separator = ", "
        if in_lines:
            yield from source.follows("\n")
        if not (yield from _value(source, found.types, closing, "\n" if in_lines else "")):
            return False


def _value(source: Source, types: frozenset[str], closing: str, line_end: str) -> Steps[bool]:
    """Hand on a value as JSON; False if it does not end."""
    if types == TEXT:
        held = ""

        def take(piece: str) -> None:
            nonlocal held
            text = held + piece
            held = line_end if line_end and text.endswith(line_end) else ""
            source.argue(_escaped(text.removesuffix(line_end)))

        source.argue('"')
        is_whole = yield from source.streamed_up_to(closing, take)
        source.argue('"')
        return is_whole
    text = yield from source.up_to((closing,), MOST_VALUE)
    if text is not None:
        source.argue(_typed(text.removesuffix(line_end), types))
    return text is not None


def _typed(text: str, types: frozenset[str]) -> str:
    """JSON of a value that may be text or JSON."""
    try:
        value = json.loads(text)
        as_json = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        lowered = text.strip().lower()
        if lowered in ("true", "false") and "boolean" in types:
            return lowered
        if lowered == "none" and "null" in types:
            return "null"
        return json.dumps(text, ensure_ascii=False)
    if "string" in types and _kind(value) not in types:
        return json.dumps(text, ensure_ascii=False)
    return as_json


def _kind(value: object) -> str:
    kinds = {bool: "boolean", int: "integer", float: "number", str: "", list: "array"}
    return "null" if value is None else kinds.get(type(value), "object")


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def argument_terms(
    tool: Tool,
    term: Term,
    opening: Callable[[str, bool], str],
    closing: str,
    *,
    in_lines: bool = False,
    between: str = "\n",
) -> str:
    """A tool's arguments as a term of Lark, in the order of its schema.

    Args:
        opening: the term before a value, from its key and whether it is text.
        closing: the tag after a value.
        between: the text that follows each closing tag.
    """
    line_end = f"{quoted(chr(10))} " if in_lines else ""
    behind = f" {quoted(between)}" if between else ""

    def written(form: Form) -> str:
        parts = []
        for key, schema in form.properties.items():
            is_wanted = key in form.wanted
            if not is_wanted and _is_never(schema, tool):
                continue  # nothing can be its value
            is_text = tool.types_of(key) == TEXT
            known, texts = tool.resolved(schema), None
            if is_text and isinstance(known, Mapping):
                listed = known.get("enum")
                texts = listed if isinstance(listed, list) else None
                texts = [known["const"]] if "const" in known else texts
            if is_text and texts is None:
                value = f"{TEXT_RULE}{behind}"
            else:
                if texts is not None:
                    values = alternatives([quoted(str(one)) for one in texts])
                else:
                    what = f"the schema of {key!r} of the tool {tool.name!r}"
                    values = json_of(schema, what, tool)
                value = f"{values} {line_end}{term(closing)}{behind}"
            part = f"{opening(key, is_text)} {value}"
            parts.append(part if is_wanted else f"({part})?")
        return " ".join(parts)

    return alternatives([f"({one})" if one else '""' for one in map(written, tool.forms)])


def _is_never(schema: object, tool: Tool) -> bool:
    """Whether an argument can have no value at all."""
    try:
        return plain_schema(schema, tool.parameters, tool.room) is False
    except UsageError:
        return False  # its grammar reports the error


_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"


def xml_family(name: str, mark: str, mark_end: str, *, in_lines: bool) -> Family:
    """A family that writes calls so.

    Args:
        mark, mark_end: what is around a call.
        in_lines: values are in lines of their own.
    """
    return Family(name, _parse_xml(mark, mark_end, in_lines), _xml_rules(mark, mark_end, in_lines))


def _parse_xml(mark: str, mark_end: str, in_lines: bool) -> Callable[[Source, Tools], Steps[None]]:
    def parse(source: Source, tools: Tools) -> Steps[None]:
        while found := (yield from source.text_up_to(mark, _FUNCTION)):
            at, n_calls = source.at, source.n_calls
            yield from source.spaces()
            is_function = found == _FUNCTION or (yield from source.follows(_FUNCTION))
            if is_function and (yield from _xml_call(source, tools, in_lines)):
                if found == mark:
                    yield from after(source, mark_end)
            elif source.n_calls == n_calls:
                source.at = at
                source.say(found)

    return parse


def _xml_call(source: Source, tools: Tools, in_lines: bool) -> Steps[bool]:
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


def _xml_rules(
    mark: str, mark_end: str, in_lines: bool
) -> Callable[[Sequence[Tool], Term], CallRules]:
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


GLM_OPEN, GLM_CLOSE = "<tool_call>", "</tool_call>"
GLM_KEY, GLM_KEY_END, GLM_VALUE, GLM_VALUE_END = (
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
)
_NOT_IN_NAMES = frozenset(' \n\t"{}[]:,')


def _parse_glm(source: Source, tools: Tools) -> Steps[None]:
    """Take all of a text."""
    yield from everything_between(source, GLM_OPEN, lambda: _glm_call(source, tools))


def _glm_call(source: Source, tools: Tools) -> Steps[bool]:
    name = yield from source.up_to(("<",), MOST_NAME)
    if name is None:
        return False
    source.at, name = source.at - 1, name.strip()
    if not name or _NOT_IN_NAMES & set(name):
        return False
    begin = source.at
    has_arguments = yield from source.follows(GLM_KEY)
    if not has_arguments and not (tools.has(name) and (yield from source.follows(GLM_CLOSE))):
        return False
    source.at = begin

    def argument() -> Steps[Argument | None]:
        if not (yield from source.follows(GLM_KEY)):
            return None
        key = yield from source.up_to((GLM_KEY_END,), MOST_NAME)
        if not key:
            return BROKEN_OFF
        yield from source.spaces()
        if not (yield from source.follows(GLM_VALUE)):
            return BROKEN_OFF
        return Argument(key, tools.types_of(name, key))

    yield from tagged_call(source, name, argument, GLM_VALUE_END, GLM_CLOSE)
    return True


def _glm_rules(tools: Sequence[Tool], term: Term) -> CallRules:
    def opening(key: str, is_text: bool) -> str:
        return f'"\\n"? {term(GLM_KEY)} {quoted(key)} {term(GLM_KEY_END)} "\\n"? {term(GLM_VALUE)}'

    rules = [text_rule(TEXT_RULE, GLM_VALUE_END, term)]
    for i, tool in enumerate(tools):
        given = argument_terms(tool, term, opening, GLM_VALUE_END, between="")
        rules.append(f'call_{i}: {quoted(tool.name)} {given} "\\n"? {term(GLM_CLOSE)}')
    calls = any_call(tools)
    return CallRules(GLM_OPEN, calls, f'{calls} ("\\n"? {term(GLM_OPEN)} {calls})*', rules)


GLM = Family("glm", _parse_glm, _glm_rules)


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
