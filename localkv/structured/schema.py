"""JSON schemas, put into the keywords that llguidance has a grammar for.

`plain_schema` drops keywords that say nothing about a text, closes objects that list their
properties, and replaces keywords that others can express. It is a function of the schema alone.
Schemas come from strangers, so their depth and the size of the result are bounded.

An object is closed where everything that is said of it is known. The parts of an `allOf` list
properties for each other, and an alternative of an `anyOf` has the properties beside it, too. So a
definition may come twice: closed where it stands alone, and open where something else closes it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeGuard
from urllib.parse import unquote, urldefrag, urljoin

from localkv.errors import UsageError

NOTHING = "nothing satisfies it"
"""The reason why a schema is refused that allows no text."""

Json: TypeAlias = Any
Object: TypeAlias = dict[str, Any]

MOST_NESTED, MOST_CHAINED = 100, 500
"""Most levels of a schema, and most references in a chain that says nothing else."""
MOST_PARTS = 10_000
"""Most schemas within a schema, after definitions are written out where needed."""
MOST_COMPARED = 30_000
"""Most pairs of alternatives that are compared for an overlap."""
MOST_EXACT = 2**53
"""The largest integer below which llguidance, which has doubles, has all integers."""
_MOST_BOUND = 9_223_372_036_854_774_784
"""The largest double below 2^63: beyond it llguidance has no ranges."""
_LONG_BOUND = 10**17
"""From here on a range needs both ends."""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_STYLE = {
    "lenient": False,
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
"""JSON is written as `json.dumps` does: a small model can't go on with white space forever."""
_BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
_KEPT = _words(
    "type enum const items prefixItems additionalItems minItems maxItems properties required "
    "additionalProperties patternProperties minProperties maxProperties minLength maxLength "
    "pattern format multipleOf"
) | frozenset(_BOUNDS)
"""Keywords that llguidance has, without those that combine schemas."""
_WITHOUT_GRAMMAR = _words(
    "not if then else uniqueItems contains minContains maxContains propertyNames dependencies "
    "dependentRequired dependentSchemas unevaluatedItems unevaluatedProperties $dynamicRef "
    "$recursiveRef"
)
"""Keywords of a draft that say something, but have no grammar."""
_FORMATS = _words(
    "date-time time date duration email hostname ipv4 ipv6 uri uuid idn-email idn-hostname "
    "uri-reference iri iri-reference uri-template json-pointer relative-json-pointer regex"
)
"""Formats of a draft; others say nothing, like keywords that no draft knows."""
_PARTS = ("allOf", "anyOf", "oneOf", "$ref")

_DAYS = r"(\d+Y(\d+M)?(\d+D)?|\d+M(\d+D)?|\d+D)"
_TIME = r"T(\d+H(\d+M)?(\d+([.,]\d+)?S)?|\d+M(\d+([.,]\d+)?S)?|\d+([.,]\d+)?S)"
_LABEL = "[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
_SAME: dict[str, Object] = {
    r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$": {"pattern": r"^[+-]?(\d+\.?\d*|\.\d+)$"},
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]"
    r"@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$": {
        "pattern": r"^([A-Za-z0-9_'+\-]+\.)*[A-Za-z0-9_'+\-]*[A-Za-z0-9_+-]"
        r"@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
    },
    r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?"
    r"(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$": {
        "pattern": rf"^P(\d+W|{_DAYS}({_TIME})?|{_TIME})$"
    },
    r"^(?=.{1,253}\.?$)[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
    r"(?:\.[a-zA-Z0-9](?:[-0-9a-zA-Z]{0,61}[0-9a-zA-Z])?)*\.?$": {
        "pattern": rf"^{_LABEL}(\.{_LABEL})*$",
        "maxLength": 253,
    },
    r"^(?=[\s\S]*[\p{Extended_Pictographic}\p{Regional_Indicator}\u20E3])"
    r"[\p{Extended_Pictographic}\p{Emoji_Component}]+$": {
        "pattern": r"^[\p{Extended_Pictographic}\p{Regional_Indicator}]"
        r"[\p{Extended_Pictographic}\p{Emoji_Component}]*$"
    },
}
"""pydantic's and zod's patterns with look-around, which llguidance lacks, and the same without."""


