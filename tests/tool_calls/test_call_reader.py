"""Calls of tools in texts of every family: however a text is cut, and whatever is in it."""

from __future__ import annotations

import itertools
import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
from localkv.tool_calls.source import CallEvent, Content, ToolCall, gathered
from localkv.tool_calls.tagged_arguments import DSML, DSML_V4, GLM, MINIMAX, QWEN_CODER, SEED_OSS
from localkv.tool_calls.tools import Tools

FAMILIES = {
    one.name: one
    for one in (
        *(HERMES, HARMONY, LLAMA3, GENERIC, MISTRAL_LIST, MISTRAL, MISTRAL_ID),
        *(QWEN_CODER, DEEPSEEK, DEEPSEEK_FENCED, GEMMA4, GLM, KIMI, MINIMAX, SEED_OSS),
        *(COMMAND, COMMAND_R, DSML, DSML_V4),
    )
}
TOOLS = Tools(
    [
        {
            "type": "function",
            "function": {
                "name": "look",
                "parameters": {
                    "type": "object",
                    "properties": {
                        "at": {"type": "string"},
                        "n": {"type": "integer"},
                        "of": {"type": "array", "items": {"type": "number"}},
                        "or": {"type": ["string", "null"]},
                    },
                    "required": ["at"],
                },
            },
        },
        {"name": "stop"},
    ]
)


def read(family: Family, pieces: list[str]) -> list[CallEvent]:
    """Events of a text; events of a kind that follow each other are one."""
    ids = (f"id{n}" for n in itertools.count())
    reader = CallReader(family, TOOLS, new_id=lambda: next(ids))
    events = [event for piece in pieces for event in reader.push(piece)]
    joined: list[CallEvent] = []
    for event in [*events, *reader.end()]:
        if joined and type(joined[-1]) is type(event) and hasattr(event, "text"):
            joined[-1] = type(event)(**{**vars(event), "text": joined[-1].text + event.text})
        else:
            joined.append(event)
    return joined


def calls(family: Family, text: str) -> tuple[str, list[tuple[str, object]]]:
    content, found = gathered(read(family, [text]))
    assert all(isinstance(one, ToolCall) and one.is_whole for one in found), text
    return content, [(one.name, one.values) for one in found]


