"""What the text of an answer has to be, from the fields that say so."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from localkv.server.failures import RequestError
from localkv.structured.grammar import Grammar


def grammar_of(
    response_format: Mapping[str, Any] | None,
    json_schema: Mapping[str, Any] | None,
    grammar: str | None,
) -> Grammar | None:
    """The grammar of an answer; None if it is free.

    Args:
        response_format: OpenAI's: text, json_object or json_schema. The schema may be in
            `json_schema`, or in `schema`, as some clients have it.
        json_schema, grammar: llama-server's.

    Raises:
        RequestError: several of them are there, or one is malformed.
        UsageError: there is no grammar for a schema.
    """
    given = [
        name
        for name, value in {
            "response_format": _schema_of(response_format) if response_format else None,
            "json_schema": json_schema,
            "grammar": grammar or None,
        }.items()
        if value is not None
    ]
    if len(given) > 1:
        raise RequestError(400, f"{' and '.join(given)} say what the answer is: give one of them")
    if response_format and (schema := _schema_of(response_format)) is not None:
        return Grammar.json_schema(schema)
    if json_schema is not None:
        return Grammar.json_schema(json_schema or {"type": "object"})
    return Grammar.of_text(grammar) if grammar else None


def _schema_of(response_format: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The JSON schema that it asks for; None for any text."""
    kind = response_format.get("type")
    if kind == "text":
        return None
    if kind not in ("json_object", "json_schema"):
        raise RequestError(
            400, f"response_format has type {kind!r:.60}", "use text, json_object or json_schema"
        )
    wrapped = response_format.get("json_schema")
    schema = wrapped.get("schema") if isinstance(wrapped, Mapping) else None
    if schema is None:
        schema = response_format.get("schema")
    if schema is None and kind == "json_schema":
        raise RequestError(400, "response_format: json_schema has no schema")
    if schema is not None and not isinstance(schema, Mapping):
        raise RequestError(400, "response_format: the schema is not an object")
    return schema or {"type": "object"}
