"""Grammars of calls: what they allow is what the parsers read, in each family's own syntax."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher

from localkv.errors import UsageError
from localkv.loader.chat_template import ChatTemplate
from localkv.loader.tokenizer import load_tokenizer
from localkv.structured.constraint import Constraint, GrammarTokens
from localkv.structured.grammar import Grammar
from localkv.tool_calls.call_grammar import call_grammar
from localkv.tool_calls.detection import family_of
from localkv.tool_calls.family import CallReader, Family
from localkv.tool_calls.gemma import GEMMA4
from localkv.tool_calls.json_object import COMMAND, COMMAND_R, GENERIC, HARMONY, HERMES, LLAMA3
from localkv.tool_calls.named_object import (
    DEEPSEEK,
    DEEPSEEK_FENCED,
    KIMI,
    MISTRAL,
    MISTRAL_ID,
    MISTRAL_LIST,
)
from localkv.tool_calls.source import gathered
from localkv.tool_calls.tagged_arguments import DSML, DSML_V4, GLM, MINIMAX, QWEN_CODER, SEED_OSS
from localkv.tool_calls.tools import Tool, Tools
from support import client_tools, family_templates
from support.paths import ROOT

VOCABULARY = load_tokenizer(ROOT / "models/tales-4M-Q8_0.gguf")
TOKENS = GrammarTokens(VOCABULARY)
LOOK = {
    "name": "look",
    "parameters": {
        "type": "object",
        "properties": {
            "at": {"type": "string", "maxLength": 20},
            "n": {"type": "integer", "maximum": 99},
            "kind": {"enum": ["x", "y"]},
        },
        "required": ["at"],
        "additionalProperties": False,
    },
}
STOP = {"name": "stop", "parameters": {"type": "object", "additionalProperties": False}}
DESCRIBED = [{"type": "function", "function": one} for one in (LOOK, STOP)]
TEXTS = [
    (HERMES, '<tool_call>\n{"name": "look", "arguments": ARGS}\n</tool_call>', "\n"),
    (LLAMA3, '{"name": "look", "parameters": ARGS}', "; "),
    (GENERIC, '{"name": "look", "arguments": ARGS}', "\n"),
    (MISTRAL_LIST, '[TOOL_CALLS][{"name": "look", "arguments": ARGS}]', None),
    (MISTRAL, "[TOOL_CALLS]look[ARGS]ARGS", ""),
    (MISTRAL_ID, "[TOOL_CALLS]look[CALL_ID]abcdefgh1[ARGS]ARGS", ""),
    (
        QWEN_CODER,
        "<tool_call>\n<function=look>\n<parameter=at>\nhome </p>\n</parameter>\n"
        "<parameter=n>\n7\n</parameter>\n</function>\n</tool_call>",
        "\n",
    ),
    (
        DEEPSEEK,
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look<｜tool▁sep｜>ARGS<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜>",
        None,
    ),
    (
        DEEPSEEK_FENCED,
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n```json\nARGS\n```"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        None,
    ),
    (GEMMA4, '<|tool_call>call:look{at:<|"|>home </p><|"|>,n:7}<tool_call|>', ""),
    (
        GLM,
        "<tool_call>look\n<arg_key>at</arg_key>\n<arg_value>home </p></arg_value>\n"
        "<arg_key>n</arg_key>\n<arg_value>7</arg_value>\n</tool_call>",
        "\n",
    ),
    (
        KIMI,
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>"
        "ARGS<|tool_call_end|><|tool_calls_section_end|>",
        None,
    ),
    (
        MINIMAX,
        '<minimax:tool_call>\n<invoke name="look">\n<parameter name="at">home </p></parameter>\n'
        '<parameter name="n">7</parameter>\n</invoke>\n</minimax:tool_call>',
        None,
    ),
    (
        SEED_OSS,
        "<seed:tool_call>\n<function=look>\n<parameter=at>home </p></parameter>\n"
        "<parameter=n>7</parameter>\n</function>\n</seed:tool_call>",
        "\n",
    ),
    (
        COMMAND,
        '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "look", "parameters": ARGS}]'
        "<|END_ACTION|>",
        None,
    ),
    (COMMAND_R, 'Action:\n```json\n[{"tool_name": "look", "parameters": ARGS}]\n```', None),
    (
        DSML,
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="look">\n<｜DSML｜parameter name="at" '
        'string="true">home </p></｜DSML｜parameter>\n<｜DSML｜parameter name="n" string="false">7'
        "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>",
        None,
    ),
]
"""A call in each family's syntax, and what is between two of them."""
ARGS = {"at": "home </p>", "n": 7}