LOOK = ("look", {"at": 'a <b> "c"\nd', "n": 3})
AT = '"a <b> \\"c\\"\\nd"'
OBJECT = '{"at": ' + AT + ', "n": 3}'
STOP = ("stop", {})
_TEXTS = [
    (HERMES, '<tool_call>\n{"name": "look", "arguments": OBJECT}\n</tool_call>', [LOOK]),
    (
        HERMES,
        'Yes.\n<tool_call>{"arguments": OBJECT, "name": "look"}</tool_call>\n'
        '<tool_call>{"name": "stop", "arguments": null}</tool_call>\n',
        [LOOK, STOP],
    ),
    (HERMES, '<tool_call>{"name": "stop"}</tool_call>', [STOP]),
    (HERMES, '<tool_call>{"name": "look", "arguments": TEXT}', [LOOK]),
    (LLAMA3, '{"name": "look", "parameters": OBJECT}', [LOOK]),
    (
        LLAMA3,
        '<|python_tag|>{"type": "function", "name": "look", "parameters": OBJECT}; '
        '{"name": "stop", "parameters": {}}',
        [LOOK, STOP],
    ),
    (LLAMA3, "<|python_tag|>look.call(at=AT, n=3)", [LOOK]),
    (GENERIC, 'So:\n```json\n{"name": "look", "arguments": OBJECT}\n```', [LOOK]),
    (GENERIC, '[{"name": "look", "args": OBJECT}, {"name": "stop", "args": {}}]', [LOOK, STOP]),
    (
        GENERIC,
        ' functools[{"name": "look", "arguments": OBJECT}, {"name": "stop", "arguments": {}}]',
        [LOOK, STOP],
    ),
    (
        MISTRAL_LIST,
        '[TOOL_CALLS] [{"name": "look", "arguments": OBJECT, "id": "abc123456"}, '
        '{"name": "stop", "arguments": {}}]',
        [LOOK, STOP],
    ),
    (MISTRAL, "[TOOL_CALLS]look[ARGS]OBJECT[TOOL_CALLS]stop[ARGS]{}", [LOOK, STOP]),
    (MISTRAL_ID, "Hm.[TOOL_CALLS]look[CALL_ID]abc123456[ARGS]OBJECT", [LOOK]),
    (
        QWEN_CODER,
        '<tool_call>\n<function=look>\n<parameter=at>\na <b> "c"\nd\n</parameter>\n'
        "<parameter=n>\n3\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=stop>\n</function>\n</tool_call>",
        [LOOK, STOP],
    ),
    (
        QWEN_CODER,
        "<function=look>\n<parameter=at>7</parameter>\n<parameter=or>null</parameter>\n"
        "<parameter=of>[1, 2.5]</parameter>\n<parameter=new>{}</parameter></function>",
        [("look", {"at": "7", "or": None, "of": [1, 2.5], "new": {}})],
    ),
    (
        DEEPSEEK,
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look<｜tool▁sep｜>OBJECT<｜tool▁call▁end｜>"
        "<｜tool▁call▁begin｜>stop<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        [LOOK, STOP],
    ),
    (
        DEEPSEEK_FENCED,
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n```json\nOBJECT\n```"
        "<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>stop\n```json\n{}\n```"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        [LOOK, STOP],
    ),
    (
        GEMMA4,
        '<|tool_call>call:look{at:<|"|>a <b> "c"\nd<|"|>,n:3}<tool_call|>'
        "<|tool_call>call:stop{}<tool_call|>",
        [LOOK, STOP],
    ),
    (
        GEMMA4,
        '<|tool_call>call:look{of:[1,-2.5e3],or:null,in:{a:true,b:[<|"|>x<|"|>]}}<tool_call|>',
        [("look", {"of": [1, -2500.0], "or": None, "in": {"a": True, "b": ["x"]}})],
    ),
    (
        GLM,
        'Yes.\n<tool_call>look\n<arg_key>at</arg_key>\n<arg_value>a <b> "c"\nd</arg_value>\n'
        "<arg_key>n</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>stop\n</tool_call>",
        [LOOK, STOP],
    ),
    (
        GLM,
        "<tool_call>look<arg_key>at</arg_key><arg_value>7</arg_value><arg_key>of</arg_key>"
        "<arg_value>[1, 2.5]</arg_value></tool_call><tool_call>else<arg_key>x</arg_key>"
        "<arg_value>\n</arg_value></tool_call>",
        [("look", {"at": "7", "of": [1, 2.5]}), ("else", {"x": "\n"})],
    ),
    (
        KIMI,
        "Hm.<|tool_calls_section_begin|><|tool_call_begin|>functions.look:0"
        "<|tool_call_argument_begin|>OBJECT<|tool_call_end|><|tool_call_begin|>functions.stop:1"
        "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        [LOOK, STOP],
    ),
    (
        MINIMAX,
        '<minimax:tool_call>\n<invoke name="look">\n<parameter name="at">a <b> "c"\nd</parameter>\n'
        '<parameter name="n">3</parameter>\n</invoke>\n<invoke name="stop">\n</invoke>\n'
        "</minimax:tool_call>",
        [LOOK, STOP],
    ),
    (
        SEED_OSS,
        '<seed:tool_call>\n<function=look>\n<parameter=at>a <b> "c"\nd</parameter>\n'
        "<parameter=n>3</parameter>\n</function>\n</seed:tool_call>\n"
        "<seed:tool_call>\n<function=stop>\n</function>\n</seed:tool_call>",
        [LOOK, STOP],
    ),
    (SEED_OSS, "<function=x><parameter=y>\nz\n</parameter></function>", [("x", {"y": "\nz\n"})]),
    (
        COMMAND,
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "look", "parameters": OBJECT},\n'
        '    {"tool_call_id": "1", "tool_name": "stop", "parameters": {}}\n]<|END_ACTION|>',
        [LOOK, STOP],
    ),
    (
        COMMAND_R,
        'Action:\n```json\n[\n    {\n        "tool_name": "look",\n        "parameters": OBJECT\n'
        '    },\n    {\n        "tool_name": "stop",\n        "parameters": {}\n    }\n]```',
        [LOOK, STOP],
    ),
    (
        DSML,
        '\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="look">\n<｜DSML｜parameter name="at" '
        'string="true">a <b> "c"\nd</｜DSML｜parameter>\n<｜DSML｜parameter name="n" string="'
        'false">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n<｜DSML｜invoke name="stop">\n'
        "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
        [LOOK, STOP],
    ),
    (
        DSML_V4,
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="look">\n<｜DSML｜parameter name="in" '
        'string="true">7</｜DSML｜parameter>\n<｜DSML｜parameter name="on" string='
        '"false">{"a": [true]}</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>',
        [("look", {"in": "7", "on": {"a": [True]}})],
    ),
]
TEXTS = [
    (
        family,
        text.replace("OBJECT", OBJECT).replace("AT", AT).replace("TEXT", json.dumps(OBJECT)),
        wanted,
    )
    for family, text, wanted in _TEXTS
]
"""A text of each family, and the calls in it."""


@pytest.mark.parametrize(("family", "text", "wanted"), TEXTS)
def test_calls_of_every_family(family: Family, text: str, wanted: list[tuple[str, object]]) -> None:
    content, found = calls(family, text)
    assert found == wanted
    assert content.strip() in ("", "Yes.", "So:", "Hm.")


