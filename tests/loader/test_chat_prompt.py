"""Conversations with all that templates can be given, and the prompts they become.

The templates are in the manner of five families; Jinja itself says how they render, and a few lines
here where transformers' `continue_final_message` cuts them.
"""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localkv.errors import ChatTemplateError, UsageError
from localkv.loader.answer_tags import CHANNELS, ReasoningTags, in_channels
from localkv.loader.chat_prompt import ChatPrompt, chat_prompt
from localkv.loader.chat_template import THINK as THINK_SWITCH
from localkv.loader.chat_template import ChatTemplate
from localkv.loader.tokenizer import Tokenizer, tokenizer_from_metadata
from localkv.server.prompts import PromptModel
from support.family_templates import FAMILIES, Family
from support.tiny_vocabulary import bpe_metadata

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather at a place.",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
    },
}
USER = {"role": "user", "content": "How is it in Bern?"}
SYSTEM = {"role": "system", "content": "Be short."}
CALL = {
    "id": "call12345",
    "type": "function",
    "function": {"name": "weather", "arguments": {"place": "Zürich"}},
}
CALLS = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "call12345", "name": "weather", "content": "21"}
TAG = "CONTINUE_FINAL_MESSAGE_TAG "
THINK = ReasoningTags("<think>", "</think>")


def template_of(family: Family) -> ChatTemplate:
    return ChatTemplate(family.source, bos_token=family.bos, eos_token=family.eos)


def tokenizer_of(family: Family) -> Tokenizer:
    names = {"control": family.control, "user_defined": family.user_defined}
    return tokenizer_from_metadata(bpe_metadata("llama-bpe", add_bos_token=False, **names))


TEMPLATES = {name: template_of(family) for name, family in FAMILIES.items()}
TOKENIZERS = {name: tokenizer_of(family) for name, family in FAMILIES.items()}


@pytest.fixture(params=sorted(FAMILIES))
def name(request: pytest.FixtureRequest) -> str:
    """The name of a family."""
    return request.param


def prompt(name: str, messages: list[dict[str, Any]], **options: Any) -> ChatPrompt:
    return chat_prompt(TOKENIZERS[name], TEMPLATES[name], messages, **options)


def in_jinja(
    name: str, messages: list[dict[str, Any]], *, continues: bool = False, **variables: Any
) -> str:
    """What transformers makes of a conversation, told the date as llama.cpp tells it."""
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(
        value, ensure_ascii=False, indent=indent
    )
    family = FAMILIES[name]
    variables = {"tools": None, "add_generation_prompt": not continues, **variables}
    variables.setdefault("date_string", datetime.now().strftime("%d %b %Y"))
    if continues:
        messages = [*messages[:-1], {**messages[-1], "content": messages[-1]["content"] + TAG}]
    text = environment.from_string(family.source).render(
        messages=messages,
        raise_exception=raise_exception,
        bos_token=family.bos,
        eos_token=family.eos,
        **variables,
    )
    if not continues:
        return text
    at = text.rindex(TAG.strip())
    return text[:at] if text[at : at + len(TAG)] == TAG else text[:at].rstrip()


# --- what every template is given


@pytest.mark.parametrize(
    "messages",
    [[USER], [SYSTEM, USER], [SYSTEM, USER, {"role": "assistant", "content": "Fine."}, USER]],
)
def test_conversations(name: str, messages: list[dict[str, Any]]) -> None:
    assert prompt(name, messages).text == in_jinja(name, messages)


def test_tools(name: str) -> None:
    messages = [SYSTEM, USER]
    got = prompt(name, messages, tools=[TOOL])
    assert got.text == in_jinja(name, messages, tools=[TOOL])
    assert ("weather" in got.text) == (name != "deepseek")
    silent = "the chat template does not read tools: the model is not told of them"
    assert got.warnings == ((silent,) if name == "deepseek" else ())
    assert prompt(name, messages, tools=[]).text == in_jinja(name, messages)