def grammar(family: Family, choice: object = "required", **options: object) -> Grammar:
    found = call_grammar(family, Tools(DESCRIBED, choice, **options), VOCABULARY)
    assert found is not None
    return found


def accepts(one: Grammar, text: str) -> bool:
    matcher = LLMatcher(TOKENS.for_llguidance, one.source, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = TOKENS.for_llguidance.tokenize_str(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize(("family", "text", "between"), TEXTS)
def test_a_required_call_is_one_that_the_parser_reads(
    family: Family, text: str, between: str | None
) -> None:
    text = text.replace("ARGS]ARGS", "ARGS]" + json.dumps(ARGS))
    text = text.replace(" ARGS", " " + json.dumps(ARGS)).replace("\nARGS", "\n" + json.dumps(ARGS))
    text = text.replace("｜>ARGS", "｜>" + json.dumps(ARGS))
    text = text.replace("|>ARGS", "|>" + json.dumps(ARGS))
    for choice in ("required", "look", {"type": "function", "function": {"name": "look"}}):
        assert accepts(grammar(family, choice), text), choice
    assert not accepts(grammar(family, "stop"), text)
    assert not accepts(grammar(family), "no")
    reader = CallReader(family, Tools(DESCRIBED))
    rest, [call] = gathered([*reader.push(text), *reader.end()])
    assert (rest, call.name, call.values, call.is_whole) == ("", "look", ARGS, True)
    if between is not None:
        assert accepts(grammar(family), text + between + text)
        assert not accepts(grammar(family, parallel=False), text + between + text)
    after = call_grammar(family, Tools(DESCRIBED), VOCABULARY)  # "auto"
    if family in (LLAMA3, GENERIC):
        assert after is None
    else:
        assert after is not None
        assert accepts(after, text.removeprefix(after.after))


def drawn(grammar: Grammar, rng: random.Random) -> str:
    """A text of a grammar, drawn at random."""
    one, data = Constraint(TOKENS, grammar, n_logits=VOCABULARY.n_vocab), b""
    while not one.is_over:
        tokens = [int(token) for token in np.flatnonzero(one.allowed())]
        if VOCABULARY.eos_id in tokens:
            break
        one.accept(token := rng.choice(tokens))
        data += VOCABULARY.token_bytes(token)
    return data.decode()


@pytest.mark.parametrize(
    "family", [HERMES, LLAMA3, MISTRAL_LIST, MISTRAL, DEEPSEEK_FENCED, COMMAND, KIMI]
)
def test_whatever_is_drawn_by_it_is_a_call(family: Family) -> None:
    rng = random.Random(7)
    for _ in range(4):
        reader = CallReader(family, Tools(DESCRIBED))
        text = drawn(grammar(family), rng)
        rest, calls = gathered([*reader.push(text), *reader.end()])
        assert rest == ""
        for call in calls:
            assert call.is_whole
            assert set(call.values) <= set(LOOK["parameters"]["properties"])
            assert call.name == "stop" or len(call.values["at"]) <= 20
        assert calls


@pytest.mark.parametrize("family", [HERMES, LLAMA3, GLM, DSML])
@pytest.mark.parametrize(
    "answer", [Grammar.json_schema({"enum": ["yes", "no"]}), Grammar.gbnf('root ::= "\\"yes\\""')]
)
def test_calls_or_an_answer_of_a_schema(family: Family, answer: Grammar) -> None:
    text = next(text for one, text, _ in TEXTS if one is family)
    text = text.replace(" ARGS", " " + json.dumps(ARGS))
    either = call_grammar(family, Tools(DESCRIBED), VOCABULARY, answer)
    assert either is not None
    assert accepts(either, text)
    assert accepts(either, '"yes"')
    for other in ("yes", text + '"yes"', '"yes"' + text, ""):
        assert not accepts(either, other), other
    required = call_grammar(family, Tools(DESCRIBED, "look"), VOCABULARY, answer)
    assert required is not None
    assert not accepts(required, '"yes"')
    assert call_grammar(family, Tools([]), VOCABULARY, answer) is answer
    with pytest.raises(UsageError, match="channels"):
        call_grammar(HARMONY, Tools(DESCRIBED), VOCABULARY, answer)


def test_harmony_thinks_first_and_names_its_recipient() -> None:
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    text = f"<|channel|>commentary to=functions.look <|constrain|>json<|message|>{json.dumps(ARGS)}"
    assert accepts(grammar(HARMONY), text)
    assert accepts(grammar(HARMONY), thought + text)
    assert not accepts(grammar(HARMONY), thought)


FAMILIES = [*dict.fromkeys(family for family, _, _ in TEXTS), HARMONY, DSML_V4]
ODD = {
    "name": "odd",
    "parameters": {
        "type": "object",
        "properties": {
            "n": {"type": "integer", "not": {"const": 3}},
            "at": {"type": "string", "maxLength": 3},
        },
    },
}


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_tools_of_clients_are_called_by_their_schemas(family: Family) -> None:
    tools = Tools(client_tools.TOOLS, "required")
    assert call_grammar(family, tools, VOCABULARY) is not None
    assert tools.warnings == []


@pytest.mark.parametrize("choice", ["auto", "required", "odd"])
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_tool_without_a_grammar_keeps_to_what_there_is_and_others_to_theirs(
    family: Family, choice: str
) -> None:
    tools = Tools([LOOK, ODD], choice)
    one = call_grammar(family, tools, VOCABULARY)
    if one is None or family is GEMMA4:  # which has no grammar of values
        return
    assert tools.warnings == [
        "the schema of the tool 'odd' can't be used: no grammar for not: its arguments n may be "
        "anything"
    ] or tools.warnings == [
        "the schema of 'n' of the tool 'odd' can't be used: no grammar for not: its arguments n "
        "may be anything"
    ]
    if family is not HERMES:
        return
    for text, yes in (
        ('{"name": "odd", "arguments": {"n": 3, "at": "abc"}}', True),
        ('{"name": "odd", "arguments": {"n": "x"}}', False),
        ('{"name": "odd", "arguments": {"n": 3, "at": "abcd"}}', False),
        ('{"name": "look", "arguments": {"at": 3}}', False),
        ('{"name": "look", "arguments": {"at": "x"}}', choice != "odd"),
    ):
        whole = f"{'' if choice == 'auto' else '<tool_call>'}\n{text}\n</tool_call>"
        assert accepts(one, whole) == yes, text


@pytest.mark.parametrize(
    ("parameters", "arguments"),
    [
        ({"type": "object", "not": {"const": 1}, "properties": {"a": {"const": 1}}}, {"a": 1}),
        ({"type": "object", "not": {"const": 1}}, {"x": [1]}),
        ({"type": "object", "properties": 5}, {"x": [1]}),
        ({"type": "object", "properties": {"a": False}, "required": ["a"]}, {"a": None}),
        ({"type": "array"}, {"x": 1}),
        ({"properties": {"a": {"$ref": "http://x/y"}, "b": {"const": 2}}}, {"a": [], "b": 2}),
        ({"$ref": "#"}, {"x": 1}),
    ],
)
def test_arguments_are_an_object_whatever_a_schema_says(
    parameters: dict[str, object], arguments: object
) -> None:
    tools = Tools([{"name": "odd", "parameters": parameters}], "required")
    one = call_grammar(HERMES, tools, VOCABULARY)
    assert one is not None
    call = json.dumps({"name": "odd", "arguments": arguments})
    assert accepts(one, f"<tool_call>\n{call}\n</tool_call>"), (one, tools.warnings)
    assert len(tools.warnings) == 1
    assert tools.warnings[0].startswith("the schema of the tool 'odd' can't be used")


def test_strict_calls_that_can_not_be_kept_to_are_named() -> None:
    for family in (LLAMA3, GENERIC, HARMONY, HERMES):
        tools = Tools([{**LOOK, "strict": True}, STOP])
        is_kept = call_grammar(family, tools, VOCABULARY) is not None
        assert ["strict of the tool 'look'" in line for line in tools.warnings] == [True] * (
            not is_kept
        )


@pytest.mark.parametrize("choice", ["auto", "required", "none"])
def test_a_strict_tool_without_a_grammar_is_refused_by_name(choice: str) -> None:
    tools = Tools([LOOK, {**ODD, "strict": True}], choice)
    if choice == "none":
        assert call_grammar(HERMES, tools, VOCABULARY) is None
        return
    with pytest.raises(UsageError, match=r"the schema of the tool 'odd' .* no grammar for not"):
        call_grammar(HERMES, tools, VOCABULARY)


@pytest.mark.parametrize("choice", ["nobody", {"function": {"name": "nobody"}}])
def test_a_tool_that_there_is_not_cannot_be_chosen(choice: object) -> None:
    with pytest.raises(UsageError, match="none of the tools"):
        Tools(DESCRIBED, choice)
    with pytest.raises(UsageError, match="no tools"):
        Tools([], "required")
    with pytest.raises(UsageError, match="tool_choice"):
        Tools(DESCRIBED, {"type": "function"})
    with pytest.raises(UsageError, match="has no name"):
        Tools([{"type": "function"}], "required")
    assert not Tools([{"type": "function"}])


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("QWEN3", HERMES),
        ("LLAMA31", LLAMA3),
        ("MISTRAL", MISTRAL_LIST),
        ("DEEPSEEK", DEEPSEEK),
        ("GPT_OSS", HARMONY),
    ],
)
def test_a_template_shows_its_family(name: str, family: Family) -> None:
    shown = getattr(family_templates, name)
    found = family_of(ChatTemplate(shown.source, bos_token=shown.bos, eos_token=shown.eos))
    assert found.name.partition("-")[0] == family.name.partition("-")[0]


