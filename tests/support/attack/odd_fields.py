"""Requests with one field that has an odd value: all fields, values and endpoints."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

from msgspec import inspect

from localkv.server.app import ENDPOINTS

MESSAGES = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/completion": {"prompt": "Once upon", "n_predict": 2},
    "/v1/completions": {"prompt": "Once upon", "max_tokens": 2},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 2},
    "/v1/responses": {"input": "hi", "max_output_tokens": 2},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 2},
    "/api/chat": {"model": "tales", "messages": MESSAGES, "options": {"num_predict": 2}},
    "/api/generate": {"model": "tales", "prompt": "Once", "options": {"num_predict": 2}},
    "/v1/messages/count_tokens": {"messages": MESSAGES},
    "/v1/responses/input_tokens": {"input": "hi"},
    "/v1/chat/completions/input_tokens": {"messages": MESSAGES},
    "/apply-template": {"messages": MESSAGES},
    "/tokenize": {"content": "abc"},
    "/detokenize": {"tokens": [1, 2]},
    "/api/show": {"model": "tales"},
    "/slots/0?action=save": {"filename": "a"},
    "/props": {},
}
"""The smallest request to each endpoint that takes one."""
for _path in ("/api/chat", "/api/generate"):
    BODIES[_path]["stream"] = False

_NUMBERS = (
    *(True, False, 0, 1, -1, 2, 3.5, -0.0, 1e308, -1e308, 5e-324, 10**400),
    *(2**31 - 1, 2**31, -(2**31), 2**32, 2**53, 2**63 - 1, 2**63, 2**64, 2**70, -(2**63) - 1),
)
_TEXTS = ("", "a", "\0", "\x1b[2J", "--5", "-", "1" * 5000, "\u0663", "NaN", "\ud800", "k" * 100)
_LISTS: tuple[list[Any], ...] = (
    *([], [None], [1], ["a"], [[]], [{}], ["f"] * 2, ["penalties"] * 3, ["nope"]),
    *([[1, 1]], [["a", 1]], [[1, None]], [[1, False]], [[2**40, 1]], [[-1, 1]], [[5, 1e308]]),
    [{"role": "user"}],
    [{"role": "user", "content": 5}],
    [{"role": "user", "content": [{"type": "text", "text": 5}]}],
    [{"role": "user", "content": [5]}],
    [{"role": "assistant", "tool_calls": [5]}],
    [{"role": "assistant", "tool_calls": [{"function": {"name": 5, "arguments": 5}}]}],
    [{"role": "tool", "tool_call_id": 5, "content": {"a": 1}}],
    [{"role": "user", "content": "a", "self": 2, "messages": 3}],
    [{"type": "function", "function": {"name": "f", "parameters": 5}}],
    [{"type": "function", "function": {"name": "f", "parameters": {"properties": 5}}}],
    [{"type": "function", "function": {"name": "</tool_call>\n", "parameters": {}}}],
    [{"name": "f", "input_schema": 5}],
    [{"name": "f", "input_schema": {"type": "object"}}],
    [{"type": "web_search"}],
)
_OBJECTS: tuple[dict[str, Any], ...] = (
    *({}, {"a": 1}, {"1": 1}, {"--5": 1}, {"-1": 5}, {"99999999": 5}, {"9" * 5000: 1}),
    *({"5": 1e308}, {"5": -1e308}, {"5": None}, {"5": True}, {"5": "x"}, {"\u0663": 1}),
    *({"type": "json_object"}, {"type": "json_schema"}, {"type": 5}, {"type": None}),
    {"type": "json_schema", "json_schema": {"schema": []}},
    {"type": "json_schema", "json_schema": {"schema": {"type": "nope"}}},
    {"type": "function", "function": {"name": "x"}},
    {"type": "enabled", "budget_tokens": -5},
    {"type": "enabled", "budget_tokens": 2**70},
    {"num_predict": -5, "temperature": "x"},
    {"num_ctx": 2**70, "seed": 2**70},
    {"effort": 5},
    {"format": {"type": "json_schema", "schema": {"type": "string", "pattern": "("}}},
    {"include_usage": 5},
    {"add_generation_prompt": [], "bos_token": {}, "tools": 5, "messages": 5},
)
VALUES: tuple[Any, ...] = (None, *_NUMBERS, *_TEXTS, *_LISTS, *_OBJECTS)
_NUMBERED = range(len(VALUES))


def _fields(kind: inspect.Type) -> Iterator[str]:
    """The names of the fields of a body, and of the objects in it: `options.top_k`."""
    for one in kind.types if isinstance(kind, inspect.UnionType) else (kind,):
        if isinstance(one, inspect.StructType):
            for field in one.fields:
                yield field.encode_name
                yield from (f"{field.encode_name}.{name}" for name in _fields(field.type))


_OWN = {
    path: list(_fields(inspect.type_info(endpoint.body_type)))
    for path, _, endpoint in ENDPOINTS
    if path in BODIES and hasattr(endpoint, "body_type")
}
_OF_ANY = {name for names in _OWN.values() for name in names if "." not in name}
FIELDS = {path: sorted({*_OWN.get(path, ()), *_OF_ANY, "filename", "user"}) for path in BODIES}
"""The fields of each path: of all bodies, of the objects in its own, and an unknown one."""


def odd_requests(seed: int) -> Iterator[tuple[str, bytes]]:
    """Path and body of every request, in the order of a seed."""
    cases = [(path, field, i) for path in BODIES for field in FIELDS[path] for i in _NUMBERED]
    random.Random(seed).shuffle(cases)
    for path, field, i in cases:
        body, (name, *rest) = dict(BODIES[path]), field.split(".")
        if rest:
            body[name] = {**body.get(name, {}), rest[0]: VALUES[i]}
        else:
            body[name] = VALUES[i]
        yield path, json.dumps(body).encode()
