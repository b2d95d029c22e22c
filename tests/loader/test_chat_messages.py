"""Conversations of any order of roles, with templates that take few of them."""

from __future__ import annotations

import json
import re
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from localkv.errors import ChatTemplateError, UsageError
from localkv.loader.chat_messages import in_turns, messages_for, shows_calls, tools_for
from localkv.loader.chat_template import ChatTemplate
from localkv.loader.named_templates import NAMED_TEMPLATES
from support.family_templates import FAMILIES, QWEN3
from support.quick import quick

DATA = Path(__file__).parent.parent / "data"
RECORDED = json.loads((DATA / "transformers_prompts.json").read_text())
MODELS = {path.stem: path.read_text() for path in sorted((DATA / "templates").glob("*.jinja"))}

STRICT = QWEN3.source.replace(
    "(message.role == 'system' and not loop.first) %}", "false %}"
).replace(
    "{%- elif message.role == 'assistant' %}",
    "{%- elif message.role == 'system' and not loop.first %}"
    "{{- raise_exception('System message must be at the beginning.') }}"
    "{%- elif message.role == 'assistant' %}",
    1,
)
"""Like Qwen 3.5's template: a system message comes first, or not at all."""

NO_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}"
    "{% elif (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('take turns') }}"
    "{% endif %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
)
"""Like Gemma 2's template."""

SILENT = "{% for m in messages if m.role != 'system' %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
"""It leaves out system messages, and says nothing."""

SOURCES = {
    **MODELS,
    **{f"named {name}": source for name, source in NAMED_TEMPLATES.items()},
    **{f"like {name}": family.source for name, family in FAMILIES.items()},
    "strict": STRICT,
    "no system": NO_SYSTEM,
    "silent": SILENT,
}
TEMPLATES = {
    name: ChatTemplate(source, bos_token="<s>", eos_token="</s>")
    for name, source in SOURCES.items()
}

FEW_NAMED = ("chatml", "gemma", "llama2-sys", "mistral-v7-tekken", "orion", "vicuna")
FEW = [
    name
    for name in TEMPLATES
    if not name.startswith("named ") or name.removeprefix("named ") in FEW_NAMED
]
NAMES = quick(TEMPLATES, FEW)

SHOWN = {"s": "system", "d": "developer", "u": "user", "a": "assistant", "t": "tool"}
ORDERS = ["s", "su", "ssu", "sdu", "sa", "saa", "sauau", "suasu", "suasa", "suctsau"]
ORDERS += ["us", "sus", "usa", "usau", "uasa", "usst", "uu", "uauau", "au", "ut", "uat"]
ORDERS += ["uctu", "uctau", "uctus", "uctua", "uctuau", "uctt"]


def said(order: str) -> list[dict[str, Any]]:
    """A conversation, a letter for each message; `c` is a call of a tool."""
    messages = list[dict[str, Any]]()
    for i, letter in enumerate(order):
        if letter == "c":
            function = {"name": "f", "arguments": "{}"}
            call = {"id": "call00001", "type": "function", "function": function}
            messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        else:
            messages.append({"role": SHOWN[letter], "content": f"word {i}."})
        if letter == "t":
            messages[-1]["tool_call_id"] = "call00001"
    return messages


def arranged(name: str, messages: list[dict[str, Any]]) -> tuple[str, tuple[str, ...]]:
    template = TEMPLATES[name]
    turns, warnings = in_turns(template, messages_for(template, messages))
    return template.render(turns), warnings


@pytest.mark.parametrize("name", NAMES)
def test_every_order_is_rendered_with_every_word_in_its_place(name: str) -> None:
    for order in ORDERS:
        prompt, _ = arranged(name, said(order))
        places = [prompt.find(f"word {i}.") for i, letter in enumerate(order) if letter != "c"]
        assert -1 not in places, order
        assert places == sorted(places), order


@pytest.mark.parametrize("name", MODELS)
def test_what_a_template_takes_is_left_as_it_is(name: str) -> None:
    template = TEMPLATES[name]
    for kind, conversation in RECORDED["conversations"].items():
        if kind == "wrong":
            continue
        messages = messages_for(template, conversation)
        try:
            expected = template.render(messages)
        except ChatTemplateError:
            continue
        n_calls = max(len(message.get("tool_calls") or ()) for message in conversation)
        if n_calls and (name == "hunyuan" or not shows_calls(template)):
            continue  # it leaves out calls of tools or their results, and says nothing
        if n_calls > 1 and name == "gpt-oss":
            continue  # it shows the first only
        turns, warnings = in_turns(template, messages)
        assert (template.render(turns), warnings) == (expected, ())


