"""The values of `localkv.chat.engine` as lines of JSON, and back: what goes through the pipes.

Every line is {"type": NAME, ...fields}. It knows nothing of processes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from localkv.chat.engine import (
    ChatRequest,
    EngineFacts,
    EngineOptions,
    Finished,
    LoadProgress,
    TextDelta,
)
from localkv.config import SamplingParams
from localkv.errors import ContextOverflowError, LocalKVError, UsageError


@dataclass(frozen=True)
class CountTokens:
    """Asks how many tokens a conversation takes."""

    messages: tuple[Mapping[str, str], ...]


@dataclass(frozen=True)
class TokenCount:
    """Answers that."""

    n_tokens: int


@dataclass(frozen=True)
class Cancel:
    """Asks to end the answer that is being written."""


@dataclass(frozen=True)
class Failure:
    """An error meant for the user: the name of its class, and what it says."""

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
        Cancel,
        Failure,
        ChatRequest,
        EngineFacts,
        EngineOptions,
        Finished,
        LoadProgress,
        TextDelta,
    )
}


def failure(error: LocalKVError) -> Failure:
    """What `Failure.error` turns back into the error, or its nearest relative that has a name."""
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
    fields = json.loads(line)
    cls = _TYPES.get(fields.pop("type", "")) if isinstance(fields, dict) else None
    if cls is None:
        raise ValueError(f"no message: {line[:80]!r}")
    if cls is ChatRequest:
        fields["params"] = sampling_params_from_json(fields["params"])
    return cls(**_with_tuples(fields))


def sampling_params_from_json(fields: Mapping[str, Any]) -> SamplingParams:
    """`SamplingParams` from what JSON makes of `asdict` of it."""
    known = _with_tuples(fields)
    bias = {int(token): amount for token, amount in known.pop("logit_bias", {}).items()}
    return SamplingParams(**known, logit_bias=bias)


def _with_tuples(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