class Room:
    """How many parts the schemas that share it may still have.

    Attributes:
        n_left: parts.
    """

    def __init__(self, n: int = MOST_PARTS) -> None:
        self.n_left = self._n = n

    def take(self, n: int = 1) -> None:
        """Count parts.

        Raises:
            UsageError: there are too many.
        """
        self.n_left -= n
        if self.n_left < 0:
            raise UsageError(f"it has more than {self._n:,} parts")


def plain_schema(schema: Json, root: Json = None, room: Room | None = None) -> Json:
    """A schema in keywords that have a grammar, closed where it lists properties.

    Args:
        schema: an object or a boolean.
        root: the document of its references; the schema itself by default.
        room: counts its parts, with the parts of other schemas.

    Raises:
        UsageError: it is nested too deeply, or has too many parts; a keyword has a wrong value; or
            a reference leads nowhere or in a circle. A number or a keyword without a grammar raises
            it, too.
    """
    try:
        return _Plain(schema if root is None else root, room or Room()).whole(schema)
    except RecursionError:
        raise _too_deep() from None


def styled(
    schema: Json, what: str, root: Json = None, room: Room | None = None
) -> dict[str, object]:
    """A schema as llguidance takes it, with the white space of answers.

    Args:
        what: names it in errors.
        schema, root, room: as for `plain_schema`.

    Raises:
        UsageError: there is no grammar for it, or nothing satisfies it.
    """
    try:
        plain = plain_schema(schema, root, room)
    except UsageError as error:
        raise UsageError(f"{what} can't be used: {error.message}", hint=error.hint) from None
    if plain is False:
        raise UsageError(f"{what} can't be used: {NOTHING}")
    return {**({} if plain is True else plain), "x-guidance": _STYLE}


@dataclass(frozen=True)
class _Listed:
    """The properties that schemas of one value list and require, and whether one takes others."""

    names: tuple[str, ...] = ()
    wanted: tuple[str, ...] = ()
    lists: bool = False
    is_open: bool = False
    has_patterns: bool = False

    @classmethod
    def of(cls, several: Sequence[_Listed]) -> _Listed:
        """All that several schemas list."""
        return cls(
            tuple(dict.fromkeys(name for one in several for name in one.names)),
            tuple(dict.fromkeys(name for one in several for name in one.wanted)),
            any(one.lists for one in several),
            any(one.is_open for one in several),
            any(one.has_patterns for one in several),
        )

    @property
    def all_names(self) -> tuple[str, ...]:
        """The listed properties, and the required ones beside them."""
        return tuple(dict.fromkeys((*self.names, *self.wanted)))