def test_tool_calls_and_their_results(name: str) -> None:
    """With arguments as objects, as transformers wants them, and as text, as OpenAI sends them."""
    text = json.dumps(CALL["function"]["arguments"], ensure_ascii=False)
    as_text = {
        **CALLS,
        "tool_calls": [{**CALL, "function": {**CALL["function"], "arguments": text}}],
    }
    takes_text = name == "deepseek"
    expected = in_jinja(name, [USER, as_text if takes_text else CALLS, RESULT])
    assert '{"place": "Zürich"}' in expected
    for calls in (CALLS, as_text):
        assert prompt(name, [USER, calls, RESULT]).text == expected


def test_arguments_stay_objects_where_a_template_needs_tools() -> None:
    source = "{% for tool in tools %}{{ tool.function.name }}{% endfor %}{% for m in messages %}"
    source += "{% for call in m.tool_calls or [] %}{{ call.function.arguments.place }}{% endfor %}"
    needs_tools = ChatTemplate(source + "{% endfor %}", bos_token="", eos_token="")
    got = chat_prompt(TOKENIZERS["qwen3"], needs_tools, [USER, CALLS], tools=[TOOL])
    assert got.text == "weatherZürich"


@pytest.mark.parametrize("value", [True, False])
def test_the_switch_for_thinking(name: str, value: bool) -> None:
    got = prompt(name, [USER], enable_thinking=value)
    assert got.text == in_jinja(name, [USER], enable_thinking=value)
    if name == "qwen3":
        assert got.text.endswith("</think>\n\n") != value
        assert got.warnings == ()
    else:
        (line,) = got.warnings
        assert line.startswith("the chat template does not read enable_thinking: it can't switch")
        reasons = name in ("deepseek", "mistral", "gpt-oss")
        assert ("a reasoning budget of 0" in line) == (reasons and not value)


def test_a_switch_of_another_name() -> None:
    """Granite 3's and DeepSeek V3.1's is `thinking`, which is also what gpt-oss calls a field."""
    source = "{% if thinking %}<think>{% else %}<think></think>{% endif %}{{ messages[0].content }}"
    template = ChatTemplate(source, bos_token="", eos_token="")
    tokenizer = TOKENIZERS["qwen3"]
    assert (template.think_switch, TEMPLATES["qwen3"].think_switch) == ("thinking", THINK_SWITCH)
    assert TEMPLATES["gpt-oss"].think_switch is None
    for value, opening in (
        (True, "<think>"),
        (False, "<think></think>"),
        (None, "<think></think>"),
    ):
        got = chat_prompt(tokenizer, template, [USER], enable_thinking=value)
        assert (got.text, got.warnings) == (opening + USER["content"], ())
    variables = {"thinking": True}
    got = chat_prompt(tokenizer, template, [USER], template_kwargs=variables, reasoning_budget=0)
    assert got.text.startswith("<think>How")


@pytest.mark.parametrize("field", ["reasoning_content", "thinking", "reasoning"])
@pytest.mark.parametrize("read", ["reasoning_content", "thinking"])
def test_reasoning_by_any_name(field: str, read: str) -> None:
    """Templates read it by the first name as in transformers, and gpt-oss's by the second."""
    source = "{% for m in messages %}{{ m.READ or '' }}|{{ m.content }}|{% endfor %}"
    template = ChatTemplate(source.replace("READ", read), bos_token="", eos_token="")
    answer = {"role": "assistant", "content": "Fine.", field: "Hm"}
    got = chat_prompt(TOKENIZERS["qwen3"], template, [USER, answer])
    assert got.text == "|How is it in Bern?|Hm|Fine.|"
    begun = {**answer, field: "Hm, Be"}
    options: dict[str, Any] = {"continue_final_message": read}
    got = chat_prompt(TOKENIZERS["qwen3"], template, [USER, begun], **options)
    assert got.text == "|How is it in Bern?|Hm, Be"


