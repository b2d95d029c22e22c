"""The options that a chat template is rendered with, as `complete` takes them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

NONE = {
    "template_kwargs": {},
    "tools": [],
    "enable_thinking": None,
    "reasoning_budget": None,
    "prefill": "",
}
TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("argv", "asked"),
    [
        (["--chat"], {}),
        (["--think"], {"enable_thinking": True}),
        (["--no-think"], {"enable_thinking": False}),
        (["--reasoning-budget", "64"], {"reasoning_budget": 64}),
        (["--reasoning-budget=-1"], {"reasoning_budget": -1}),
        (["--prefill", r"A\n"], {"prefill": "A\n"}),
        (["--prefill", r"A\n", "--no-escape"], {"prefill": r"A\n"}),
        (["--chat-template-kwargs", '{"a": [1]}'], {"template_kwargs": {"a": [1]}}),
        (["--tools", "FILE"], {"tools": [TOOL]}),
    ],
)
def test_each_is_passed_on_and_implies_chat(
    program, llm, model, tmp_path: Path, argv, asked
) -> None:
    tools = tmp_path / "tools.json"
    tools.write_text(json.dumps([TOOL]))
    argv = [tools if word == "FILE" else word for word in argv]
    assert program("complete", "-m", model, "-p", "x", *argv).code == 0
    assert llm.asked["messages"] == [{"role": "user", "content": "x"}]
    assert {name: llm.asked[name] for name in NONE} == {**NONE, **asked}


def test_without_them_a_prompt_is_plain(program, llm, model) -> None:
    program("complete", "-m", model, "-p", "x")
    assert llm.asked["prompt"] == "x"


@pytest.mark.parametrize(
    ("variable", "value", "asked"),
    [
        ("LLAMA_ARG_THINK_BUDGET", "7", {"reasoning_budget": 7}),
        ("LLAMA_ARG_CHAT_TEMPLATE_KWARGS", '{"x": "y"}', {"template_kwargs": {"x": "y"}}),
        ("LOCALKV_THINK", "0", {"enable_thinking": False}),
    ],
)
def test_variables(program, llm, model, monkeypatch, variable, value, asked) -> None:
    monkeypatch.setenv(variable, value)
    program("complete", "-m", model, "-p", "x")
    assert {name: llm.asked[name] for name in asked} == asked


def test_an_option_without_effect_is_one_line(program, llm, model) -> None:
    llm.prompt_warnings = ("the chat template does not read 'x', which has no effect",)
    result = program("complete", "-q", "-m", model, "-p", "x", "--chat-template-kwargs", '{"x": 1}')
    assert result.err == "warning: the chat template does not read 'x', which has no effect\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1,}', "is not JSON: Illegal trailing comma before end of object at column 8"),
        ("{'a': 1}", "is not JSON: Expecting property name enclosed in double quotes at column 2"),
        ('{\n"a" 1}', "is not JSON: Expecting ':' delimiter at line 2, column 5"),
        ("", "is not JSON: Expecting value at column 1"),
        ('{"a": NaN}', "is not JSON: NaN is no number in JSON"),
        ("[" * 9999, "is not JSON: "),
        ("[1]", "must be an object, not a list"),
        ("null", "must be an object, not null"),
        ("true", "must be an object, not true or false"),
        ("1.5", "must be an object, not a number"),
        ('"a"', "must be an object, not a text"),
    ],
)
def test_variables_that_are_no_object(program, llm, model, text, message) -> None:
    result = program("complete", "-m", model, "-p", "x", "--chat-template-kwargs", text)
    assert (result.code, len(result.err_lines)) == (2, 1)
    if "trailing comma" in message and "trailing comma" not in result.err:
        message = "is not JSON: Expecting property name"  # before Python 3.13
    assert result.err.startswith(f"error: --chat-template-kwargs {message}")
    assert llm.loaded == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[{"a": 1},\n {"b"}]', " is not JSON: Expecting ':' delimiter at line 2, column 6"),
        ("{}", " must be a list, not an object"),
        ('[{}, "f"]', ", [1] must be an object, not a text"),
        ("[null]", ", [0] must be an object, not null"),
    ],
)
def test_tools_that_are_no_list(program, llm, model, tmp_path: Path, text, message) -> None:
    tools = tmp_path / "tools.json"
    tools.write_text(text)
    result = program("complete", "-m", model, "-p", "x", "--tools", tools)
    assert (result.code, result.err) == (2, f"error: --tools {tools}{message}\n")
    assert llm.loaded == {}


def test_tools_that_are_not_there(program, model, tmp_path: Path) -> None:
    path = tmp_path / "none.json"
    result = program("complete", "-m", model, "-p", "x", "--tools", path)
    assert result.err == f"error: --tools {path}: No such file or directory\n"
    assert result.code == 2


def test_a_budget_below_all_is_refused(program, model) -> None:
    result = program("complete", "-m", model, "-p", "x", "--reasoning-budget=-2")
    assert result.code == 2
    assert "-2 is less than -1" in result.err