class _Plain:
    """Makes one schema plain.

    Args:
        root: the document of its references.
        room: counts its parts.
    """

    def __init__(self, root: Json, room: Room) -> None:
        self._root = root
        self._room = room
        self._by_uri: dict[str, Json] = {}
        self._bases: dict[int, str] | None = None
        self._defs: Object = {}
        self._names: dict[tuple[int, bool], str] = {}
        self._waiting = list[tuple[str, Json, bool]]()
        self._listed: dict[int, _Listed] = {}
        self._listing: set[int] = set()
        self._n_compared = 0

    def whole(self, schema: Json) -> Json:
        """The schema, with the definitions that it needs."""
        plain = self._at(schema, 0)
        while self._waiting:
            name, target, closes = self._waiting.pop()
            self._defs[name] = self._at(target, 0, closes=closes)
        if self._defs and isinstance(plain, dict):
            plain = {**plain, "$defs": self._defs}
        if not self._can_end(plain):
            return False
        self._open_alternatives(plain)
        return plain

    def _can_end(self, plain: Json) -> bool:
        """Whether some value of a plain schema is finite."""
        ending = set[str]()
        for _ in range(_MOST_ROUNDS):
            n_before = len(ending)
            for name in reversed(self._defs):
                if name not in ending and _ends(self._defs[name], ending):
                    ending.add(name)
            if len(ending) == n_before:
                return _ends(plain, ending)
        return True  # perhaps

    def _open_alternatives(self, plain: Json) -> None:
        """Make `anyOf` of each `oneOf` in a plain schema whose alternatives can't overlap."""
        waiting = [plain]
        while waiting:
            one = waiting.pop()
            if not isinstance(one, dict):
                continue
            parts = one.get("oneOf")
            if parts and len(parts) <= _MOST_ALTERNATIVES and "anyOf" not in one:
                pairs = itertools.combinations(parts, 2)
                if all(self._are_apart(a, b, 0) for a, b in pairs):
                    one["anyOf"] = one.pop("oneOf")
            for key in ("properties", "patternProperties", "$defs"):
                waiting += one.get(key, {}).values()
            for key in ("allOf", "anyOf", "oneOf", "prefixItems"):
                waiting += one.get(key, [])
            for key in ("additionalProperties", "additionalItems", "items"):
                inner = one.get(key)
                waiting += inner if isinstance(inner, list) else [inner]

    # one value

    def _at(
        self, schema: Json, depth: int, beside: tuple[str, ...] = (), *, closes: bool = True
    ) -> Json:
        """A schema, made plain.

        Args:
            beside: properties that other schemas of the same value list.
            closes: close an object that lists properties; if not, the caller does so.
        """
        self._room.take(1 + len(beside))
        if depth > MOST_NESTED:
            raise _too_deep()
        if schema is True and closes and beside:
            schema = {}
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise _no_value("a schema", schema)
        given = _meant(self._said_by(schema))
        if isinstance(given, bool):
            return given
        base = self._base_of(given, depth + 1)
        if any(key in given for key in _PARTS):
            return self._put_together(schema, given, base, depth + 1, beside, closes=closes)
        return _closed(base, beside) if closes else base

    def _put_together(
        self,
        schema: Object,
        given: Object,
        base: Object,
        depth: int,
        beside: tuple[str, ...],
        *,
        closes: bool,
    ) -> Json:
        """A schema with other schemas of the same value in it, made plain.

        Args:
            schema, given, base: as it is written; its keywords; and its own keywords alone.
        """
        is_told = schema.get("unevaluatedProperties") is False
        if is_told:
            closes, beside = True, ()  # which knows of its own parts only
            if self._listed_by(schema).has_patterns:
                raise _no_grammar("unevaluatedProperties")
        both = [*_list_of(given, "allOf")]
        if "$ref" in given:
            both.append(self._target(schema))
        either = [key for key in ("anyOf", "oneOf") if key in given]
        if not base and not either and len(both) == 1:
            if "$ref" in given:
                self._listed_by(schema)  # finds a circle
            return self._part(both[0], depth, beside, closes=closes, named="$ref" in given)
        listed = self._listed_by(schema)  # of all, alternatives included
        if len(either) == 1:
            listed = _Listed.of([_lists(given), *map(self._listed_by, both)])
        if beside:
            listed = _Listed.of([listed, _Listed(beside, lists=True)])
        closes = closes and not (listed.is_open or listed.has_patterns)
        names = listed.names if is_told else listed.all_names
        parts = [
            self._part(one, depth, closes=False, named="$ref" in given and one is both[-1])
            for one in both
        ]
        if len(either) == 1:
            parts.append(self._either(given, either[0], depth, names, closes=closes))
        else:
            parts += [self._either(given, key, depth, closes=False) for key in either]
            if closes and listed.lists:
                parts.append(_only(names))
        return _all_of(base, parts)

    def _part(
        self,
        schema: Json,
        depth: int,
        beside: tuple[str, ...] = (),
        *,
        closes: bool,
        named: bool = False,
    ) -> Json:
        """A schema within another, made plain.

        Args:
            named: a reference names it, so it may become a definition of its own.
        """
        if not isinstance(schema, dict):
            return self._at(schema, depth, beside, closes=closes)
        if not named:
            is_reference = schema.get("$ref") is not None and not _SPEAKING & set(schema) - {"$ref"}
            if not is_reference:
                return self._at(schema, depth, beside, closes=closes)
            self._listed_by(schema)  # finds a circle
            return self._part(self._target(schema), depth, beside, closes=closes, named=True)
        if closes and beside:
            return self._at(schema, depth, beside)
        key = (id(schema), closes)
        if key not in self._names:
            self._names[key] = str(len(self._names))
            self._waiting.append((self._names[key], schema, closes))
        return {"$ref": f"#/$defs/{self._names[key]}"}

    def _either(
        self, given: Object, key: str, depth: int, beside: tuple[str, ...] = (), *, closes: bool
    ) -> Json:
        """The alternatives of `anyOf` or `oneOf`."""
        parts = [self._part(one, depth, beside, closes=closes) for one in _list_of(given, key)]
        parts = [one for one in parts if one is not False]
        if not parts:
            return False
        return parts[0] if len(parts) == 1 else {key: parts}

    def _base_of(self, given: Object, depth: int) -> Object:
        """A schema's own keywords, with the schemas of the values within its value made plain."""
        base = {key: value for key, value in given.items() if key in _KEPT}
        for key in ("properties", "patternProperties"):
            if key in base:
                if not isinstance(base[key], dict):
                    raise _no_value(key, base[key])
                base[key] = {name: self._inner(one, depth) for name, one in base[key].items()}
        if not isinstance(base.get("prefixItems", []), list):
            raise _no_value("prefixItems", base["prefixItems"])
        for key in ("additionalProperties", "additionalItems", "items"):
            if key in base and not isinstance(base[key], list):
                base[key] = self._inner(base[key], depth)
        for key in ("items", "prefixItems"):
            if key in base and isinstance(base[key], list):
                base[key] = [self._inner(one, depth) for one in base[key]]
        for value in (*_values_of(base), base.get("multipleOf")):
            _check_exact(value)
        _bound(base)
        return base

    def _inner(self, schema: Json, depth: int) -> Json:
        return self._part(schema, depth, (), closes=True)

    # what objects list

    def _listed_by(self, schema: Json) -> _Listed:
        """The properties that a schema and its parts list for their value.

        Raises:
            UsageError: it refers to itself for the same value.
        """
        if not isinstance(schema, dict):
            return _Listed()
        found = self._listed.get(id(schema))
        if found is not None:
            return found
        if id(schema) in self._listing:
            raise UsageError(
                "it refers to itself for the same value, so nothing satisfies it",
                hint="a circle of $ref needs properties or items somewhere in it",
            )
        if len(self._listing) > MOST_CHAINED:
            raise _too_deep()
        self._listing.add(id(schema))
        given = dict(self._said_by(schema))
        _unfold_condition(given)
        found = _lists(given)
        parts = [one for key in ("allOf", "anyOf", "oneOf") for one in _list_of(given, key)]
        if "$ref" in given:
            parts.append(self._target(schema))
        found = _Listed.of([found, *map(self._listed_by, parts)])
        self._room.take(len(found.names) // _NAMES_OF_A_PART)
        self._listing.discard(id(schema))
        self._listed[id(schema)] = found
        return found

    # references

    def _said_by(self, schema: Object) -> Object:
        """The keywords that are not null, with `propertyNames` written out.

        Serialisers of some languages write null for a missing value.
        """
        said = {key: one for key, one in schema.items() if one is not None or key == "const"}
        names, n_followed = said.get("propertyNames"), 0
        while isinstance(names, dict) and set(names) & _SPEAKING == {"$ref"}:
            names, n_followed = self._target(names), n_followed + 1
            if n_followed > MOST_NESTED:
                raise _too_deep()
        return {**said, "propertyNames": names} if n_followed else said

    def _target(self, schema: Object) -> Json:
        """The target of a schema's reference.

        Raises:
            UsageError: there is none.
        """
        ref = schema["$ref"]
        if not isinstance(ref, str):
            raise _no_value("$ref", ref)
        found: Json = _NOTHING
        if ref == "#" or ref.startswith("#/"):
            found = pointed(self._root, ref)
        if found is _NOTHING:
            if self._bases is None:
                self._bases = self._index()
            uri, pointer = urldefrag(_joined(self._bases.get(id(schema), ""), ref))
            found = self._by_uri.get(f"{uri}#{pointer}", _NOTHING)
            if found is _NOTHING and uri in self._by_uri:
                found = pointed(self._by_uri[uri], f"#{pointer}")
        if found is _NOTHING:
            raise UsageError(
                f"$ref names {ref!r:.200}, which is not in the schema",
                hint="nothing is fetched: put it under $defs",
            )
        if not isinstance(found, bool | dict):
            raise _no_value(f"what $ref {ref!r:.100} names", found)
        return found

    def _index(self) -> dict[int, str]:
        """Note the schemas that have an id, which references within them are relative to."""
        bases, waiting = dict[int, str](), [(self._root, "")]
        while waiting:
            value, base = waiting.pop()
            if isinstance(value, list):
                waiting += [(one, base) for one in value]
            if not isinstance(value, dict):
                continue
            name = value.get("$id", value.get("id"))
            if isinstance(name, str):
                base, _ = urldefrag(_joined(base, name))
                self._by_uri.setdefault(base, value)
                self._by_uri.setdefault(f"{base}#", value)
            anchor = value.get("$anchor")
            if isinstance(anchor, str):
                self._by_uri.setdefault(f"{base}#{anchor}", value)
            bases[id(value)] = base
            waiting += [(one, base) for one in value.values()]
        return bases

    # alternatives

    def _are_apart(self, one: Json, other: Json, depth: int) -> bool:
        """Whether no value satisfies both of two plain schemas, as far as that is easy to see."""
        if one is False or other is False:
            return True
        self._n_compared += 1
        if depth > _MOST_LOOKED or self._n_compared > MOST_COMPARED:
            return False
        if not (isinstance(one, dict) and isinstance(other, dict)):
            return False
        for a, b in ((one, other), (other, one)):
            if "$ref" in a:
                target = self._defs[a["$ref"].rpartition("/")[2]]
                if self._are_apart(target, b, depth + 1):
                    return True
            for key in ("anyOf", "oneOf"):
                if key in a and all(self._are_apart(part, b, depth + 1) for part in a[key]):
                    return True
            if any(self._are_apart(part, b, depth + 1) for part in a.get("allOf", ())):
                return True
        values = [_values_of(side) for side in (one, other)]
        if all(values):
            self._n_compared += (len(values[0]) + len(values[1])) // _NAMES_OF_A_PART
            return {*map(_mark_of, values[0])}.isdisjoint(map(_mark_of, values[1]))
        types = [_types_of(side) for side in (one, other)]
        if not types[0] & types[1]:
            return True
        if types[0] & types[1] <= {"integer", "number"}:
            return _below(one, other) or _below(other, one)
        if types[0] & types[1] != {"object"}:
            return False
        wanted = [frozenset(_names_in(side.get("required"))) for side in (one, other)]
        inner = [side.get("properties") or {} for side in (one, other)]
        for i, side in enumerate((other, one)):
            is_closed = side.get("additionalProperties") is False
            if is_closed and not side.get("patternProperties") and wanted[i] - set(inner[1 - i]):
                return True
        return any(
            self._are_apart(inner[0].get(key, True), inner[1].get(key, True), depth + 1)
            for key in wanted[0] & wanted[1]
        )


_MOST_LOOKED, _MOST_ROUNDS = 8, 50
_NAMES_OF_A_PART = 16
"""Listed names that take as long as a part."""
_MOST_ALTERNATIVES = 500
_NOTHING = object()
_SPEAKING = _KEPT | _WITHOUT_GRAMMAR | frozenset(_PARTS)
_NEUTRAL = _words(
    "uniqueItems propertyNames not minLength minItems minProperties required allOf "
    "dependencies dependentRequired dependentSchemas unevaluatedItems patternProperties"
)


def _is_neutral(key: str, value: Json) -> bool:
    """Whether a keyword with this value allows everything."""
    if key == "uniqueItems":
        return value is False
    if key == "not":
        return value is False or (isinstance(value, dict) and _is_anything(value.get("not")))
    if key == "propertyNames":
        return value is True or (isinstance(value, dict) and _is_any_name(value))
    if key == "unevaluatedItems":
        return _is_anything(value)
    if key.startswith("min"):
        return _is_number(value) and value <= 0
    if key.startswith("depend") and isinstance(value, dict):
        return all(one == [] or _is_anything(one) for one in value.values())
    return value in ([], {})


def _is_anything(schema: Json) -> bool:
    return schema is True or schema == {}


def _is_any_name(schema: Object) -> bool:
    """Whether every name of a property satisfies a schema."""
    said = {key: value for key, value in schema.items() if key in _SPEAKING}
    kind = said.pop("type", "string")
    is_text = kind == "string" or (isinstance(kind, list) and "string" in kind)
    return is_text and all(
        (key in _NEUTRAL and _is_neutral(key, value)) or (key == "format" and value not in _FORMATS)
        for key, value in said.items()
    )


def _meant(schema: Object) -> Object | bool:
    """The keywords of a schema that say something, replaced where others can express them.

    Raises:
        UsageError: a keyword has no grammar.
    """
    given = {key: value for key, value in schema.items() if key in _SPEAKING}
    for key in _NEUTRAL & set(given):
        if _is_neutral(key, given[key]):
            del given[key]
    if "not" in given and _is_anything(given["not"]):
        return False
    _unfold_condition(given)
    if "contains" not in given or (given.get("minContains") == 0 and "maxContains" not in given):
        for key in ("contains", "minContains", "maxContains"):
            given.pop(key, None)
    most = given.get("maxItems")
    if given.get("uniqueItems") is True and _is_number(most) and most <= 1:
        del given["uniqueItems"]
    if not isinstance(given.get("items"), list):
        given.pop("additionalItems", None)
    if isinstance(given.get("format"), str) and given["format"] not in _FORMATS:
        del given["format"]
    if isinstance(given.get("pattern"), str):
        given = given | _SAME.get(given["pattern"], {})
    _name_properties(given)
    others = given.get("unevaluatedProperties")
    has_parts = any(key in given for key in _PARTS)
    if "unevaluatedProperties" in given and not has_parts:
        given.setdefault("additionalProperties", others)
    if not has_parts or isinstance(others, bool) or others == {}:
        given.pop("unevaluatedProperties", None)  # of parts, `_Plain` closes them or leaves them
    left = [key for key in schema if key in given and key in _WITHOUT_GRAMMAR]
    if left:
        raise _no_grammar(", ".join(left))
    return given


def _unfold_condition(given: Object) -> None:
    """Leave out conditions that say nothing, or replace them if their outcome is known."""
    if "if" not in given or not ("then" in given or "else" in given):
        for key in ("if", "then", "else"):
            given.pop(key, None)
    elif _is_anything(given["if"]) or given["if"] is False:
        taken = given.get("else" if given["if"] is False else "then", True)
        for key in ("if", "then", "else"):
            given.pop(key, None)
        given["allOf"] = [*_list_of(given, "allOf"), taken]


def _lists(schema: Object) -> _Listed:
    """The properties that a schema itself lists."""
    given = dict(schema)
    _name_properties(given)
    properties = given.get("properties")
    others = given.get("additionalProperties", given.get("unevaluatedProperties", False))
    lists = isinstance(properties, dict)
    return _Listed(
        tuple(properties) if isinstance(properties, dict) else (),
        tuple(_names_in(given.get("required"))) if lists else (),
        lists or given.get("unevaluatedProperties") is False,
        others is not False,
        bool(given.get("patternProperties")),
    )


def _name_properties(given: Object) -> None:
    """Say in other words which names properties may have, where there are some."""
    names = given.get("propertyNames")
    if not isinstance(names, dict) or any(
        key in given for key in ("properties", "patternProperties", "unevaluatedProperties")
    ):
        return
    said = {key: value for key, value in names.items() if key in _SPEAKING and key != "type"}
    if names.get("type", "string") != "string":
        return
    schema = given.get("additionalProperties", True)
    listed, pattern = _values_of(said), said.get("pattern")
    if len(said) == 1 and listed and all(isinstance(one, str) for one in listed):
        given["properties"] = dict.fromkeys(listed, schema)
    elif len(said) == 1 and isinstance(pattern, str):
        given["patternProperties"] = {pattern: schema}
    elif set(said) <= {"minLength", "maxLength"}:
        least, most = said.get("minLength", 0), said.get("maxLength", "")
        if not all(isinstance(one, int) and one >= 0 for one in said.values()):
            return
        given["patternProperties"] = {f"^[\\s\\S]{{{least},{most}}}$": schema}
    else:
        return
    given["additionalProperties"] = False
    del given["propertyNames"]


def _closed(base: Object, beside: tuple[str, ...]) -> Object:
    """A schema of an object with the properties that it lists, and no others."""
    lists = "properties" in base or bool(beside)
    if not lists or any(key in base for key in ("additionalProperties", "patternProperties")):
        return base
    if "type" not in base and not _values_of(base):
        if "properties" in base and not beside:
            base = {"type": "object", **base}
    elif "object" not in _types_of(base):
        return base
    names = (*base.get("properties", ()), *beside, *_names_in(base.get("required")))
    properties = dict.fromkeys(names, True) | base.get("properties", {})
    return {**base, "properties": properties, "additionalProperties": False}


def _only(names: tuple[str, ...]) -> Object:
    """A schema that allows an object no properties but these."""
    return {"properties": dict.fromkeys(names, True), "additionalProperties": False}


def _all_of(base: Object, parts: Sequence[Json]) -> Json:
    """A schema beside which others hold, too."""
    if any(one is False for one in parts):
        return False
    said = [one for one in parts if one is not True and one != {}]
    if not base and len(said) == 1:
        return said[0]
    if len(said) == 1 and not set(said[0]) & set(base):
        return {**base, **said[0]}
    return {**base, "allOf": said} if said else base


def _names_in(value: Json) -> list[str]:
    """The texts in a list; none in anything else."""
    return [one for one in value if isinstance(one, str)] if isinstance(value, list) else []


def _list_of(given: Object, key: str) -> list[Json]:
    value = given.get(key, [])
    if not isinstance(value, list):
        raise _no_value(key, value)
    return value


def _no_grammar(keywords: str) -> UsageError:
    return UsageError(
        f"no grammar for {keywords}", hint="leave it out, and check the finished text"
    )


def _too_deep() -> UsageError:
    return UsageError("it is nested too deeply")


def _no_value(key: str, value: Json) -> UsageError:
    return UsageError(f"{key} can't be {value!r:.60}")


def _joined(base: str, reference: str) -> str:
    try:
        return urljoin(base, reference)
    except ValueError:  # a host that can be none
        return reference


def pointed(root: Json, pointer: str) -> Json:
    """The target of a JSON pointer after `#`; an object of no JSON type if there is none."""
    found = root
    for part in pointer.removeprefix("#").split("/")[1:]:
        key = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict) and key in found:
            found = found[key]
        elif isinstance(found, list) and key.isascii() and key.isdigit() and len(key) < 10:
            found = found[int(key)] if int(key) < len(found) else _NOTHING
        else:
            return _NOTHING
    return found


