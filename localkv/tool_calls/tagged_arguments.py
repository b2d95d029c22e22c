"""Arguments between tags: `<parameter=KEY>VALUE</parameter>`, and what else families write so.

Values are plain text. The tool's schema, or a mark beside the value, says which of them are JSON.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import NamedTuple

from localkv.errors import UsageError
from localkv.structured.schema import plain_schema
from localkv.tool_calls.family import Term, after, alternatives, json_of, quoted
from localkv.tool_calls.source import Source, Steps
from localkv.tool_calls.tools import Form, Tool

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