@pytest.mark.parametrize(
    ("call", "family"),
    [
        ("<tool_call>NAME\n<arg_key>word</arg_key>\n<arg_value>x</arg_value>\n</tool_call>", GLM),
        ("<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{}", KIMI),
        ('<minimax:tool_call>\n<invoke name="NAME">', MINIMAX),
        ("<seed:tool_call>\n<function=NAME>\n<parameter=word>x</parameter>", SEED_OSS),
        ("<tool_call>\n<function=NAME>\n<parameter=word>\nx\n</parameter>", QWEN_CODER),
        ('<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "NAME"', COMMAND),
        ('Action:\n```json\n[{"tool_name": "NAME"', COMMAND_R),
        ('<｜DSML｜function_calls>\n<｜DSML｜invoke name="NAME">', DSML),
        ('<｜DSML｜tool_calls>\n<｜DSML｜invoke name="NAME">', DSML_V4),
        ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{}", DEEPSEEK),
    ],
)
def test_a_call_in_a_prompt_shows_its_family(call: str, family: Family) -> None:
    shown = call.replace("NAME", "{{ call.function.name }}")
    source = (
        "{% for message in messages %}{{ message.content }}"
        "{% for call in message.tool_calls %}" + shown + "{% endfor %}{% endfor %}"
    )
    assert family_of(ChatTemplate(source, bos_token="", eos_token="")) is family


