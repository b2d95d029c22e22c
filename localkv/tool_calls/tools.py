"""`Tools`: the tools of a request, which the model may call."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from localkv.errors import UsageError
from localkv.structured.schema import MOST_PARTS, Room, pointed

TOOL_CHOICES = ("auto", "required", "none")
_MOST_PARTS = 3 * MOST_PARTS
"""Most parts of all tools' schemas, which are read together, and again to find the odd ones."""
JSON_TYPES = frozenset(("null", "boolean", "integer", "number", "string", "array", "object"))


_MOST_FORMS, _MOST_FOLLOWED, _MOST_LOOKED, _DEEPEST = 16, 16, 500, 100
_DESCRIBING = frozenset(("title", "description", "default", "examples", "deprecated"))


class Form(NamedTuple):
    """An object that arguments may be: its properties' schemas, and its required properties."""

    properties: Mapping[str, Any]
    wanted: frozenset[str]


def _both(one: Form, other: Form) -> Form:
    """A form that keeps to both of two forms."""
    properties = {**one.properties, **other.properties}
    for name in one.properties.keys() & other.properties.keys():
        if one.properties[name] is not other.properties[name]:
            properties[name] = {"allOf": [one.properties[name], other.properties[name]]}
    return Form(properties, one.wanted | other.wanted)


def _any(forms: Sequence[Form]) -> Form:
    """A form that takes what any of several forms takes."""
    if len(forms) == 1:
        return forms[0]
    schemas = dict[str, list[Any]]()
    for form in forms:
        for name, schema in form.properties.items():
            known = schemas.setdefault(name, [])
            if all(schema is not one for one in known[:_MOST_FORMS]):
                known.append(schema)
    properties = {
        name: one[0] if len(one) == 1 else {"anyOf": one} for name, one in schemas.items()
    }
    return Form(properties, frozenset.intersection(*(form.wanted for form in forms)))


def _list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else []


@dataclass(frozen=True)
class Tool:
    """A tool.

    Attributes:
        name: the name that calls have.
        parameters: the JSON schema of its arguments, which are an object.
        strict: whether arguments must keep to the schema.
        room: counts the parts of its schema; the tools of a request share it.
    """

    name: str
    parameters: Mapping[str, Any]
    strict: bool = False
    room: Room = field(default_factory=Room, compare=False, repr=False)

    @cached_property
    def forms(self) -> list[Form]:
        """The objects that its arguments may be: one for each alternative of its schema.

        A reference, `allOf`, `anyOf` and `oneOf` count as what they stand for.

        Raises:
            UsageError: it says too much.
        """
        return self._forms(self.parameters, {}, 0) or [Form({}, frozenset())]

    @cached_property
    def properties(self) -> Mapping[str, Any]:
        """The schemas of the arguments of all forms, by name."""
        return _any(self.forms).properties

    def resolved(self, schema: Any) -> Any:
        """A schema, or its definition if it is just a reference."""
        for _ in range(_MOST_FOLLOWED):
            if not isinstance(schema, Mapping) or not isinstance(schema.get("$ref"), str):
                break
            if not schema["$ref"].startswith("#") or set(schema) - _DESCRIBING - {"$ref"}:
                break
            schema = pointed(self.parameters, schema["$ref"])
        return schema

    def _forms(self, schema: Any, known: dict[int, list[Form]], depth: int) -> list[Form]:
        """The forms of a schema; none if it says nothing, or more than is looked at.

        Args:
            known: the forms of schemas by their ids; none while a schema is looked at.
            depth: the references and alternatives that lead to it.
        """
        if not isinstance(schema, Mapping) or len(known) > _MOST_LOOKED or depth > _DEEPEST:
            return []
        if id(schema) in known:
            return known[id(schema)]
        known[id(schema)] = []
        properties, wanted = schema.get("properties"), schema.get("required")
        found = [
            Form(
                properties if isinstance(properties, Mapping) else {},
                frozenset(name for name in _list(wanted) if isinstance(name, str)),
            )
        ]
        parts = [[part] for part in _list(schema.get("allOf"))]
        parts += [_list(schema.get(key)) for key in ("anyOf", "oneOf")]
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference.startswith("#"):
            parts.append([pointed(self.parameters, reference)])
        for alternatives in parts:
            others = [form for part in alternatives for form in self._forms(part, known, depth + 1)]
            if others and len(found) * len(others) > _MOST_FORMS:
                others = [_any(others)]
            if others:
                found = [_both(one, other) for one in found for other in others]
                self.room.take(sum(len(form.properties) for form in found))
        known[id(schema)] = found
        return found

    def types_of(self, argument: str) -> frozenset[str]:
        """The JSON types that an argument may have, as far as its schema says so."""
        schema = self.resolved(self.properties.get(argument))
        if not isinstance(schema, Mapping):
            return frozenset()
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(values, list | tuple):
            return frozenset("string" if isinstance(one, str) else "any" for one in values)
        found = set[str]()
        for part in (schema, *_parts(schema)):
            kind = part.get("type")
            kinds = [kind] if isinstance(kind, str) else _list(kind)
            found.update(one if isinstance(one, str) else "any" for one in kinds)
        return frozenset(found)