def test_reasoning_between_tags_is_put_in_a_channel() -> None:
    """What `LLM.chat` gives as the text of an answer can be given back as one."""
    answer = {"role": "assistant", "content": "<think>\nHm\n</think>\n\nFine."}
    got = prompt("gpt-oss", [USER, answer, USER]).text
    assert got == prompt("gpt-oss", [USER, {**answer, "content": "Fine."}, USER]).text
    got = prompt("gpt-oss", [USER, answer], continue_final_message=True).text
    assert got.endswith(
        "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>final<|message|>Fine."
    )


KEEPING = (
    ("preserve_thinking", "preserve_thinking is true"),
    ("clear_thinking", "clear_thinking is false"),
    ("truncate_history_thinking", "truncate_history_thinking is false"),
    ("drop_thinking", "drop_thinking is false"),
)


def keeping(condition: str) -> ChatTemplate:
    """A template that keeps all reasoning under a condition, else that after the last user."""
    source = (
        "{% for m in messages %}{% if m.reasoning_content and (CONDITION or loop.last) %}"
        "<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}|{% endfor %}"
    )
    return ChatTemplate(source.replace("CONDITION", condition), bos_token="", eos_token="")


REASONED = [USER, {"role": "assistant", "content": "Fine.", "reasoning_content": "Hm"}, USER]


@pytest.mark.parametrize(("name", "condition"), KEEPING)
def test_reasoning_of_earlier_answers_stays_or_not(name: str, condition: str) -> None:
    template, tokenizer = keeping(condition), TOKENIZERS["qwen3"]
    kept = "How is it in Bern?|<think>Hm</think>Fine.|How is it in Bern?|"
    for options, stays in (
        ({}, True),
        ({"preserve_reasoning": True}, True),
        ({"preserve_reasoning": False}, False),
        ({"template_kwargs": {"preserve_reasoning": False}}, False),
        ({"template_kwargs": {name: name != "preserve_thinking"}}, False),
        ({"preserve_reasoning": False, "template_kwargs": {name: name[0] == "p"}}, True),
    ):
        got = chat_prompt(tokenizer, template, REASONED, **options)  # type: ignore[arg-type]
        assert got.text == (kept if stays else kept.replace("<think>Hm</think>", "")), options
        assert got.warnings == ()


def test_a_template_that_decides_by_itself_what_reasoning_stays() -> None:
    template, tokenizer = keeping("false"), TOKENIZERS["qwen3"]
    assert chat_prompt(tokenizer, template, REASONED).warnings == ()
    for value in (True, False):
        got = chat_prompt(tokenizer, template, REASONED, preserve_reasoning=value)
        assert "preserve_reasoning has no effect" in got.warnings[0]
    with pytest.raises(UsageError, match="preserve_reasoning must be true or false, not 'no'"):
        chat_prompt(tokenizer, template, REASONED, template_kwargs={"preserve_reasoning": "no"})


def test_a_server_says_what_reasoning_stays_where_a_request_does_not(tiny_model: Path) -> None:
    source = keeping("preserve_thinking is true").source
    for preserves, kwargs, stays in (
        (None, {}, True),
        (False, {}, False),
        (False, {"preserve_reasoning": True}, True),
        (True, {"preserve_thinking": False}, False),
    ):
        model = PromptModel(tiny_model, chat_template=source, preserve_reasoning=preserves)
        got = model.conversation(REASONED, template_kwargs=kwargs)
        assert ("<think>" in got.text) == stays
        assert (model.warnings, got.warnings) == ([], ())
    model = PromptModel(tiny_model, chat_template="{{ messages }}", preserve_reasoning=False)
    assert "--no-reasoning-preserve has no effect" in model.warnings[0]
    assert model.conversation(REASONED).warnings == ()


