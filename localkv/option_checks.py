"""Checks of the Python API's arguments: their names, and their types by the annotations.

A mistyped name is refused with the right one. Options have llama.cpp's names, and users often type
the names that other libraries use.
"""

from __future__ import annotations

import collections.abc
import os
import reprlib
import sys
import types
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cache
from inspect import Parameter, signature, unwrap
from numbers import Integral, Real
from threading import Event
from typing import Any, Literal, Union, get_args, get_origin

from localkv.errors import UsageError

_MAX_TOKENS = "n n_predict num_predict max_new_tokens max_completion_tokens max_output_tokens"
_MEANT = {
    "max_tokens": f"{_MAX_TOKENS} max_length",
    "temperature": "temp",
    "stop": "stop_sequences stop_strings stop_words reverse_prompt",
    "repeat_penalty": "repetition_penalty rep_pen",
    "repeat_last_n": "penalty_last_n",
    "typ_p": "typical typical_p",
    "logprobs": "top_logprobs n_probs",
    "seed": "random_seed random_state",
    "schema": "json_schema response_schema",
    "parse_special": "special",
    "n_ctx": "num_ctx ctx_size context_length max_model_len max_seq_len",
    "n_batch": "num_batch batch_size n_ubatch ubatch_size",
    "n_threads": "num_thread num_threads threads",
    "n_threads_batch": "threads_batch",
    "cache_type_k": "type_k kv_cache_type kv_cache_dtype",
    "cache_type_v": "type_v",
    "n_gpu_layers": "gpu_layers num_gpu",
    "override_tensor": "tensor_buft_overrides",
    "offload_kqv": "kv_offload",
    "progress": "verbose show_progress",
    "on_progress": "progress_callback",
}
MEANT = {other: name for name, others in _MEANT.items() for other in others.split()}
"""Another library's name of an option -> ours."""

_DIVIDED = "n_gpu_layers, n_cpu_moe and override_tensor say what is on the GPU"
_SCHEMA = "schema=... keeps the text to a JSON schema, grammar=... to GBNF or Lark"
_GREEDY = "temperature=0 takes the most likely token each time"
ADVICE = {
    **dict.fromkeys(("device_map", "split_mode"), _DIVIDED),
    **dict.fromkeys(("format", "response_format"), _SCHEMA),
    **dict.fromkeys(("do_sample", "greedy"), _GREEDY),
    "embedding": "LLM.embed works with every model",
    "stream": "LLM.stream yields the text piece by piece",
}
"""Another library's name of an option -> what to do here."""


class UnknownOptionError(UsageError, TypeError):
    """A call has no such option. It is a `TypeError`, as of any function."""


def nearest_name(name: str, known: Iterable[str]) -> str | None:
    """The known name that a misspelt or shortened one comes nearest to.

    Case and the dashes of an option don't count. Among equally near names, the one with nearer
    digits wins; 9 is next to 0, as on a keyboard.
    """
    from difflib import SequenceMatcher

    if len(name) > _LONGEST:
        return None
    wanted = _bare(name)
    names = {other: _bare(other) for other in known}
    longer = [other for other, bare in names.items() if bare.startswith(wanted)]
    if wanted and len(name) > 2 and longer:
        return min(longer, key=lambda other: (len(other), other))
    likeness = {other: SequenceMatcher(None, bare, wanted).ratio() for other, bare in names.items()}
    near = [other for other in names if likeness[other] >= _LEAST_LIKENESS]
    ranked = ((-likeness[other], _between(names[other], wanted), other) for other in near)
    return min(ranked, default=(0.0, 0, None))[2]


_LEAST_LIKENESS = 0.6
_LONGEST = 256
"""Most characters of a name that is compared, since the time grows with their square."""


def _bare(name: str) -> str:
    return name.lower().lstrip("-").replace("_", "-")


def _between(one: str, other: str) -> int:
    """The sum of distances between characters of two names: 10 if they differ, less for digits."""
    return sum(
        min(abs(int(a) - int(b)), 10 - abs(int(a) - int(b)))
        if a in _DIGITS and b in _DIGITS
        else 10 * (a != b)
        for a, b in zip(one, other, strict=False)
    )


_DIGITS = "0123456789"
_MOST_LISTED = 10


def unknown_name(what: str, name: object, known: Iterable[str], listing: str = "") -> UsageError:
    """The error about a name that does not exist, with the nearest one.

    Args:
        what: what it should name, such as "unknown device".
        known: the names that exist; the hint has all of them if they are few.
        listing: where the names are listed, for the hint if they are many.
    """
    known = list(known)
    nearest = nearest_name(name, known) if isinstance(name, str) else None
    hint = f"use {', '.join(known)}" if len(known) <= _MOST_LISTED or not listing else listing
    meant = f"; did you mean {nearest}?" if nearest else ""
    return UsageError(f"{what} {name!r:.60}{meant}", hint)


def keywords(function: Callable[..., object]) -> list[str]:
    """The names of a function's arguments that have to be named."""
    parameters = signature(function).parameters.values()
    return [one.name for one in parameters if one.kind is Parameter.KEYWORD_ONLY]


def check_options(
    given: Iterable[str], options: Collection[str], others: Mapping[str, Collection[str]]
) -> None:
    """Refuse the first option that a call does not have.

    Args:
        given: names of options.
        options: those that the call has.
        others: other calls, and their options.

    Raises:
        UnknownOptionError: names the option that was meant.
    """
    for name in given:
        if name not in options:
            raise _unknown_option(name, options, others)


def _unknown_option(
    name: str, options: Collection[str], others: Mapping[str, Collection[str]]
) -> UnknownOptionError:
    message = f"unknown option {name!r}"
    meant = MEANT.get(name, name)
    for call, theirs in others.items():
        if meant in theirs and meant not in options:
            return UnknownOptionError(message, hint=f"{meant} is an option of {call}")
    if name in ADVICE:
        return UnknownOptionError(message, hint=ADVICE[name])
    nearest = meant if meant in options else nearest_name(name, options)
    if nearest is not None:
        return UnknownOptionError(f"{message}: did you mean {nearest}?")
    return UnknownOptionError(message, hint=f"options: {', '.join(options)}")


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
