"""Checks the arguments of the Python API against its annotations."""

from __future__ import annotations

import collections.abc
import os
import reprlib
import sys
import types
from collections.abc import Callable, Mapping
from functools import cache
from inspect import unwrap
from numbers import Integral, Real
from threading import Event
from typing import Any, Literal, Union, get_args, get_origin

from localkv.errors import UsageError

_LISTED = (
    list,
    tuple,
    collections.abc.Sequence,
    collections.abc.Collection,
    collections.abc.Iterable,
)


def check_types(call: Callable[..., object] | type, given: Mapping[str, object]) -> None:
    """Refuse the first argument whose type its annotation doesn't allow.

    A number of NumPy's is a number, an array is a list, and True is not a whole number. What an
    annotation names that is imported for type checkers only may be anything.

    Args:
        call: a function, or a class whose annotations are arguments.
        given: arguments by their names; other names are left out.

    Raises:
        UsageError: names the argument, and what it may be.
    """
    for name, hint in _hints(unwrap(call)).items():
        if name in given and not _fits(given[name], hint):
            value = reprlib.repr(given[name])
            raise UsageError(f"{name} must be {_words(hint)}, not {value:.60}")


@cache
def _hints(call: Callable[..., object]) -> dict[str, object]:
    namespace = vars(sys.modules[call.__module__])
    hints = dict[str, object]()
    for name, hint in call.__annotations__.items():
        text = hint if isinstance(hint, str) else hint.__forward_arg__  # of a TypedDict
        try:
            hints[name] = eval(text, namespace)  # as typing.get_type_hints does, one by one
        except NameError:
            continue
    hints.pop("return", None)
    return hints


def _fits(value: object, hint: Any) -> bool:
    origin, parts = get_origin(hint) or hint, get_args(hint)
    if origin in (Union, types.UnionType):
        return any(_fits(value, part) for part in parts)
    if origin is Literal:
        return any(type(value) is type(part) and value == part for part in parts)
    if hint in (None, type(None)):
        return value is None
    if hint in (int, float):
        number = Integral if hint is int else Real
        return isinstance(value, number) and not isinstance(value, bool)
    if hint is bool:
        return isinstance(value, bool) or type(value).__name__ in ("bool", "bool_")
    if hint is Event:
        return hasattr(value, "is_set")  # events of multiprocessing are no `Event`
    if origin in _LISTED:
        return _is_list(value, origin) and _items_fit(value, parts)
    if origin is collections.abc.Callable:
        return callable(value)
    return isinstance(value, origin) if isinstance(origin, type) else True


def _is_list(value: object, origin: type) -> bool:
    if isinstance(value, str | bytes | bytearray | Mapping | type):
        return False
    if origin in (list, collections.abc.Sequence):  # NumPy's arrays are not registered as such
        return hasattr(value, "__len__") and hasattr(value, "__getitem__")
    return isinstance(value, origin)


def _items_fit(value: Any, parts: tuple[Any, ...]) -> bool:
    if not parts or not hasattr(value, "__len__"):
        return True
    if get_args(parts[0]) and get_origin(parts[0]) is not collections.abc.Mapping:
        return all(_fits(item, parts[0]) for item in value)
    one_of_each = {type(item): item for item in value}
    return all(_fits(item, parts[0]) for item in one_of_each.values())


def _words(hint: Any) -> str:
    """What a hint allows, as a sentence says it."""
    origin, parts = get_origin(hint) or hint, get_args(hint)
    if origin in (Union, types.UnionType):
        every = dict.fromkeys(_words(part) for part in parts)
        return " or ".join(every)
    if origin is Literal:
        return " or ".join(map(repr, parts))
    if origin in _LISTED:
        return f"a list of {_PLURALS.get(get_origin(parts[0]) or parts[0], 'such')}"
    return _WORDS.get(origin, getattr(origin, "__name__", str(origin)))


_WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "True or False",
    str: "text",
    type(None): "None",
    os.PathLike: "a path",
    Event: "a threading.Event",
    collections.abc.Mapping: "a dict",
    collections.abc.Callable: "a function",
}
_PLURALS: dict[Any, str] = {
    int: "whole numbers",
    str: "texts",
    collections.abc.Mapping: "dicts",
    tuple: "pairs",
    list: "lists of whole numbers",
}
