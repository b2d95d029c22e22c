"""`LLM.chat` with tools: from the template's markers to the calls that come out of the answer."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from localkv import LLM
from localkv.errors import UsageError
from localkv.loader.chat_messages import messages_for
from localkv.loader.chat_template import ChatTemplate
from support import family_templates
from support import tiny_model as tiny_model_file
from support.paths import ROOT
from support.quick import quick

ASKED = [{"role": "user", "content": "Where is the fox?"}]
LOOK = {
    "name": "look",
    "description": "Look at a place.",
    "parameters": {
        "type": "object",
        "properties": {"at": {"type": "string", "maxLength": 6}},
        "required": ["at"],
        "additionalProperties": False,
    },
}
STOP = {
    "name": "stop",
    "description": "Go home.",
    "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
}
TOOLS = [{"type": "function", "function": one} for one in (LOOK, STOP)]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(ROOT / "models/tales-4M-Q8_0.gguf", progress=False)


@pytest.fixture(scope="module")
def qwen(llm: LLM) -> ChatTemplate:
    return llm.chat_template_from(family_templates.QWEN3.source)


@pytest.mark.parametrize(
    "name", quick(["QWEN3", "LLAMA31", "MISTRAL", "DEEPSEEK", "GPT_OSS"], ["GPT_OSS"])
)
@pytest.mark.filterwarnings("ignore:neither the chat template", "ignore:the chat template does not")
def test_a_chosen_tool_is_called_in_the_familys_own_markup(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = getattr(family_templates, name)
    monkeypatch.setattr(tiny_model_file, "CONTROL", family.control)
    monkeypatch.setattr(tiny_model_file, "TEMPLATE", family.source)
    path = tiny_model_file.write_tiny_model(tmp_path / "m.gguf")
    with LLM(path, n_ctx=1024, progress=False) as llm:
        # these families' tokenizers put no space after a marker, as the tiny one would
        vocabulary = llm.tokenizer._vocabulary
        llm.tokenizer._vocabulary = replace(vocabulary, add_space_prefix=False)
        for seed in range(3):
            options = {"tools": TOOLS, "parallel_tool_calls": False, "seed": seed}
            done = llm.chat(
                ASKED, tool_choice="look", max_tokens=150, reasoning_budget=4, **options
            ).completion
            assert done.finish_reason == "stop", done.text
            [call] = done.tool_calls
            assert (done.content, call.name, call.is_whole) == ("", "look", True)
            assert len(call.values["at"]) <= 6
            # and the next turn's prompt takes it as it is
            said = {"role": "assistant", "content": "", "tool_calls": [call.message()]}
            found = {"role": "tool", "content": "no", "tool_call_id": call.id, "name": "look"}
            prompt = llm.chat_prompt([*ASKED, said, found], tools=TOOLS)
            assert "look" in prompt.text.rpartition("Where is the fox?")[2]


def test_calls_are_found_and_content_is_the_rest(llm: LLM, qwen: ChatTemplate) -> None:
    done = llm.chat(
        ASKED, template=qwen, tools=TOOLS, tool_choice="required", max_tokens=120
    ).completion
    assert done.text.lstrip().startswith("<tool_call>")
    assert {call.name for call in done.tool_calls} <= {"look", "stop"}
    assert done.tool_calls
    done = llm.chat(ASKED, template=qwen, tools=TOOLS, max_tokens=20).completion
    assert (done.content, done.tool_calls) == (done.text, ())
    done = llm.chat(ASKED, template=qwen, max_tokens=20).completion
    assert (done.content, done.tool_calls) == (None, ())


def test_no_choice_leaves_the_tools_out(llm: LLM, qwen: ChatTemplate) -> None:
    options = {"template": qwen, "max_tokens": 20, "seed": 1}
    plain = llm.chat(ASKED, **options).completion
    none = llm.chat(ASKED, tools=TOOLS, tool_choice="none", **options).completion
    assert (none.text, none.usage.prompt_tokens) == (plain.text, plain.usage.prompt_tokens)


def test_what_contradicts_is_refused(llm: LLM, qwen: ChatTemplate) -> None:
    for options, reason in (
        ({"tools": TOOLS, "tool_choice": "nobody"}, "none of the tools"),
        ({"tool_choice": "required"}, "there are no tools"),
        ({"tools": TOOLS, "schema": {}, "grammar": "start: /x/"}, "give one of them"),
        ({"tools": TOOLS, "tool_choice": {"type": "x"}}, "tool_choice is none"),
    ):
        with pytest.raises(UsageError, match=reason):
            llm.chat(ASKED, template=qwen, **options)


def test_an_answer_keeps_to_its_schema_beside_tools(llm: LLM, qwen: ChatTemplate) -> None:
    schema = {"enum": ["yes", "no"]}
    options = {"template": qwen, "tools": TOOLS, "schema": schema, "max_tokens": 80}
    for seed in range(4):
        done = llm.chat(ASKED, seed=seed, **options).completion
        assert (done.content in ('"yes"', '"no"')) != bool(done.tool_calls)
        assert done.finish_reason == "stop" or done.tool_calls


def test_ids_that_are_missing_or_refused_are_replaced() -> None:
    source = family_templates.MISTRAL.source
    template = ChatTemplate(source, bos_token="<s>", eos_token="</s>")

    def call(id: str | None) -> dict[str, object]:
        return {"id": id, "type": "function", "function": {"name": "look", "arguments": "{}"}}

    said = {
        "role": "assistant",
        "content": "",
        "tool_calls": [call(None), call("call_" + "x" * 24)],
    }
    results = [
        {"role": "tool", "content": "no", "tool_call_id": None},
        {"role": "tool", "content": "yes", "tool_call_id": "call_" + "x" * 24},
    ]
    shaped = messages_for(template, [*ASKED, said, *results])
    ids = [one["id"] for one in shaped[1]["tool_calls"]]
    assert [one["tool_call_id"] for one in shaped[2:]] == ids
    assert all(re.fullmatch("[a-zA-Z0-9]{9}", id) for id in ids)
    assert len(set(ids)) == 2
    template.render(shaped)  # which fails with other ids
    plain = ChatTemplate("{{ messages }}", bos_token="", eos_token="")
    assert messages_for(plain, [*ASKED, results[1]])[1]["tool_call_id"] == "call_" + "x" * 24