@pytest.mark.parametrize("order", ["susau", "suctsau", "usausau", "suasau", "suctsctau"])
@pytest.mark.parametrize("name", ["strict", "gpt-oss", "deepseek-v3", "seed-oss", "minimax-m2"])
def test_a_late_system_message_leaves_the_beginning_alone(name: str, order: str) -> None:
    """What was read before an answer is the beginning of what is read before the next."""
    template = TEMPLATES[name]
    prompts = list[str]()
    for end in [i for i, letter in enumerate(order) if letter in "ac"] + [len(order)]:
        turns, _ = in_turns(template, messages_for(template, said(order[:end])))
        prompts.append(template.render(turns, add_generation_prompt=False))
    for one, other in pairwise(prompts):
        assert other.startswith(one)


def test_where_a_late_system_message_goes() -> None:
    user, system = "<|im_start|>user\n", "<|im_start|>system\n"
    end = "<|im_end|>\n"
    late = "the chat template takes system messages at the beginning only: the user's turn beside a"
    for order, expected in {
        "su": f"{system}word 0.{end}{user}word 1.{end}",
        "us": f"{user}word 0.\n\nword 1.{end}",
        "uctsu": f"</tool_response>{end}{user}word 3.\n\nword 4.{end}",
        "uasu": f"word 1.{end}{user}word 2.\n\nword 3.{end}",
    }.items():
        prompt, warnings = arranged("strict", said(order))
        assert expected in prompt
        assert warnings == (() if order == "su" else (f"{late} later one has it",))


def test_who_has_no_system_role_is_told_by_the_user() -> None:
    assert arranged("no system", said("ssu")) == (
        "[user] word 0.\n\nword 1.\n\nword 2.\n",
        ("the chat template takes no system message: the user's first turn has it",),
    )
    assert arranged("no system", said("sau"))[0].startswith("[user] word 0.\n[assistant] word 1.")
    assert arranged("silent", said("su"))[0] == "[user] word 0.\n\nword 1.\n"


def test_an_empty_system_message_leaves_no_turn() -> None:
    system = {"role": "system", "content": ""}
    prompt, _ = arranged("strict", [*said("ua"), system])
    assert prompt == arranged("strict", said("ua"))[0]


def test_a_template_may_refuse_a_system_message_after_results_alone() -> None:
    source = "{% for m in messages %}{% if m.role == 'system' and loop.previtem is defined and "
    source += "loop.previtem.role == 'tool' %}{{ raise_exception('not here') }}{% endif %}"
    template = ChatTemplate(
        source + "[{{ m.role }}] {{ m.content }}\n{% endfor %}", bos_token="", eos_token=""
    )
    turns, warnings = in_turns(template, messages_for(template, said("uasu")))
    assert ([turn["role"] for turn in turns][2], warnings) == ("system", ())
    turns, warnings = in_turns(template, messages_for(template, said("uctsu")))
    assert [turn["role"] for turn in turns] == ["user", "assistant", "tool", "user"]
    assert "system messages at the beginning only" in warnings[0]


def test_parts_are_joined_as_texts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": role, "content": parts} for role in ("system", "user", "user")]
    assert arranged("no system", messages)[0] == "[user] a\nb\n\na\nb\n\na\nb\n"


# --- an answer without text

NULLS = {"refusal": None, "audio": None, "function_call": None, "name": None, "annotations": []}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("content", [{"content": None}, {}, {"content": ""}])
def test_an_answer_without_text_is_rendered(name: str, content: dict[str, Any]) -> None:
    call = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    shown = {"role": "assistant", **content, "tool_calls": [call], **NULLS}
    empty = {"role": "assistant", **content, "tool_calls": None, **NULLS}
    template = TEMPLATES[name]
    for answer in (shown, empty):
        user = {"role": "user", "content": "a", "name": None}
        prompt = template.render(messages_for(template, [user, answer, user]))
        assert "None" not in prompt
        assert "null" not in prompt


def test_calls_are_shown_where_a_template_wants_null_beside_them() -> None:
    source = "{% for m in messages %}{% if m.role == 'assistant' and m.content is none %}"
    source += "{{ m.tool_calls[0].function.name }}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    template = ChatTemplate(source, bos_token="", eos_token="")
    (answer,) = [{**said("c")[0], "content": ""}]
    assert template.render(messages_for(template, [answer])) == "f"


def test_a_refusal_is_what_was_said() -> None:
    refused = {"role": "assistant", "content": None, "refusal": "No."}
    assert arranged("strict", [*said("u"), refused, *said("u")])[0].count("No.") == 1
    part = {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}
    assert arranged("strict", [*said("u"), part, *said("u")])[0].count("No.") == 1