class Tools:
    """The tools of a request, and which of them the answer has to call.

    Args:
        described: as OpenAI's API and transformers have them. One without a name can't be called,
            and is for the template alone.
        choice: "auto" leaves it to the model, "required" wants a call, "none" wants none, and the
            name of a tool wants this one; also as OpenAI's objects.
        parallel: an answer may have several calls.

    Attributes:
        choice: "auto", "required" or "none".
        callable: the tools that may be called.
        warnings: one line for each tool whose schema has no grammar (`call_grammar`).

    Raises:
        UsageError: a call is required, and a tool has no name or there is none of that name.
    """

    def __init__(
        self,
        described: Sequence[Mapping[str, Any]] = (),
        choice: str | Mapping[str, Any] = "auto",
        *,
        parallel: bool = True,
    ) -> None:
        self.parallel = parallel
        self.warnings = list[str]()
        self.choice, name = _choice(choice)
        room = Room(_MOST_PARTS)
        every = [
            replace(tool, room=room)
            for i, one in enumerate(described)
            if (tool := _tool(one, f"tools[{i}]", must_be=self.choice == "required"))
        ]
        self.callable = [] if self.choice == "none" else every
        if name is not None:
            self.callable = [tool for tool in every if tool.name == name]
            if not self.callable:
                names = ", ".join(tool.name for tool in every)
                raise UsageError(
                    f"tool_choice names {name!r}, which is none of the tools",
                    hint=f"they are: {names}" if names else "there are none",
                )
        elif self.choice == "required" and not every:
            raise UsageError("tool_choice wants a call, and there are no tools")

    def __iter__(self) -> Iterator[Tool]:
        return iter(self.callable)

    def __bool__(self) -> bool:
        return bool(self.callable)

    def has(self, name: str) -> bool:
        """Whether a tool of this name may be called."""
        return any(tool.name == name for tool in self.callable)

    def types_of(self, name: str, argument: str) -> frozenset[str]:
        """The JSON types that a tool's argument may have, as far as they are known."""
        found = (tool.types_of(argument) for tool in self.callable if tool.name == name)
        return next(found, frozenset())


def _parts(schema: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    found: list[Mapping[str, Any]] = []
    for key in ("anyOf", "oneOf", "allOf"):
        parts = schema.get(key)
        if isinstance(parts, list | tuple):
            found += [part for part in parts if isinstance(part, Mapping)]
    return found


def _tool(described: Mapping[str, Any], where: str, *, must_be: bool) -> Tool | None:
    if not isinstance(described, Mapping):
        raise UsageError(f"{where} is a {type(described).__name__}, not a JSON schema")
    function = described.get("function", described)
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name:
        if not must_be:
            return None
        raise UsageError(f"{where} has no name")
    parameters = function.get("parameters", function.get("input_schema"))
    if parameters is None:
        parameters = {"type": "object", "properties": {}}
    if not isinstance(parameters, Mapping):
        raise UsageError(f"{where}.function.parameters is no JSON schema of an object")
    return Tool(name, parameters, strict=function.get("strict") is True)


def _choice(choice: str | Mapping[str, Any]) -> tuple[str, str | None]:
    """ "auto", "required" or "none", and the name of the tool that is wanted, if it is one."""
    if isinstance(choice, str):
        return (choice, None) if choice in TOOL_CHOICES else ("required", choice)
    if isinstance(choice, Mapping):
        function = choice.get("function", choice)
        name = function.get("name") if isinstance(function, Mapping) else None
        if isinstance(name, str):
            return "required", name
    raise UsageError(
        "tool_choice is none", hint='"auto", "required", "none", or the name of a tool'
    )