def test_other_variables() -> None:
    got = prompt("gpt-oss", [USER], template_kwargs={"reasoning_effort": "high", "x": 1})
    assert "Reasoning: high" in got.text
    assert got.warnings == ("the chat template does not read 'x', which has no effect",)
    dated = prompt("llama3.1", [USER], template_kwargs={"date_string": "1 May 2031"})
    assert dated.text == in_jinja("llama3.1", [USER], date_string="1 May 2031")
    thinking = prompt("qwen3", [USER], template_kwargs={"enable_thinking": False})
    assert thinking.text == prompt("qwen3", [USER], enable_thinking=False).text


def test_the_developer_is_the_system_where_there_is_no_such_role(name: str) -> None:
    got = prompt(name, [{"role": "developer", "content": "Be short."}, USER])
    assert got.text == in_jinja(name, [SYSTEM, USER])
    assert "Be short." in got.text


def test_content_in_parts(name: str) -> None:
    parts = [{"type": "text", "text": "One."}, {"type": "text", "text": "Two."}]
    system = [{"type": "text", "text": "Be short."}]
    messages = [{"role": "system", "content": system}, {"role": "user", "content": parts}]
    got = prompt(name, messages).text
    if name == "mistral":  # reads the parts of a user's message
        assert got == in_jinja(name, [SYSTEM, {"role": "user", "content": parts}])
        assert "One.Two." in got
    else:
        assert got == in_jinja(name, [SYSTEM, {"role": "user", "content": "One.\nTwo."}])


# --- where an answer is continued


@pytest.mark.parametrize("text", ["Sure", "Sure, ", "  Sure\n\n", "<think>\nWell", "a\nb"])
def test_a_prefill_is_the_final_message_of_transformers(name: str, text: str) -> None:
    got = prompt(name, [SYSTEM, USER], prefill=text)
    final = [SYSTEM, USER, {"role": "assistant", "content": text}]
    if name == "gpt-oss" and "think" in text:
        assert got.text.endswith("<|start|>assistant<|channel|>analysis<|message|>Well")
    else:
        assert got.text == in_jinja(name, final, continues=True)
        assert got.text.endswith(got.opening)
    assert got.opening == (text.strip() if name == "llama3.1" else text)
    same = prompt(name, final, continue_final_message=True)
    assert (same.text, same.ids, same.opening) == (got.text, got.ids, "")


def test_a_message_in_parts_is_continued_after_the_last() -> None:
    parts = [{"type": "text", "text": "A "}, {"type": "text", "text": "B "}]
    messages = [{"role": "user", "content": parts}]
    got = prompt("mistral", messages, continue_final_message=True)
    assert got.text == "<s>[INST]A B "


def test_reasoning_is_continued_by_the_name_of_its_field() -> None:
    thought = {"role": "assistant", "content": "", "reasoning_content": "They ask"}
    got = prompt("qwen3", [USER, thought], continue_final_message="reasoning_content")
    assert got.text.endswith("<|im_start|>assistant\n<think>\nThey ask")
    assert got.reasoning == THINK
    assert got.n_reasoned == len(TOKENIZERS["qwen3"].encode("They ask", add_special=False))


def test_a_message_that_the_template_cuts_is_not_continued() -> None:
    with pytest.raises(ChatTemplateError, match="leaves out part of the message"):
        prompt("deepseek", [USER], prefill="<think>\nHm.\n</think>\n\nSure")


WRITTEN = ["Sure, it", "Sure.\n\n", "<think>\nWell", "<think>\nWell\n</think>\n\nIt is"]


