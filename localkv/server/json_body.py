"""A request's JSON body as a typed value."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from localkv.server.failures import RequestError
from localkv.server.limits import type_error

MOST_NESTED = 64
"""Levels of objects and lists in a body."""

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
        raise type_error(error, kind, body) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(400, f"the body is not JSON: {error}") from None
    return value


_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
_OTHERS = bytes(c for c in range(256) if c not in b"{}[]")


def nesting(body: bytes) -> int:
    """The levels of objects and lists in JSON, strings left out."""
    depth = deepest = 0
    for c in _STRING.sub(b"", body).translate(None, delete=_OTHERS):
        depth += 1 if c in b"{[" else -1
        deepest = max(deepest, depth)
    return deepest
