"""A request's JSON body as a typed value."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from localkv.server.failures import RequestError
from localkv.server.limits import type_error
from localkv.server.other_fields import check_others

MOST_NESTED = 64
"""Levels of objects and lists in a body."""

_WHOLE_WANTED = re.compile(r"Expected `(.* )?int( .*)?`, got `float`")
_LARGEST_WHOLE = 2**53

T = TypeVar("T", bound=msgspec.Struct)
F = TypeVar("F", bound=Callable[..., Any])

_decoders: dict[type, msgspec.json.Decoder[Any]] = {}


def takes(kind: type[msgspec.Struct]) -> Callable[[F], F]:
    """Of an endpoint: the type of its body, for the API's description."""

    def marked(endpoint: F) -> F:
        endpoint.body_type = kind  # type: ignore[attr-defined]
        return endpoint

    return marked


def decoded(body: bytes, kind: type[T]) -> T:
    """A body. Unknown fields pass; others must have their types.

    Raises:
        RequestError: 400, with the path of what is wrong.
    """
    if not body:
        raise RequestError(400, "the body is empty", "send JSON")
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.json.Decoder(kind)
    if nesting(body) > MOST_NESTED:
        raise RequestError(400, f"the body is nested more than {MOST_NESTED} levels deep")
    try:
        value: T = decoder.decode(body)
    except msgspec.ValidationError as error:
        if not _WHOLE_WANTED.match(str(error)):
            raise type_error(error, kind, body) from None
        try:
            value = msgspec.convert(_whole(msgspec.json.decode(body)), kind)
        except msgspec.ValidationError as other:
            raise type_error(other, kind, body) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(400, f"the body is not JSON: {error}") from None
    if "stream" in kind.__struct_fields__:
        check_others(body, kind)
    return value


def _whole(value: Any) -> Any:
    """A value with its floats that are whole numbers, such as 20.0, as integers: to JSON they are,
    and ollama's clients send them."""
    if isinstance(value, dict):
        return {name: _whole(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_whole(one) for one in value]
    is_whole = isinstance(value, float) and value.is_integer() and abs(value) <= _LARGEST_WHOLE
    return int(value) if is_whole else value


_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
_OTHERS = bytes(c for c in range(256) if c not in b"{}[]")


def nesting(body: bytes) -> int:
    """The levels of objects and lists in JSON, strings left out."""
    depth = deepest = 0
    for c in _STRING.sub(b"", body).translate(None, delete=_OTHERS):
        depth += 1 if c in b"{[" else -1
        deepest = max(deepest, depth)
    return deepest