def cut(family: Family, pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    """The content and the calls of an answer that would have gone on."""
    reader = CallReader(family, TOOLS)
    events = [event for piece in pieces for event in reader.push(piece)]
    content, found = gathered([*events, *reader.end(is_cut=True)])
    return content, [(one.name, one.arguments) for one in found]


@pytest.mark.parametrize(("family", "text", "wanted"), TEXTS)
def test_a_call_that_is_cut_is_the_beginning_of_a_whole_one(
    family: Family, text: str, wanted: list[tuple[str, object]]
) -> None:
    """Nothing of its marks becomes text, wherever that is, nor of what is before the next one."""
    whole = f"Oh: {text}\n{text}" if family not in (LLAMA3, GENERIC) else text
    content, found = gathered(read(family, [whole]))
    for at in range(len(whole)):
        begun, calls = cut(family, [whole[:at]])
        assert content.startswith(begun), whole[:at]
        assert len(calls) <= len(found)
        for (name, arguments), call in zip(calls, found, strict=False):
            assert (name, call.arguments[: len(arguments)]) == (call.name, arguments), whole[:at]
        assert cut(family, list(whole[:at])) == (begun, calls)


PLAIN = [
    "Just text, <b>bold</b> and [1] {x}.",
    ' \n{"name": "somebody", "age": 3}',
    '```json\n{"name": "somebody"}\n```',
    "<tool_call>oops</tool_call>",
    '<tool_call>{"name": 5}</tool_call> then',
    "[TOOL_CALLS] nothing",
    "[TOOL_CALLS]look[ARGS]no",
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look",
    "<|tool_call>call:look<tool_call|>",
    "<tool_call>\n<function=",
    "<tool_call>stop it</tool_call>",
    "<tool_call>look</tool_ca",
    "Action: I go home.",
    'Action:\n```json\n[{"tool_name": "directly-answer", "parameters": {}}]```',
    "<|START_ACTION|>[]<|END_ACTION|>",
    "<|tool_calls_section_begin|><|tool_call_begin|>look<|tool_call_end|>",
    '<minimax:tool_call>\n<invoke name="">\n</minimax:tool_call>',
    "<｜DSML｜function_calls>\n<｜DSML｜invoke>",
    "<seed:tool_call><function=",
    "<|python_tag|>print(1)",
    "<tool_ca",
    "",
    "  \n",
]


@pytest.mark.parametrize("name", FAMILIES)
def test_text_that_is_no_call_stays_as_it_is(name: str) -> None:
    for text in PLAIN:
        assert gathered(read(FAMILIES[name], [text])) == (text, ()), text


_MARKS = (
    '<tool_call> </tool_call> {"name":"look","arguments": {"at":"x"}} [TOOL_CALLS] [ARGS] look { } '
    '[ ] " \\ , : <function=look> <parameter=at> </parameter> </function> <|tool_call> call:look{ '
    '<tool_call|> <|"|> at: <｜tool▁calls▁begin｜> <｜tool▁call▁begin｜> <｜tool▁sep｜> '
    "<｜tool▁call▁end｜> ```json ``` function <|python_tag|> look.call( ; 1 -2e5 null \\u00e9 é x "
    "<arg_key> </arg_key> <arg_value> </arg_value> <|START_ACTION|> Action: <minimax:tool_call> "
    '<invoke name="look"> <parameter name="at"> </invoke> <seed:tool_call> '
    "<｜DSML｜function_calls> "
    '<｜DSML｜invoke name="look"> <｜DSML｜parameter name="at" string="true"> </｜DSML｜parameter> '
    "<|tool_calls_section_begin|> <|tool_call_begin|> <|tool_call_argument_begin|> functions.look:0"
)
MARKS = _MARKS.split()
PIECES = st.lists(st.sampled_from([*MARKS, " ", "\n"]), max_size=14).map("".join)


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(list(FAMILIES)),
    text=st.one_of(PIECES, st.sampled_from([text for _, text, _ in TEXTS]), st.text(max_size=30)),
    seed=st.integers(0, 99),
)
def test_any_cutting_gives_the_same_and_nothing_fails(name: str, text: str, seed: int) -> None:
    rng, family = random.Random(seed), FAMILIES[name]
    cuts = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(8)))
    pieces = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
    whole = read(family, [text])
    assert read(family, pieces) == whole
    assert read(family, list(text)) == whole
    for call in gathered(whole)[1]:
        if call.is_whole:
            assert isinstance(json.loads(call.arguments, strict=False), dict), call


def test_arguments_come_as_they_are_written() -> None:
    """A call begins once its name is known, and what follows does not wait for its end."""
    reader = CallReader(HERMES, TOOLS)
    assert reader.push("Well. <tool_") == [Content("Well. ")]
    begun = reader.push('call>{"name": "look", "arguments": {"at": "one')
    assert [type(one).__name__ for one in begun] == ["CallBegun", "CallArguments"]
    assert begun[1].text == '{"at": "one'
    assert [one.text for one in reader.push(" two")] == [" two"]
    ended = reader.end()
    assert [(one.index, one.is_whole) for one in ended] == [(0, False)]


def test_ids_are_as_the_family_takes_them() -> None:
    [call] = gathered(CallReader(MISTRAL, TOOLS).push("[TOOL_CALLS]stop[ARGS]{}"))[1]
    assert len(call.id) == 9
    assert call.id.isalnum()
    [call] = gathered(CallReader(HERMES, TOOLS).push('<tool_call>{"name": "stop"}'))[1]
    assert call.id.startswith("call_")
    assert call.message()["function"] == {"name": "stop", "arguments": "{}"}
