"""JSON schemas: what is closed, what says nothing, what is refused, and how answers are spaced."""

from __future__ import annotations

import contextlib
import json
import time
from typing import Any

import pytest
from llguidance import LLMatcher

from localkv.errors import UsageError
from localkv.loader.tokenizer import load_tokenizer
from localkv.structured.constraint import GrammarTokens
from localkv.structured.grammar import Grammar
from localkv.structured.schema import MOST_EXACT, plain_schema
from support.client_tools import SCHEMAS
from support.paths import ROOT

TOKENS = GrammarTokens(load_tokenizer(ROOT / "models/tales-4M-Q8_0.gguf")).for_llguidance


def takes(schema: Any, text: str) -> bool:
    matcher = LLMatcher(TOKENS, Grammar.json_schema(schema).source, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = TOKENS.tokenize_str(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def has(name: str, **others: Any) -> dict[str, Any]:
    """An object with one required property, an integer."""
    return {
        "type": "object",
        "properties": {name: {"type": "integer"}},
        "required": [name],
    } | others


A, B, K = has("a"), has("b"), has("k")
DEFS = {"$defs": {"A": A, "B": B, "N": has("v")}}
DEFS["$defs"]["N"]["properties"]["next"] = {"$ref": "#/$defs/N"}
REF_A, REF_B, REF_N = ({"$ref": f"#/$defs/{name}"} for name in "ABN")


CLOSED = [
    (A, ["a"], ["ab", "c"]),
    (has("a", additionalProperties=True), ["a", "ab"], []),
    (has("a", additionalProperties={"type": "integer"}), ["a", "ab"], []),
    (has("a", additionalProperties={"type": "null"}), ["a"], ["ab"]),
    (has("a", unevaluatedProperties={}), ["a", "ab"], []),
    (has("a", patternProperties={"^b": {}}, additionalProperties=False), ["a", "ab"], ["ac"]),
    ({"type": "object"}, ["", "a", "ab"], []),
    ({"type": "object", "properties": {}}, [""], ["a"]),
    ({"properties": {"a": {}}}, ["", "a"], ["b"]),
    (has("a", required=["a", "c"]), ["ac"], ["a", "acd"]),
    ({"allOf": [A, B]}, ["ab"], ["a", "abc"]),
    ({"allOf": [A, has("b", additionalProperties=True)]}, ["ab", "abc"], ["a"]),
    ({**K, "allOf": [A], "unevaluatedProperties": False}, ["ka"], ["kab", "k"]),
    (
        {
            **K,
            "allOf": [
                {"unevaluatedProperties": False, "allOf": [K, {}]},
                {"properties": {"b": {}}},
            ],
        },
        ["k"],
        ["kb"],
    ),
    ({"anyOf": [A, B]}, ["a", "b"], ["ab"]),
    ({"anyOf": [A, has("b", additionalProperties=True)]}, ["a", "b", "bc"], ["ac"]),
    ({"oneOf": [A, B]}, ["a", "b"], ["ab"]),
    ({**K, "anyOf": [A, B]}, ["ka", "kb"], ["k", "kab"]),
    ({**K, "anyOf": [A, True]}, ["k", "ka"], ["kb"]),
    ({**K, "oneOf": [A, B]}, ["ka", "kb"], ["k", "kab"]),
    ({**K, "allOf": [A, {"anyOf": [B, {"properties": {"c": {}}}]}]}, ["kab", "kac"], ["kad", "k"]),
    (
        {"properties": {"a": {}, "b": {}}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        ["a", "b", "ab"],
        ["", "ac"],
    ),
    ({**DEFS, **REF_A, "title": "x"}, ["a"], ["ab"]),
    ({**DEFS, "allOf": [REF_A, REF_B]}, ["ab"], ["a", "abc"]),
    ({**DEFS, "allOf": [REF_A], "default": {}}, ["a"], ["ab"]),
    ({**DEFS, "oneOf": [REF_A, REF_B]}, ["a", "b"], ["ab"]),
    ({**DEFS, **REF_N, "properties": {"c": {}}}, ["v", "cv"], ["vd"]),
    ({"$ref": "#q", "$defs": {"a": {"$anchor": "q", **A}}}, ["a"], ["ab"]),
    ({"$id": "http://x/y", "$ref": "z", "$defs": {"a": {"$id": "z", **A}}}, ["a"], ["ab"]),
    ({"if": True, "then": A, "properties": {"b": {}}}, ["ba"], ["a1", "bac"]),
]


@pytest.mark.parametrize(("schema", "yes", "no"), CLOSED)
def test_objects_have_the_properties_that_are_listed(
    schema: Any, yes: list[str], no: list[str]
) -> None:
    """Texts stand for objects with a property for each of their letters."""

    def text(names: str) -> str:
        return json.dumps(dict.fromkeys(names, 1))

    assert [names for names in yes if not takes(schema, text(names))] == []
    assert [names for names in no if takes(schema, text(names))] == []


def test_a_definition_that_is_put_together_with_others_stays_closed_where_it_is_alone() -> None:
    schema = {**DEFS, **REF_N, "properties": {"c": {}}}
    assert takes(schema, '{"c": 1, "v": 2, "next": {"v": 3}}')
    assert not takes(schema, '{"c": 1, "v": 2, "next": {"v": 3, "c": 1}}')


def test_a_text_is_spaced_as_json_dumps_does() -> None:
    value = {"a": [1, {"b": None, "c": []}], "d": {}}
    schema = {"type": "object"}
    assert takes(schema, json.dumps(value))
    for indent, separators in ((1, None), (None, (",", ":")), (None, (", ", " : "))):
        assert not takes(schema, json.dumps(value, indent=indent, separators=separators))
    for text in ('{"a": 1\n, "b": 2}', '{ "a": 1}', '{"a": 1} ', "{\n}", '{"a":  1}'):
        assert not takes(schema, text)


@pytest.mark.parametrize(
    "keywords",
    [
        {"uniqueItems": False},
        {"uniqueItems": True, "maxItems": 1},
        {"propertyNames": True},
        {"propertyNames": {"type": "string", "title": "x", "minLength": 0}},
        {"minLength": 0, "minItems": 0, "minProperties": 0, "required": [], "allOf": [{}]},
        {"not": False},
        {"not": {"not": {}}},
        {"if": {"type": "string"}},
        {"then": {"type": "string"}, "else": False},
        {"dependencies": {}, "dependentRequired": {"a": []}, "dependentSchemas": {"a": {}}},
        {"contains": {"const": 1}, "minContains": 0},
        {"minContains": 3, "maxContains": 2},
        {"additionalItems": False, "unevaluatedItems": True, "patternProperties": {}},
        {"format": "int32", "contentEncoding": "base64", "contentMediaType": "a/b"},
        {"$schema": "x", "$id": "http://x/y", "$comment": "z", "$vocabulary": {}, "$anchor": "q"},
        {"title": "", "default": 5, "deprecated": True, "readOnly": True, "examples": [1]},
        {"type": None, "required": None, "properties": None, "items": None, "enum": None},
        {"$ref": None, "anyOf": None, "additionalProperties": None, "pattern": None, "not": None},
        {"x-order": 1, "nullable": True, "discriminator": {}, "x-guidance": {"lenient": True}},
    ],
)
def test_what_says_nothing_is_left_out(keywords: dict[str, Any]) -> None:
    wide = {"anyOf": [{"type": "string"}, {"type": "array", "maxItems": 1}, {"type": "object"}]}
    for schema in (keywords, {**wide, **keywords}):
        for text in ('"a"', "[1]", "{}", '{"a": 1}'):
            assert takes(schema, text), text


def test_decimals_as_pydantic_describes_them() -> None:
    schema = {"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"}
    assert all(takes(schema, f'"{text}"') for text in ("0", "-1.50", "+.5", "7."))
    assert not any(takes(schema, f'"{text}"') for text in ("", ".", "+", "1.2.3"))


@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS)
def test_schemas_of_clients_have_a_grammar(schema: dict[str, Any]) -> None:
    Grammar.json_schema(schema)


@pytest.mark.parametrize(
    ("alternatives", "yes"),
    [
        ([{"const": 1}, {"const": 2}], ["1", "2"]),
        ([{"enum": [1, "a"]}, {"enum": [True, None]}], ["1", "true"]),
        ([{"type": "integer"}, {"type": ["string", "null"]}], ["1", "null"]),
        ([{"type": "integer", "maximum": 3}, {"type": "number", "minimum": 5}], ["1", "7.5"]),
        ([{"type": "array"}, {"anyOf": [{"const": 1}, {"type": "null"}]}], ["[]", "1"]),
        ([K | {"properties": {"k": {"const": k}}} for k in (1, 2)], ['{"k": 1}', '{"k": 2}']),
        ([A, {"type": "object", "properties": {"b": {}}}], ['{"a": 1}', "{}", '{"b": 1}']),
    ],
)
def test_one_of_alternatives_that_cannot_overlap(alternatives: list[Any], yes: list[str]) -> None:
    for text in yes:
        assert takes({"oneOf": alternatives}, text), text


@pytest.mark.parametrize(
    "alternatives",
    [
        [{"type": "integer"}, {"type": "number"}],
        [{"const": 1}, {"const": 1.0}],
        [{"const": "a"}, {"minLength": 1}],
        [{}, {"type": "null"}],
        [{"type": "integer", "maximum": 5}, {"type": "integer", "minimum": 5}],
        [has("a", additionalProperties=True), has("b", additionalProperties={})],
    ],
)
def test_one_of_alternatives_that_may_overlap_says_what_to_do(alternatives: list[Any]) -> None:
    with pytest.raises(UsageError, match="alternatives of oneOf may overlap") as refused:
        Grammar.json_schema({"oneOf": alternatives})
    assert refused.value.hint == (
        "use anyOf, or a required property with a const of its own in each of them"
    )


@pytest.mark.parametrize("number", [MOST_EXACT + 1, 1234567890123456789, 2**64, -(2**70), 1e300])
def test_a_number_that_would_come_out_as_another_is_refused(number: float) -> None:
    for schema in ({"const": number}, {"enum": [1, {"a": [number]}]}, {"multipleOf": number}):
        with pytest.raises(UsageError, match="beyond 2\\^53") as refused:
            Grammar.json_schema({"type": "array", "items": schema})
        assert refused.value.hint is not None


@pytest.mark.parametrize("bound", [2**53 - 1, 2**53, 2**53 + 1, 10**18, 2**63 - 1, 2**64, 10**40])
def test_bounds_hold_however_large_they_are(bound: int) -> None:
    small = (0, 7, 2**53)
    for kind in ("integer", "number"):
        for keyword, taken, refused in (
            ("maximum", small[:2], (bound + 1, bound + 10**17)),
            ("exclusiveMaximum", small[:2], (bound, bound + 1)),
        ):
            for others in ({}, {"minimum": 0}, {"minimum": -(2**63)}):
                schema = {"type": kind, keyword: bound, **others}
                assert all(takes(schema, str(number)) for number in taken)
                assert not any(takes(schema, str(number)) for number in refused)
            mirrored = {"type": kind, keyword.replace("max", "min").replace("Max", "Min"): -bound}
            assert all(takes(mirrored, str(-number)) for number in taken)
            assert not any(takes(mirrored, str(-number)) for number in refused)
    if bound >= 2**63 - 1:
        with pytest.raises(UsageError, match="no grammar for numbers beyond"):
            Grammar.json_schema({"minimum": bound})
    else:
        assert not takes({"type": "integer", "minimum": bound}, str(bound - 1))
        assert takes({"type": "integer", "minimum": bound}, str(bound + 1024 - bound % 1024))


def test_names_of_properties_that_are_listed_or_have_a_pattern() -> None:
    record = {"type": "object", "additionalProperties": {"type": "integer"}}
    listed = {**record, "propertyNames": {"enum": ["x", "y"]}, "required": ["x"]}
    assert takes(listed, '{"x": 1, "y": 2}')
    assert not takes(listed, '{"y": 2}')
    assert not takes(listed, '{"x": 1, "z": 2}')
    named = {**record, "propertyNames": {"$ref": "#/$defs/q"}, "$defs": {"q": {"enum": ["x"]}}}
    assert takes(named, '{"x": 1}')
    assert not takes(named, '{"y": 1}')
    sized = {**record, "propertyNames": {"minLength": 1, "maxLength": 2}}
    assert takes(sized, '{"ab": 1, "é\\"": 2}')
    assert not takes(sized, '{"": 1}')
    assert not takes(sized, '{"abc": 1}')
    patterned = {**record, "propertyNames": {"type": "string", "pattern": "^x"}}
    assert takes(patterned, '{"xa": 1, "xb": 2}')
    assert not takes(patterned, '{"a": 1}')


ENDLESS = {"type": "object", "properties": {"n": {"$ref": "#"}}, "required": ["n"]}
CIRCLE = {"A": {"$ref": "#/$defs/B"}, "B": {"$ref": "#/$defs/A"}}
CHAIN = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(1100)}
DEEP: dict[str, Any] = {}
for _ in range(300):
    DEEP = {"items": DEEP}


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"$defs": CIRCLE, "$ref": "#/$defs/A"}, "refers to itself"),
        ({"$ref": "#"}, "refers to itself"),
        ({"$defs": {"A": {"anyOf": [REF_A, {"type": "null"}]}}, **REF_A}, "refers to itself"),
        (ENDLESS, "nothing satisfies it"),
        ({"items": ENDLESS | {"$id": "x"}, "minItems": 1, "type": "array"}, "nothing satisfies it"),
        ({"anyOf": []}, "nothing satisfies it"),
        ({"$defs": CHAIN | {"a1100": {}}, "$ref": "#/$defs/a0"}, "nested too deeply"),
        (DEEP, "nested too deeply"),
        ({"properties": {f"p{i}": {} for i in range(11_000)}}, "more than 10,000 parts"),
        ({"$ref": "#/$defs/x"}, "'#/$defs/x', which is not in the schema"),
        ({"$ref": "http://example.org/x"}, "is not in the schema"),
        ({"$ref": "#/$defs", "$defs": 5}, "can't be 5"),
        ({"$ref": 5}, "$ref can't be 5"),
        ({"properties": []}, "properties can't be []"),
        ({"prefixItems": 5}, "prefixItems can't be 5"),
        ({"oneOf": [1]}, "a schema can't be 1"),
        ('{"minimum": 1e999}', "minimum can't be inf"),
        ('{"const": NaN}', "NaN is no number of JSON"),
    ],
)
def test_what_cannot_be_met_or_read_is_refused_in_one_line(schema: Any, reason: str) -> None:
    with pytest.raises(UsageError) as refused:
        Grammar.json_schema(schema)
    assert reason in refused.value.message
    assert "\n" not in str(refused.value)


