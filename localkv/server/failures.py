"""Errors that a request can have: a status, and an object in each dialect's shape that says why."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from localkv.chat.engine import EngineStoppedError
from localkv.errors import ChatTemplateError, ContextOverflowError, LocalKVError, UsageError

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    414: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    501: "not_supported_error",
    503: "unavailable_error",
    504: "timeout_error",
}
"""`type` of an error by its status; llama-server's names, OpenAI's where that has none."""

CONTEXT_ERROR = "exceed_context_size_error"
"""The type of an error about a prompt that does not fit."""

ANTHROPIC_TYPES = {413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error"}
"""`type` of an error by its status in Anthropic's API, where that has another name."""
SHARED_TYPES = {
    "invalid_request_error",
    "authentication_error",
    "permission_error",
    "not_found_error",
}
"""Names that Anthropic's API has, too."""

FINAL = (500, 501, 504)
"""Statuses at which client libraries ask again, though they would only get the same answer."""


class RequestError(LocalKVError):
    """A request can't be answered.

    Args:
        status: HTTP's.
        message: one line.
        hint: what would work.
        type: replaces the type that the status has.
        extra: further fields of the error's object.
        headers: of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        hint: str | None = None,
        *,
        type: str | None = None,
        extra: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message, hint)
        self.status = status
        self.type = type or TYPES.get(status, "server_error")
        self.extra = dict(extra or {})
        self.headers = dict(headers or {})
        if status in FINAL:
            self.headers["x-should-retry"] = "false"  # as OpenAI's and Anthropic's servers say it

    @property
    def fields(self) -> dict[str, Any]:
        """The object `error` of OpenAI's API, as llama-server fills it in."""
        return {"code": self.status, "message": str(self), "type": self.type, **self.extra}

    @property
    def anthropic_fields(self) -> dict[str, Any]:
        """The whole answer in Anthropic's API."""
        kind = self.type if self.type in SHARED_TYPES else "api_error"
        if self.status == 400:
            kind = "invalid_request_error"
        kind = ANTHROPIC_TYPES.get(self.status, kind)
        message = str(self)
        if self.type == CONTEXT_ERROR:  # Anthropic's words, by which Claude Code knows what to do
            said = "prompt is too long: {n_prompt_tokens} tokens > {n_ctx} maximum"
            message = f"{said.format_map(self.extra)} ({self.hint})"
        return {"type": "error", "error": {"type": kind, "message": message, **self.extra}}


def unsupported(what: str, hint: str) -> RequestError:
    """A part of an API that this server does not have."""
    return RequestError(501, f"{what} is not supported", hint)


def context_error(
    n_prompt: int, n_ctx: int, *, everybody: int | None = None, is_least: bool = False
) -> RequestError:
    """A prompt that does not fit, with the numbers that clients look for.

    Args:
        is_least: `n_prompt` is a lower bound.
        everybody: tokens that the cache holds for all requests, if the prompt exceeds these.
    """
    room = n_ctx if everybody is None else everybody
    asked = f"at least {n_prompt}" if is_least else f"{n_prompt}"
    return RequestError(
        400,
        # clients look for these words of llama-server's
        f"the request has {asked} tokens, which exceeds the available context size of {room}",
        "shorten the prompt, or start the server with a larger -c"
        if everybody is None
        else "shorten the prompt, or start the server with a larger --cache-tokens",
        type=CONTEXT_ERROR,
        extra={"n_prompt_tokens": n_prompt, "n_ctx": room},
    )


def as_request_error(error: LocalKVError) -> RequestError:
    """Any error for users as the answer to a request."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, EngineStoppedError):
        return RequestError(503, error.message, error.hint, headers={"retry-after": "5"})
    if isinstance(error, ContextOverflowError | ChatTemplateError | UsageError):
        return RequestError(400, error.message, error.hint)
    return RequestError(500, error.message, error.hint)