# numbers


def _is_number(value: Json) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_exact(value: Json) -> None:
    """Refuse a value if one of its numbers would come out as another.

    Raises:
        UsageError: one would.
    """
    for one in _leaves(value):
        if _is_number(one) and abs(one) > MOST_EXACT:
            raise UsageError(
                f"there is no grammar for the number {_short(one)} itself: it is beyond 2^53",
                hint='ask for it as text: "type": "string"',
            )


def _leaves(value: Json) -> Iterator[Json]:
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            waiting += one.values()
        elif isinstance(one, list):
            waiting += one
        else:
            yield one


def _short(number: float) -> str:
    if isinstance(number, int) and number.bit_length() > 128:
        return f"{'-' if number < 0 else ''}2^{number.bit_length() - 1}"
    return repr(number)


def _bound(base: Object) -> None:
    """Move bounds beyond 2^53 inwards to numbers that llguidance has.

    Raises:
        UsageError: there is no number left.
    """
    given = {key: base[key] for key in _BOUNDS if _is_number(base.get(key))}
    for key, value in given.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise _no_value(key, value)
    if not any(abs(value) >= MOST_EXACT for value in given.values()):
        return
    is_whole = base.get("type") == "integer"
    low = _inward(given.get("minimum"), given.get("exclusiveMinimum"), is_whole=is_whole, up=True)
    high = _inward(given.get("maximum"), given.get("exclusiveMaximum"), is_whole=is_whole, up=False)
    if high is None and low is not None and low >= _LONG_BOUND:
        high = _MOST_BOUND
    if low is None and high is not None and high <= -_LONG_BOUND:
        low = -_MOST_BOUND
    if (low is not None and low > _MOST_BOUND) or (high is not None and high < -_MOST_BOUND):
        beyond = next(value for value in given.values() if abs(value) > _MOST_BOUND)
        raise UsageError(f"there is no grammar for numbers beyond {_short(beyond)}")
    for key in given:
        del base[key]
    if low is not None:
        base["minimum"] = max(low, -_MOST_BOUND)
    if high is not None:
        base["maximum"] = min(high, _MOST_BOUND)


