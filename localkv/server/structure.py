"""What the text of an answer has to be, from the fields that say so."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from localkv.server.failures import RequestError
from localkv.structured.grammar import Grammar

STRUCTURE = (
    "response_format",
    "json_schema",
    "grammar",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
)
"""Fields that say what an answer is, like `structured_outputs`."""


def grammar_of(given: Mapping[str, Any]) -> Grammar | None:
    """The grammar of an answer; None if it is free.

    Args:
        given: fields by name. `response_format` is OpenAI's: text, json_object or json_schema. Its
            schema may be in `json_schema`, or in `schema`, as some clients have it. `json_schema`
            and `grammar` are llama-server's, the others vLLM's; one that is null says nothing.

    Raises:
        RequestError: several fields are given, or one is malformed.
        UsageError: there is no grammar for a schema.
    """
    wanted = {
        name: value
        for name, value in given.items()
        if value not in (None, "", False)
        and not (name == "response_format" and (not value or _schema_of(value) is None))
    }
    if len(wanted) > 1:
        names = " and ".join(wanted)
        raise RequestError(400, f"{names} say what the answer is: give one of them")
    for name, value in wanted.items():
        match name.rpartition("guided_")[2].rpartition(".")[2]:
            case "response_format":
                return Grammar.json_schema(_schema_of(value) or {})
            case "json_schema" | "json":
                return Grammar.json_schema(value or {"type": "object"})
            case "json_object":
                return Grammar.json_object()
            case "regex":
                return Grammar.regex(value)
            case "choice":
                texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in value)
                # one lexeme: as rules, each text would be an item of the parser's
                return Grammar.lark(f"start: TEXT\nTEXT: {texts}", "list of choices")
            case "grammar":
                return Grammar.of_text(value)
    return None


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
