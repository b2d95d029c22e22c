"""The values of `localkv.chat.engine` as lines of JSON, and back, for the pipes.

Every line is {"type": NAME, ...fields}. It knows nothing of processes.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from localkv.chat.engine import (
    Audited,
    ChatRequest,
    EngineFacts,
    EngineOptions,
    Finished,
    LoadProgress,
    PromptProgress,
    TextDelta,
)
from localkv.errors import ContextOverflowError, LocalKVError, UsageError
from localkv.sampling.params import SamplingParams


@dataclass(frozen=True)
class CountTokens(ChatRequest):
    """Asks how many tokens the prompt of a request takes."""


@dataclass(frozen=True)
class TokenCount:
    """Answers that."""

    n_tokens: int


@dataclass(frozen=True)
class SaveState:
    """Asks to write what was evaluated last to a file; the answer is a `TokenCount`."""

    path: str


@dataclass(frozen=True)
class LoadState:
    """Asks to take such a file into the cache; the answer is a `TokenCount`."""

    path: str


@dataclass(frozen=True)
class AuditAnswer:
    """Asks what the packed cache changed in the last answer; the answer is an `Audited`."""


@dataclass(frozen=True)
class Cancel:
    """Asks to end the answer that is being written, or the audit."""


@dataclass(frozen=True)
class Failure:
    """An error meant for the user: the name of its class, and its message."""

    kind: str
    message: str
    hint: str | None

    def error(self) -> LocalKVError:
        """The error itself."""
        return _ERRORS.get(self.kind, LocalKVError)(self.message, self.hint)


_ERRORS: dict[str, type[LocalKVError]] = {
    cls.__name__: cls for cls in (ContextOverflowError, UsageError, LocalKVError)
}
_TYPES: dict[str, Any] = {
    cls.__name__: cls
    for cls in (
        CountTokens,
        TokenCount,
        SaveState,
        LoadState,
        AuditAnswer,
        Audited,
        Cancel,
        Failure,
        ChatRequest,
        EngineFacts,
        EngineOptions,
        Finished,
        LoadProgress,
        PromptProgress,
        TextDelta,
    )
}


def failure(error: LocalKVError) -> Failure:
    """A `Failure` whose `error` is this error, or its nearest relative that has a name."""
    kinds = [cls.__name__ for cls in type(error).__mro__ if cls.__name__ in _ERRORS]
    return Failure(kinds[0], error.message, error.hint)


def encode(value: Any) -> bytes:
    """One line, final line break included. Lone surrogates survive as escapes."""
    fields = {"type": type(value).__name__, **asdict(value)}
    return json.dumps(fields, separators=(",", ":")).encode() + b"\n"


def decode(line: bytes) -> Any:
    """The value of a line.

    Raises:
        ValueError: it is not one.
    """
    try:
        fields = json.loads(line)
    except RecursionError:
        fields = None
    name = fields.pop("type", None) if isinstance(fields, dict) else None
    cls = _TYPES.get(name) if isinstance(name, str) else None
    if cls is None:
        raise ValueError(f"no message: {line[:80]!r}")
    if issubclass(cls, ChatRequest):
        params = fields.get("params")
        if not isinstance(params, dict):
            raise ValueError(f"no message: {line[:80]!r}")
        fields["params"] = sampling_params_from_json(params)
    return checked(cls, _with_tuples(fields))


def sampling_params_from_json(fields: Mapping[str, Any]) -> SamplingParams:
    """`SamplingParams` from its `asdict` after JSON.

    Raises:
        ValueError: a field is unknown or of another type.
        UsageError: a value makes no sense.
    """
    known = _with_tuples(fields)
    bias = known.get("logit_bias", {})
    if isinstance(bias, dict):
        known["logit_bias"] = {int(token): amount for token, amount in bias.items()}
    return checked(SamplingParams, known)


def _with_tuples(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}


T = TypeVar("T")


def checked(cls: type[T], values: Mapping[str, Any]) -> T:
    """A dataclass from its fields, which must have their declared types.

    Raises:
        ValueError: one is unknown, missing or of another type.
    """
    types = _field_types(cls)  # type: ignore[arg-type]
    for name, value in values.items():
        if name not in types:
            raise ValueError(f"it has {name[:60]!r}, which is unknown here")
        if not _fits(value, types[name]):
            raise ValueError(f"its {name} is {repr(value)[:60]}")
    try:
        return cls(**values)
    except TypeError:
        missing = [name for name in types if name not in values]
        raise ValueError(f"it has no {missing[0] if missing else 'fields'}") from None


@functools.cache
def _field_types(cls: type[Any]) -> dict[str, Any]:
    return get_type_hints(cls)


def _fits(value: Any, wanted: Any) -> bool:
    """Whether a value out of JSON has the type of a field."""
    kind, of = get_origin(wanted), get_args(wanted)
    if wanted is Any:
        return True
    if kind in (Union, UnionType):
        return any(_fits(value, one) for one in of)
    if kind is Literal:
        return isinstance(value, str) and value in of
    if kind in (tuple, Sequence):
        return isinstance(value, tuple) and all(_fits(item, of[0]) for item in value)
    if kind is Mapping:
        return isinstance(value, dict) and all(_is_entry(entry, of) for entry in value.items())
    if wanted is float:
        return type(value) in (int, float) and abs(value) < math.inf
    if wanted is int:
        return type(value) is int and abs(value) < 1 << 63
    return type(value) is wanted


def _is_entry(entry: tuple[Any, Any], of: tuple[Any, ...]) -> bool:
    """Whether an entry of a mapping fits; a bias may be -inf, which forbids a token."""
    key, value = entry
    return _fits(key, of[0]) and (_fits(value, of[1]) or (of[1] is float and value == -math.inf))