def _inward(
    inclusive: float | None, exclusive: float | None, *, is_whole: bool, up: bool
) -> float | None:
    """The double nearest to a bound that is not further out."""
    toward, tighter = (math.inf, max) if up else (-math.inf, min)
    found = list[float]()
    if inclusive is not None:
        found.append(_double(inclusive, toward))
    if exclusive is not None:
        step = 1 if up else -1
        if is_whole and isinstance(exclusive, int):
            found.append(_double(exclusive + step, toward))
        else:
            found.append(math.nextafter(_double(exclusive, toward), toward))
    if not found:
        return None
    bound = tighter(found)
    return int(bound) if bound == int(bound) else bound


def _double(value: float, toward: float) -> float:
    try:
        double = float(value)
    except OverflowError:
        return 1e300 if value > 0 else -1e300
    if (double < value and toward > 0) or (double > value and toward < 0):
        return math.nextafter(double, toward)
    return double


# what a schema says of a value


def _ends(plain: Json, ending: set[str]) -> bool:
    """Whether a plain schema may have a finite value, if the definitions in `ending` have one."""
    if not isinstance(plain, dict):
        return plain is not False
    if "$ref" in plain and plain["$ref"].rpartition("/")[2] not in ending:
        return False
    if not all(_ends(one, ending) for one in plain.get("allOf", ())):
        return False
    for key in ("anyOf", "oneOf"):
        if key in plain and not any(_ends(one, ending) for one in plain[key]):
            return False
    types = _types_of(plain)
    if types == {"object"}:
        inner = plain.get("properties", {})
        wanted = _names_in(plain.get("required"))
        return all(_ends(inner.get(name, True), ending) for name in wanted)
    least = plain.get("minItems", 0)
    if types == {"array"} and _is_number(least) and least > 0:
        items = plain.get("items", True)
        first = plain.get("prefixItems", items)
        return all(_ends(one, ending) for one in (first if isinstance(first, list) else [first]))
    return True


