"""Errors as answers."""

from __future__ import annotations

from starlette.responses import Response

from localkv.server.dialects.anthropic_messages import failure
from localkv.server.event_stream import event, to_json
from localkv.server.failures import RequestError
from localkv.server.json_answer import json_response


def error_answer(path: str, error: RequestError) -> Response:
    """What a client of a path is told, in its dialect's shape."""
    if path.startswith("/v1/messages"):
        return json_response(failure(error), error.status, error.headers)
    if path.startswith("/api/"):
        return json_response({"error": str(error)}, error.status, error.headers)
    return json_response({"error": error.fields}, error.status, error.headers)


def error_piece(path: str, kind: str, error: RequestError) -> bytes | None:
    """The error that ends a begun stream, in its dialect's shape.

    Args:
        kind: the stream's content type.

    Returns:
        None if the body is no stream, so that it has no place for an error.
    """
    if kind.startswith("application/x-ndjson"):
        return to_json({"error": str(error)}) + b"\n"
    if not kind.startswith("text/event-stream"):
        return None
    if path.startswith("/v1/messages"):
        return event(failure(error), "error")
    if path.endswith("/responses"):
        return event({"type": "error", "code": error.type, "message": str(error)}, "error")
    return event({"error": error.fields})
