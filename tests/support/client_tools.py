"""Schemas as clients' tools have them: of coding agents, of zod 4, of pydantic, of MCP servers."""

from __future__ import annotations

from typing import Any

_DRAFT = "https://json-schema.org/draft/2020-12/schema"


def _object(properties: dict[str, Any], *required: str, **others: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*required], **others}


_TEXT = {"type": "string", "description": "some text"}
_TODO = _object(
    {
        "content": {"type": "string", "minLength": 1},
        "status": {"type": "string", "enum": ["pending", "in_progress", "completed"]},
    },
    "content",
    "status",
    additionalProperties=False,
)
_QUESTION = _object(
    {
        "question": _TEXT,
        "options": {"minItems": 2, "maxItems": 4, "type": "array", "items": _object({"a": _TEXT})},
        "multiSelect": {"default": False, "type": "boolean"},
    },
    "question",
    "options",
    additionalProperties=False,
)
SCHEMAS: dict[str, dict[str, Any]] = {
    "run": _object(
        {
            "command": _TEXT,
            "timeout": {"type": "number", "maximum": 600000, "exclusiveMinimum": 0},
            "run_in_background": {"type": "boolean"},
        },
        "command",
        additionalProperties=False,
        **{"$schema": _DRAFT},
    ),
    "ask": _object(
        {
            "questions": {"type": "array", "items": _QUESTION, "minItems": 1, "maxItems": 4},
            "answers": {
                "type": "object",
                "propertyNames": {"type": "string"},
                "additionalProperties": {"type": "string"},
            },
        },
        "questions",
        additionalProperties=False,
        **{"$schema": _DRAFT},
    ),
    "read": _object(
        {
            "file_path": _TEXT,
            "offset": {"type": "integer", "minimum": 0, "maximum": 2**53 - 1},
            "limit": {"type": "integer", "exclusiveMinimum": 0, "maximum": 2**53 - 1},
            "pages": {"type": "string", "pattern": r"^\d+(-\d+)?$"},
        },
        "file_path",
    ),
    "fetch": _object({"url": {"type": "string", "format": "uri"}, "prompt": _TEXT}, "url"),
    "todos": _object({"todos": {"type": "array", "items": _TODO}}, "todos"),
    "shell": _object(
        {
            "command": {"type": "array", "items": {"type": "string"}},
            "workdir": {"type": "string"},
            "timeout_ms": {"type": "number"},
            "with_escalated_permissions": {"type": "boolean"},
        },
        "command",
        additionalProperties=False,
    ),
    "plan": _object(
        {"explanation": _TEXT, "plan": {"type": "array", "items": _TODO}},
        "plan",
        additionalProperties=False,
    ),
    "no arguments": {"type": "object", "properties": {}},
    "nothing said": {},
    "zod record": {
        "type": "object",
        "propertyNames": {"type": "string", "enum": ["x", "y"]},
        "additionalProperties": {"type": "integer", "minimum": 1 - 2**53, "maximum": 2**53 - 1},
        "required": ["x"],
    },
    "zod union": _object(
        {
            "of": {
                "oneOf": [
                    _object({"kind": {"type": "string", "const": "a"}, "x": _TEXT}, "kind", "x"),
                    _object({"kind": {"type": "number", "const": 2}, "y": {}}, "kind", "y"),
                ]
            }
        },
        "of",
    ),
    "zod formats": _object(
        {
            "mail": {
                "type": "string",
                "format": "email",
                "pattern": r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]"
                r"@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$",
            },
            "id": {"type": "string", "format": "cuid2", "pattern": "^[0-9a-z]+$"},
            "never": {"not": {}},
        }
    ),
    "pydantic": _object(
        {
            "item": {"allOf": [{"$ref": "#/$defs/Item"}], "default": None, "title": "Item"},
            "other": {"anyOf": [{"$ref": "#/$defs/Item"}, {"type": "null"}], "default": None},
            "pair": {
                "type": "array",
                "prefixItems": [{"type": "string"}, {"type": "integer"}],
                "minItems": 2,
                "maxItems": 2,
            },
            "by": {"type": "object", "additionalProperties": {"$ref": "#/$defs/Item"}},
            "big": {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
        },
        "item",
        title="Arguments",
        **{
            "$defs": {
                "Item": _object(
                    {
                        "n": {"type": "integer", "format": "int64"},
                        "next": {"anyOf": [{"$ref": "#/$defs/Item"}, {"type": "null"}]},
                    },
                    "n",
                    title="Item",
                )
            }
        },
    ),
    "mcp": _object(
        {
            "ids": {"type": "array", "items": {"type": "string"}, "uniqueItems": False},
            "body": {"type": "object", "properties": {}, "additionalProperties": {}},
            "mode": {"type": "string", "nullable": True, "x-order": 1, "format": "password"},
            "blob": {"type": "string", "contentEncoding": "base64", "contentMediaType": "x/y"},
            "old": {"type": "string", "deprecated": True, "readOnly": True, "examples": ["a"]},
        },
        dependencies={},
        minProperties=0,
        allOf=[{}],
    ),
    "either": {
        "type": "object",
        "properties": {"path": _TEXT, "url": _TEXT},
        "anyOf": [{"required": ["path"]}, {"required": ["url"]}],
    },
}

TOOLS = [
    {"type": "function", "function": {"name": name.replace(" ", "_"), "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