# --- calls of tools and their results


FIRST_USER_HAS_TOOLS = (
    "{% set user = messages[1] if messages[0].role == 'system' else messages[0] %}"
    "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}"
    "{% for m in messages if not (tools and m == user) %}[{{ m.role }}] {{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
    "{% if tools %}{{ user.content }}{% endif %}"
)
NO_USER = "{%- if messages | selectattr('role', 'equalto', 'user') | list | length == 0 -%}"
NO_USER += "{{ raise_exception('No user query found') }}{%- endif -%}" + QWEN3.source
PROBE_TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


def calling(*numbers: int, text: str | None = None) -> dict[str, Any]:
    calls = [
        {
            "id": f"id{n}",
            "type": "function",
            "function": {"name": f"f{n}", "arguments": json.dumps({"a": f"call {n}."})},
        }
        for n in numbers
    ]
    return {"role": "assistant", "content": text, "tool_calls": calls}


def result(number: int, **fields: Any) -> dict[str, Any]:
    text = f"result {number}."
    return {"role": "tool", "tool_call_id": f"id{number}", "content": text, **fields}


ASKED = {"role": "user", "content": "word 0."}
PARTS = [{"type": "text", "text": text} for text in ("result 1.", "word 1.")]
CALLS = {
    "several": [ASKED, calling(1, 2), result(1), result(2)],
    "another order": [ASKED, calling(1, 2), result(2), result(1)],
    "one result": [ASKED, calling(1, 2), result(2)],
    "a text beside": [ASKED, calling(1, text="word 1."), result(1)],
    "reasoning and a text": [
        ASKED,
        {**calling(1, text="word 1."), "reasoning_content": "Hm."},
        result(1),
    ],
    "tags and a text": [ASKED, calling(1, text="<think>\nHm.\n</think>\n\nword 1."), result(1)],
    "in turn": [ASKED, calling(1), result(1), calling(2), result(2)],
    "parts": [ASKED, calling(1), result(1, content=PARTS)],
    "first": [calling(1), result(1), ASKED],
    "after the system": [{"role": "system", "content": "word 1."}, calling(1), result(1)],
    "alone": [calling(1), result(1)],
    "only the system": [{"role": "system", "content": "word 1."}],
}


@pytest.mark.parametrize("tools", [None, PROBE_TOOLS], ids=["no tools", "tools"])
@pytest.mark.parametrize(
    "name", [*MODELS, *(f"like {one}" for one in FAMILIES), "user has tools", "wants a user"]
)
def test_calls_and_results_are_shown_in_their_order(name: str, tools: Any) -> None:
    sources = {**SOURCES, "user has tools": FIRST_USER_HAS_TOOLS, "wants a user": NO_USER}
    template = ChatTemplate(sources[name], bos_token="<s>", eos_token="</s>")
    for kind, messages in CALLS.items():
        shaped = messages_for(template, messages)
        turns, warnings = in_turns(template, shaped, has_tools=tools is not None)
        prompt = template.render(turns, tools=tools_for(template, tools))
        words = [
            word
            for i in range(3)
            for word in (f"word {i}.", f"call {i}.", f"result {i}.")
            if word in json.dumps(messages)
        ]
        lost = [word for word in words if word not in prompt]
        assert not lost or any("left out" in warning for warning in warnings), (kind, lost)
        if kind in ("several", "another order"):
            places = [prompt.find(word) for word in ("result 1.", "result 2.")]
            assert places == sorted(places)


@pytest.mark.parametrize("opening", ["", "<tool_call>\n"])
def test_calls_that_a_template_shows_none_of_are_as_the_model_writes_them(opening: str) -> None:
    source = f"Calls begin with {opening}" + SOURCES["named chatml"]
    template = ChatTemplate(source, bos_token="", eos_token="")
    turns, warnings = in_turns(template, messages_for(template, [ASKED, calling(1), result(1)]))
    call = opening + '{"name": "f1", "arguments": {"a": "call 1."}}'
    assert turns[1]["content"] == call + opening.replace("<tool", "\n</tool").rstrip()
    assert any("as JSON" in warning for warning in warnings)