@pytest.mark.parametrize("text", WRITTEN)
def test_an_answer_goes_on_as_it_was_written(name: str, text: str) -> None:
    """After the prompt that it answered, character by character."""
    begun = prompt(name, [SYSTEM, USER])
    got = prompt(name, [SYSTEM, USER], continued=text)
    if name == "deepseek" and not text.startswith("<think>"):
        # its prompt opens the reasoning, and this was written without any
        final = [SYSTEM, USER, {"role": "assistant", "content": text}]
        assert got.text == in_jinja(name, final, continues=True)
    elif name == "deepseek":
        assert got.text == begun.text + text.removeprefix("<think>\n")
    elif name == "gpt-oss":
        written = "".join(piece for piece, _ in in_channels(text))
        assert written.startswith("<|channel|>analysis" if "think" in text else "<|channel|>final")
        assert got.text == begun.text + written
    else:
        assert got.text == begun.text + text
    is_open = text == "<think>\nWell"
    opened = CHANNELS if name == "gpt-oss" else THINK
    assert got.reasoning == (opened if is_open else None)
    assert (got.n_reasoned > 0) == is_open
    assert (got.opening, got.is_begun) == ("", True)


def test_tags_that_are_control_tokens_go_on_as_such() -> None:
    """The model wrote them so; a user who writes them into a prefill does not."""
    tokenizer = TOKENIZERS["mistral"]
    begin, end = (tokenizer.token_to_id(tag) for tag in ("[THINK]", "[/THINK]"))
    cut = prompt("mistral", [USER], continued="[THINK]Well[/THINK]It [THINK]").ids
    assert (cut.count(begin), cut.count(end)) == (1, 1)
    typed = prompt("mistral", [USER], prefill="[THINK]Well[/THINK]").ids
    assert (typed.count(begin), typed.count(end)) == (0, 0)


def test_reasoning_goes_on_although_it_is_switched_off_now() -> None:
    text = "<think>\nWell"
    got = prompt("qwen3", [USER], continued=text, enable_thinking=False)
    assert got.text == prompt("qwen3", [USER], continued=text).text


def test_prompts_that_open_the_reasoning() -> None:
    assert prompt("deepseek", [USER]).reasoning == THINK
    assert prompt("deepseek", [USER]).n_reasoned == 0
    assert prompt("deepseek", [USER]).opening == "<think>\n"
    assert prompt("qwen3", [USER]).reasoning is None
    assert prompt("qwen3", [USER], enable_thinking=False).reasoning is None


def test_a_user_opens_no_reasoning() -> None:
    plain = ChatTemplate("{{ messages[0].content }}", bos_token="", eos_token="")
    got = chat_prompt(TOKENIZERS["qwen3"], plain, [{"role": "user", "content": "a <think>"}])
    assert (got.text, got.opening, got.reasoning) == ("a <think>", "", None)


def test_no_reasoning_at_all() -> None:
    """A budget of 0 is the switch where there is one."""
    off = prompt("qwen3", [USER], reasoning_budget=0)
    assert off.text == prompt("qwen3", [USER], enable_thinking=False).text
    assert prompt("qwen3", [USER], reasoning_budget=0, enable_thinking=True).text == (
        prompt("qwen3", [USER]).text
    )
    assert (off.reasoning_budget, off.warnings) == (0, ())
    on = {"template_kwargs": {"enable_thinking": True}}
    assert prompt("qwen3", [USER], reasoning_budget=0, **on).text == prompt("qwen3", [USER]).text
    assert prompt("qwen3", [USER], reasoning_budget=-1).reasoning_budget is None
    assert prompt("llama3.1", [USER], reasoning_budget=9).warnings == (
        "neither the chat template nor the vocabulary has a tag for reasoning, so a budget of it "
        "has no effect",
    )


# --- what is refused