def test_long_chains_of_definitions_have_a_grammar() -> None:
    """They are not nested: each is made on its own."""
    chain = {f"a{i}": {"properties": {"n": {"$ref": f"#/$defs/a{i + 1}"}}} for i in range(400)}
    assert takes({"$defs": chain | {"a400": {}}, "$ref": "#/$defs/a0"}, '{"n": {"n": {}}}')


def test_a_circle_with_a_value_in_between_has_a_grammar() -> None:
    assert takes({"type": "object", "properties": {"n": {"$ref": "#"}}}, '{"n": {"n": {}}}')


@pytest.mark.parametrize(
    "schema",
    [
        {"oneOf": [{"enum": [*range(300 * i, 300 * i + 300)]} for i in range(60)]},
        {"oneOf": [{"properties": {"k": {"const": i}}, "required": ["k"]} for i in range(450)]},
        {"properties": {f"p{i}": {} for i in range(4000)}, "anyOf": [{"required": ["a"]}] * 4000},
        {"allOf": [{"properties": {f"p{i}": {}}} for i in range(4000)]},
        {"properties": {"a": {}}, "required": [f"p{i}" for i in range(50_000)]},
    ],
    ids=["values", "objects", "beside", "parts", "required"],
)
def test_no_schema_takes_long(schema: Any) -> None:
    began = time.thread_time()
    with contextlib.suppress(UsageError):
        plain_schema(schema)
    assert time.thread_time() - began < 3