def test_a_template_without_calls_is_generic() -> None:
    for source in ("{{ messages[0].content }}", "{{ raise_exception('no') }}", "{% if %}"):
        assert family_of(ChatTemplate(source, bos_token="", eos_token="")) is GENERIC


# --- schemas of which the root lists no properties


YES = {"type": "boolean"}
ROOTS: dict[str, dict[str, Any]] = {
    "reference": {
        "$ref": "#/definitions/A",
        "definitions": {"A": {"type": "object", "properties": {"a": YES}, "required": ["a"]}},
    },
    "allOf": {
        "type": "object",
        "properties": {"a": YES},
        "allOf": [{"properties": {"b": YES}, "required": ["a", "b"]}],
    },
    "oneOf": {
        "type": "object",
        "oneOf": [
            {"properties": {"a": YES}, "required": ["a"]},
            {"properties": {"b": YES, "c": {"type": "null"}}, "required": ["b", "c"]},
        ],
    },
    "anyOf of required": {
        "type": "object",
        "properties": {"a": YES, "b": YES},
        "anyOf": [{"required": ["a"]}, {"required": ["b"]}],
    },
}


@pytest.mark.parametrize("root", ROOTS)
@pytest.mark.parametrize("family", [HERMES, GLM, QWEN_CODER, MINIMAX, SEED_OSS, GEMMA4, KIMI])
def test_what_a_root_says_by_others_is_kept(family: Family, root: str) -> None:
    described = {"type": "function", "function": {"name": "f", "parameters": ROOTS[root]}}
    tools = Tools([described], "required", parallel=False)
    one = call_grammar(family, tools, VOCABULARY)
    assert one is not None
    for seed in range(4):
        reader = CallReader(family, tools)
        text = drawn(one, random.Random(seed))
        _, [call] = gathered([*reader.push(text), *reader.end()])
        jsonschema.validate(call.values, ROOTS[root])


