"""A call as a JSON object: {"name": ..., "arguments": {...}}, as most families write it."""

from __future__ import annotations

import json
from collections.abc import Callable

from localkv.tool_calls.source import Source, Steps

_NAMES = ("name", "tool_name")
_ARGUMENTS = ("arguments", "parameters", "args")
_OTHERS = ("id", "type", "index")


def json_call(
    source: Source, accepts: Callable[[str], bool] = bool, *, is_marked: bool = True
) -> Steps[bool]:
    """Take a call, whose arguments are handed on as they come if the name is there before them.

    Args:
        source: at the call's brace.
        accepts: whether a tool may have this name.
        is_marked: something said that this is a call; else it is none once a member says so.

    Returns:
        whether it is one. If not, the source is where it was, unless the call has begun: then it is
        ended where it ceases to be one.
    """
    begin, name, held, has_begun = source.at, "", "{}", False

    def begin_call() -> bool:
        nonlocal has_begun
        if not name or not accepts(name):
            return False
        source.begin_call(name)
        has_begun = True
        return True

    def members() -> Steps[bool]:
        nonlocal name, held
        if not (yield from source.follows("{")):
            return False
        while True:
            yield from source.spaces()
            key = yield from source.string()
            yield from source.spaces()
            if key is None or not (yield from source.follows(":")):
                return False
            yield from source.spaces()
            if not (is_marked or key in _NAMES + _ARGUMENTS + _OTHERS):
                return False
            if key in _NAMES and not name:
                name = (yield from source.string()) or ""
                if not name or not accepts(name):
                    return False
            elif key in _ARGUMENTS and not has_begun and name and (yield from source.peek()) == "{":
                if not begin_call():
                    return False
                if (yield from source.value(source.argue)) is None:
                    return False
            else:
                value = yield from source.value()
                if value is None:
                    return False
                if key in _ARGUMENTS and not has_begun:
                    held = _object(value)
            yield from source.spaces()
            if (yield from source.follows("}")):
                return True
            if not (yield from source.follows(",")):
                return False

    is_whole = yield from members()
    if is_whole and not has_begun:
        is_whole = held != "" and begin_call()
        if is_whole:
            source.argue(held)
    if has_begun:
        source.end_call(is_whole=is_whole)
        return True
    source.at = begin
    return False


def json_calls_in_list(source: Source, accepts: Callable[[str], bool] = bool) -> Steps[bool]:
    """Take a call, or a list of them, as far as they are calls; False if there is none.

    Args:
        source: at the bracket or the brace.
        accepts: as of `json_call`.
    """
    is_list, n_calls = (yield from source.follows("[")), source.n_calls
    while True:
        yield from source.spaces()
        if not (yield from json_call(source, accepts)):
            break
        yield from source.spaces()
        if not (yield from source.follows(",")):
            break
    at = source.at
    if is_list and source.n_calls > n_calls:
        yield from source.spaces()
        if not (yield from source.follows("]")):
            source.at = at
    return source.n_calls > n_calls


def _object(value: str) -> str:
    """Arguments as the text of an object: also of a string that holds one; "" if they are none."""
    parsed = json.loads(value, strict=False)
    if isinstance(parsed, str):
        value = parsed
        try:
            parsed = json.loads(parsed)
        except (ValueError, RecursionError):
            return ""
    if parsed is None:
        return "{}"
    return value if isinstance(parsed, dict) else ""
