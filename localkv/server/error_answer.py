"""Errors as answers."""

from __future__ import annotations

from starlette.responses import Response

from localkv.server.dialects.anthropic_messages import failure
from localkv.server.failures import RequestError
from localkv.server.json_answer import json_response


def error_answer(path: str, error: RequestError) -> Response:
    """What a client of a path is told, in its dialect's shape."""
    if path.startswith("/v1/messages"):
        return json_response(failure(error), error.status, error.headers)
    if path.startswith("/api/"):
        return json_response({"error": str(error)}, error.status, error.headers)
    return json_response({"error": error.fields}, error.status, error.headers)