def test_gemmas_values_keep_to_their_schemas() -> None:
    """They are no JSON, so each has a rule of its own."""
    of = {"p": {"enum": ["x", 2, None]}, "q": {"type": "integer"}}
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {
            "e": {"$ref": "#/$defs/E"},
            "o": {"type": "object", "properties": of, "required": ["p", "q"]},
            "l": {"type": "array", "items": {"$ref": "#/$defs/E"}, "minItems": 1, "maxItems": 2},
            "n": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
            "t": {"$ref": "#/$defs/T"},
        },
        "required": ["e", "o", "l", "n", "t"],
        "$defs": {
            "E": {"type": "string", "enum": ["a", "b c"]},
            "T": {"type": "object", "properties": {"next": {"$ref": "#/$defs/T"}}},
        },
    }
    tools = Tools([{"function": {"name": "f", "parameters": schema}}], "required", parallel=False)
    one = call_grammar(GEMMA4, tools, VOCABULARY)
    assert one is not None
    for seed in range(6):
        reader = CallReader(GEMMA4, tools)
        text = drawn(one, random.Random(seed))
        _, [call] = gathered([*reader.push(text), *reader.end()])
        jsonschema.validate(call.values, schema)
    quote, given = '<|"|>', "o:{p:2,q:1},t:{}"
    for enum, is_right in (("a", True), ("c", False)):
        marked = f"{quote}{enum}{quote}"
        text = f"<|tool_call>call:f{{e:{marked},l:[{marked}],n:null,{given}}}<tool_call|>"
        assert accepts(one, text) is is_right


@pytest.mark.parametrize("family", [GEMMA4, GLM, HERMES])
def test_odd_schemas_are_no_failure(family: Family) -> None:
    deep: dict[str, Any] = YES
    for _ in range(90):
        deep = {"type": "object", "properties": {"a": deep}}
    wanted = {"type": "object", "properties": {"a": YES}, "required": [["x"], {"y": 1}, 5, "a"]}
    odd: list[dict[str, Any]] = [{"type": 5}, {"type": [["x"]]}, {"enum": 5}, {"prefixItems": 5}]
    each = [{"type": "object", "properties": {"a": {"type": "string", **one}}} for one in odd]
    for schema in (deep, wanted, *each, {"type": "object", "properties": {"a": 5, "b": None}}):
        tools = Tools([{"function": {"name": "f", "parameters": schema}}], "required")
        assert call_grammar(family, tools, VOCABULARY) is not None


def test_roots_that_refer_to_each_other_cost_little() -> None:
    names = [f"d{i}" for i in range(400)]
    definitions: dict[str, Any] = {
        name: {"allOf": [{"$ref": f"#/$defs/{other}"} for other in names]} for name in names
    }
    definitions["d0"] = {"properties": {"a": YES}, "required": ["a"]}
    tool = Tool("f", {"$ref": "#/$defs/d1", "$defs": definitions})
    assert list(tool.properties) == ["a"]


@pytest.mark.parametrize("key", ["anyOf", "oneOf", "allOf", "$ref"])
def test_a_long_chain_of_references_is_not_followed_to_its_end(key: str) -> None:
    def linked(number: int) -> dict[str, Any]:
        reference = {"$ref": f"#/$defs/d{number}"}
        return reference if key == "$ref" else {key: [reference]}

    last = {"type": "object", "properties": {"a": {"type": "integer"}}}
    links = {f"d{i}": linked(i + 1) for i in range(3000)}
    schema = {"$defs": {**links, "d3000": last}, **linked(0)}
    tool = Tool("f", schema)
    assert tool.properties == {}