_TYPES = frozenset(("null", "boolean", "integer", "number", "string", "array", "object"))
_KINDS = {bool: "boolean", int: "number", float: "number", str: "string", list: "array"}


def _types_of(schema: Object) -> frozenset[str]:
    """The types that a value may have; an integer is a number, too."""
    values = _values_of(schema)
    if values:
        return frozenset(
            "null" if one is None else _KINDS.get(type(one), "object") for one in values
        )
    kind = schema.get("type", list(_TYPES))
    kinds = frozenset([kind] if isinstance(kind, str) else _names_in(kind))
    return kinds - {"integer"} | {"number"} if "integer" in kinds else kinds


def _values_of(schema: Mapping[str, Json]) -> list[Json]:
    """All values that there are, if a schema lists them."""
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum", [])
    return values if isinstance(values, list) else []


def _mark_of(value: Json) -> tuple[str, Json]:
    """A key that is equal for values that are equal in JSON, where true is no number, also within
    lists and objects."""
    if isinstance(value, dict | list):
        return type(value).__name__, None
    return "boolean" if isinstance(value, bool) else "", value


def _below(one: Object, other: Object) -> bool:
    """Whether every number of a schema is below every number of another."""
    high, low = one.get("maximum"), other.get("minimum")
    if _is_number(high) and _is_number(low) and high < low:
        return True
    edges = (one.get("exclusiveMaximum"), low), (high, other.get("exclusiveMinimum"))
    return any(_is_number(a) and _is_number(b) and a <= b for a, b in edges)