def test_ids_that_a_template_refuses_are_replaced() -> None:
    source = "{% for m in messages %}{% for c in m.tool_calls or [] %}{% if c.id | length < 9 %}"
    source += "{{ raise_exception('short') }}{% endif %}{{ c.id }}{{ c.function.name }}{% endfor %}"
    template = ChatTemplate(source + "{{ m.tool_call_id }}{% endfor %}", bos_token="", eos_token="")
    long = {**calling(1)["tool_calls"][0], "id": "chatcmpl-tool-1"}
    got = messages_for(template, [calling(1), {**calling(2), "tool_calls": [long]}])
    ids = [message["tool_calls"][0]["id"] for message in got]  # type: ignore[index]
    assert [len(id) for id in ids] == [9, 15]


def test_a_result_has_the_name_of_its_call() -> None:
    got = messages_for(TEMPLATES["strict"], [calling(1, 2), result(2), result(1), result(3)])
    assert [message.get("name") for message in got] == [None, "f2", "f1", None]


@pytest.mark.parametrize("name", [*MODELS, *(f"like {one}" for one in FAMILIES)])
def test_a_tool_may_be_no_more_than_a_name(name: str) -> None:
    template = TEMPLATES[name]
    messages = messages_for(template, [ASKED])
    fields: list[dict[str, Any]] = [
        {},
        {"description": None, "parameters": None, "strict": None},
        {"description": "A tool.", "parameters": {}},
        {"description": "A tool.", "parameters": {"type": "object"}},
    ]
    for more in fields:
        for tool in (
            {"name": "f", **more},
            {"type": "function", "function": {"name": "f", **more}},
        ):
            prompt = template.render(messages, tools=tools_for(template, [tool]))
            assert "None" not in prompt.replace("None of", ""), more


def test_a_result_without_an_id_is_of_the_call_that_it_names() -> None:
    """ollama's results are like that."""
    calls = [{"function": call["function"]} for call in calling(1, 2)["tool_calls"]]
    answer = {"role": "assistant", "content": None, "tool_calls": calls}
    results = [{"role": "tool", "name": f"f{n}", "content": f"result {n}."} for n in (2, 1)]
    prompt, _ = arranged("strict", [ASKED, answer, *results])
    assert 0 < prompt.find("result 1.") < prompt.find("result 2.")


def test_functions_are_tools() -> None:
    """OpenAI's API had them by other names before."""
    call = {"name": "f", "arguments": '{"a": "call 1."}'}
    messages = [
        {"role": "user", "content": "word 0."},
        {"role": "assistant", "content": None, "function_call": call},
        {"role": "function", "name": "f", "content": "result 1."},
    ]
    prompt, warnings = arranged("strict", messages)
    assert "call 1." in prompt
    assert "<tool_response>\nresult 1." in prompt
    assert warnings == ()


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"role": "model", "content": "a"}, "messages[1] has the role 'model'"),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, "tool_calls[0] has no name"),
    ],
)
def test_what_nothing_is_shown_of_is_refused(message: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError, match=re.escape(reason)):
        arranged("strict", [ASKED, message])


def test_arguments_are_not_read_for_long() -> None:
    function = {"name": "f", "arguments": '{"a": [' + "[]," * 100_000 + "1]}"}
    calls = [{"id": "a", "type": "function", "function": function}]
    template = ChatTemplate(QWEN3.source, bos_token="", eos_token="")
    with pytest.raises(UsageError, match=r"arguments has more than 100,000 values"):
        messages_for(template, [{"role": "assistant", "tool_calls": calls}])


def seconds_in_order(kind: str, n: int) -> float:
    """Seconds of this thread to put a conversation of n calls or turns in order."""
    calls: list[Any] = [{"id": f"id{i}", "function": {"name": f"f{i}"}} for i in range(n)]
    results = [{"role": "tool", "name": f"f{n - i}", "content": "b"} for i in range(n)]
    if kind == "calls":
        results = [{**one, "tool_call_id": f"id{n - i}"} for i, one in enumerate(results)]
    messages: list[Any] = [ASKED, {"role": "assistant", "tool_calls": calls}, *results]
    if kind == "turns in a row":
        messages = [{"role": "user", "content": "x" * 800}] * n
    template = TEMPLATES["like llama3.1" if kind.startswith("calls") else "no system"]
    in_turns(template, messages_for(template, messages[:4]))  # asks what the template takes
    began = time.thread_time()
    in_turns(template, messages_for(template, messages))
    return time.thread_time() - began


@pytest.mark.parametrize("kind", ["turns in a row", "calls", "calls without ids"])
def test_long_conversations_are_put_in_order_in_linear_time(kind: str) -> None:
    """40 times as long a conversation takes about 40 times as long, not 1,600 times."""
    short = min(seconds_in_order(kind, 500) for _ in range(5))
    long = min(seconds_in_order(kind, 20_000) for _ in range(3))
    assert long < 320 * short