@pytest.mark.parametrize(
    ("messages", "options", "message"),
    [
        (["Hi"], {}, r'messages\[0\] is a str, not {"role": ..., ...}'),
        ([{"content": "Hi"}], {}, r"messages\[0\] has no role"),
        ([{"role": "user", "content": 3}], {}, r"messages\[0\].content is a int, not text"),
        (
            [USER, {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            {},
            r"messages\[1\].content\[0\]: a part of type 'image_url' is not supported",
        ),
        ([{"role": "user", "content": ["Hi"]}], {}, r"content\[0\]: this part is not supported"),
        ([{**CALLS, "tool_calls": "x"}], {}, r"messages\[0\].tool_calls is a str, not a list"),
        ([{**CALLS, "tool_calls": [3]}], {}, r"messages\[0\].tool_calls\[0\] has no function"),
        (
            [{**CALLS, "tool_calls": [{"function": {"name": "f", "arguments": "{]"}}]}],
            {},
            r"messages\[0\].tool_calls\[0\].function.arguments is not JSON",
        ),
        (
            [{**CALLS, "tool_calls": [{"function": {"name": "f", "arguments": "[]"}}]}],
            {},
            r"function.arguments is not an object",
        ),
        ([USER], {"tools": [print]}, r"tools\[0\] is a builtin_function_or_method, not a JSON"),
        ([USER], {"template_kwargs": {"tools": 1}}, "template_kwargs can't have 'tools'"),
        ([USER], {"template_kwargs": {"bos_token": ""}}, "template_kwargs can't have 'bos_token'"),
        ([USER], {"template_kwargs": {3: 1}}, "template_kwargs: 3 is not a name"),
        ([USER], {"template_kwargs": {"x": {1, 2}}}, "x: a set is not a JSON value"),
        (
            [USER],
            {"template_kwargs": {"enable_thinking": True}, "enable_thinking": False},
            "enable_thinking is False, and another in template_kwargs",
        ),
        ([USER], {"prefill": "a", "continued": "b"}, "prefill and continued say how"),
        (
            [USER],
            {"prefill": "a", "add_generation_prompt": True},
            "add_generation_prompt=True contradicts prefill",
        ),
        (
            [USER],
            {"continued": "a", "add_generation_prompt": False},
            "add_generation_prompt=False contradicts continued",
        ),
        (
            [USER, {"role": "assistant", "content": "A"}],
            {"prefill": "a"},
            "prefill begins an answer, and the last message is one already",
        ),
        ([], {"continue_final_message": True}, "the last message has no content that can be"),
        (
            [USER, {"role": "assistant", "content": None}],
            {"continue_final_message": True},
            "the last message has no content that can be continued",
        ),
        ([USER], {"continue_final_message": "thinking"}, "the last message has no thinking that"),
        ([USER], {"reasoning_budget": -2}, "reasoning_budget must be -1 or more, not -2"),
    ],
)
def test_arguments_that_make_no_sense(messages: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        prompt("qwen3", messages, **options)


def test_tools_that_a_template_reads_and_does_not_show() -> None:
    """Phi 4's template looks for them in a system message."""
    source = "{% for m in messages %}{{ m.role }}{{ m.content }}{{ m.tools }}{% endfor %}"
    template = ChatTemplate(source, bos_token="", eos_token="")
    got = chat_prompt(TOKENIZERS["qwen3"], template, [USER], tools=[TOOL])
    assert got.warnings == ("the chat template does not read tools: the model is not told of them",)


def test_tool_calls_that_a_template_does_not_read() -> None:
    plain = ChatTemplate(
        "{% for m in messages %}{{ m.content }}{% endfor %}", bos_token="", eos_token=""
    )
    got = chat_prompt(TOKENIZERS["qwen3"], plain, [USER, CALLS])
    assert '{"name": "weather", "arguments": {' in got.text
    assert "the text says them as JSON" in got.warnings[0]


# --- nobody but the template writes control tokens


PIECES = st.sampled_from(
    [
        *(token for family in FAMILIES.values() for token in family.control),
        "<think>",
        "</think>",
        "<tool_call>",
        TAG,
        "CONTINUE_FINAL_MESSAGE_TAG",
        '"',
        "\\",
        "{{ bos_token }}",
        "{% endfor %}",
        " ",
        "\n",
        "a",
        "<|",
        "é",
        "\ud800",
    ]
)
HOSTILE = st.lists(PIECES, max_size=6).map("".join)


def control_tokens(name: str, ids: list[int]) -> list[int]:
    tokenizer = TOKENIZERS[name]
    return [token for token in ids if tokenizer.is_control(token)]


@pytest.mark.parametrize("name", sorted(FAMILIES))
@given(text=HOSTILE)
@settings(max_examples=40, deadline=None)
def test_nothing_that_is_passed_becomes_a_control_token(name: str, text: str) -> None:
    """Each place in turn: the control tokens are as in a conversation with harmless text."""

    def conversations(text: str) -> list[dict[str, Any]]:
        tool = {
            "type": "function",
            "function": {
                "name": text,
                "description": text,
                "parameters": {"type": "object", "properties": {text: {"type": text}}},
            },
        }
        function = {"name": text, "arguments": {text: [text]}}
        calls = {**CALLS, "content": "", "tool_calls": [{**CALL, "function": function}]}
        parts = [{"type": "text", "text": text}, {"type": "text", "text": text}]
        return [
            {"messages": [SYSTEM, {"role": "user", "content": parts}]},
            {"messages": [{"role": "system", "content": parts}, USER]},
            {"messages": [{"role": "developer", "content": text}, USER]},
            {"messages": [SYSTEM, USER], "tools": [tool]},
            {"messages": [USER, calls, {**RESULT, "content": text, "name": text}]},
            {
                "messages": [USER],
                "template_kwargs": {"date_string": text, "reasoning_effort": text},
            },
            {"messages": [USER], "prefill": f"x{text}x"},
            {"messages": [USER], "continued": f"x{text}x"},
        ]

    for hostile, harmless in zip(conversations(text), conversations("x"), strict=True):
        try:
            got = prompt(name, **hostile)
        except ChatTemplateError:  # a tag in it made the template cut the message
            assert "</think>" in hostile.get("prefill", hostile.get("continued", ""))
            continue
        expected = control_tokens(name, prompt(name, **harmless).ids)
        assert control_tokens(name, got.ids) == expected, hostile


# --- how much the model reasons


SWITCH = (
    "{% if enable_thinking is defined %}[{{ enable_thinking }}]{% endif %}{{ messages[0].content }}"
)
EFFORT = "{% if reasoning_effort %}[{{ reasoning_effort }}]{% endif %}{{ messages[0].content }}"


REFUSES = "{{ raise_exception('no such effort') if reasoning_effort == 'none' }}"


@pytest.mark.parametrize(
    ("source", "effort", "text", "budget", "n_warnings"),
    [
        (EFFORT, "high", "[high]Hi", None, 0),
        (EFFORT, "none", "[none]Hi", 0, 0),
        (SWITCH, "none", "[False]Hi", 0, 0),
        (SWITCH, "low", "Hi", None, 1),
        ("{{ messages[0].content }}", "low", "Hi", None, 1),
        ("{{ messages[0].content }}", "none", "Hi", 0, 0),
        (REFUSES + EFFORT, "none", "Hi", 0, 0),
    ],
)
def test_the_effort_of_reasoning(
    source: str, effort: str, text: str, budget: int | None, n_warnings: int
) -> None:
    """The tokenizer is of a family with tags for reasoning in its vocabulary."""
    template = ChatTemplate(source, bos_token="", eos_token="")
    messages = [{"role": "user", "content": "Hi"}]
    got = chat_prompt(TOKENIZERS["qwen3"], template, messages, reasoning_effort=effort)
    assert (got.text, got.reasoning_budget, len(got.warnings)) == (text, budget, n_warnings)


def test_no_effort_where_there_is_no_reasoning() -> None:
    template = ChatTemplate("{{ messages[0].content }}", bos_token="", eos_token="")
    got = chat_prompt(TOKENIZERS["llama3.1"], template, [USER], reasoning_effort="none")
    assert (got.reasoning_budget, got.warnings) == (None, ())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reasoning_effort": "none", "enable_thinking": True}, "reasoning is switched on"),
        ({"reasoning_effort": "hgih"}, "reasoning_effort is 'hgih'"),
    ],
)
def test_efforts_that_make_no_sense(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        prompt("qwen3", [USER], **options)
