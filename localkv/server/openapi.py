"""The description of the server's API, as OpenAPI has it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from localkv import __version__

ANSWERS = {
    "2XX": "the answer",
    "400": "the request is malformed, or can't be answered",
    "401": "the key is missing, or wrong",
    "403": "the server does not answer to this host or origin",
    "404": "there is no such path or model",
    "405": "the path has other methods",
    "413": "the body is too large",
    "429": "too many requests wait",
    "501": "this part of the API is not supported",
    "503": "the model is being loaded, or the server ends",
}


def described(
    endpoints: Iterable[tuple[str, Sequence[str], Callable[..., Any]]], model_name: str
) -> dict[str, Any]:
    """The description of all endpoints.

    Args:
        endpoints: path, methods, and who answers; its `body_type` is the type of the body, and its
            docstring is the summary.
        model_name: of the model that is served.
    """
    endpoints = list(endpoints)
    kinds = {kind for *_, endpoint in endpoints if (kind := _body_type(endpoint)) is not None}
    ordered = sorted(kinds, key=lambda kind: kind.__name__)
    schemas, components = msgspec.json.schema_components(
        ordered, ref_template="#/components/schemas/{name}"
    )
    by_kind = dict(zip(ordered, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for path, methods, endpoint in endpoints:
        path = path.replace(":path", "")
        for method in methods:
            paths.setdefault(path, {})[method.lower()] = _operation(path, endpoint, by_kind)
    return {
        "openapi": "3.1.0",
        "info": {"title": f"localkv: {model_name}", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _body_type(endpoint: Callable[..., Any]) -> type | None:
    return getattr(endpoint, "body_type", None)


def _operation(path: str, endpoint: Callable[..., Any], by_kind: dict[type, Any]) -> dict[str, Any]:
    """What one method of a path does."""
    summary = (endpoint.__doc__ or "").split("\n")[0]
    operation: dict[str, Any] = {
        "summary": summary,
        "responses": {status: {"description": text} for status, text in ANSWERS.items()},
    }
    names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
    if names:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in names
        ]
    if (kind := _body_type(endpoint)) is not None:
        content = {"application/json": {"schema": by_kind[kind]}}
        operation["requestBody"] = {"required": True, "content": content}
    return operation
