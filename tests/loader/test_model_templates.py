"""Templates in the manner of twenty families, and what transformers makes of conversations.

`tests/data/make_transformers_prompts.py` records that.
"""

from __future__ import annotations

import json
from datetime import datetime, tzinfo
from pathlib import Path
from typing import Any

import pytest

from localkv.errors import ChatTemplateError
from localkv.loader import template_program
from localkv.loader.chat_messages import messages_for, with_reasoning
from localkv.loader.chat_prompt import chat_prompt
from localkv.loader.chat_template import ChatTemplate
from localkv.loader.template_program import TemplateProgram
from localkv.loader.tokenizer import tokenizer_from_metadata
from support.tiny_vocabulary import bpe_metadata

DATA = Path(__file__).parent.parent / "data"
RECORDED = json.loads((DATA / "transformers_prompts.json").read_text())
TEMPLATES = {path.stem: path.read_text() for path in sorted((DATA / "templates").glob("*.jinja"))}
TOKENS = RECORDED["bos_token"], RECORDED["eos_token"]


class Clock(datetime):
    @classmethod
    def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
        return datetime.fromisoformat(RECORDED["now"])


def rendered(
    program: TemplateProgram, messages: list[dict[str, Any]], options: dict[str, Any]
) -> str | None:
    """A prompt, or None if the template refuses the conversation or fails on it."""
    variables = {"documents": None, "tools": None, "add_generation_prompt": False, **options}
    reasoned = [
        with_reasoning(m, m["reasoning_content"]) if "reasoning_content" in m else m
        for m in messages
    ]
    try:
        pieces = program.render({**variables, "messages": reasoned}, 10**6)
    except ChatTemplateError:
        return None
    return "".join(text for text, _ in pieces)


@pytest.mark.parametrize("name", TEMPLATES)
def test_prompts_are_those_of_transformers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_program, "datetime", Clock)
    program = TemplateProgram(TEMPLATES[name], *TOKENS)
    n_texts = 0
    for conversation, expected in RECORDED["prompts"][name].items():
        messages = RECORDED["conversations"][conversation]
        for (kind, options), text in zip(RECORDED["options"].items(), expected, strict=True):
            if text == -1:
                continue
            text = expected[text] if isinstance(text, int) else text
            assert rendered(program, messages, options) == text, (conversation, kind)
            n_texts += text is not None
    assert n_texts >= 35


@pytest.mark.parametrize("name", TEMPLATES)
def test_calls_are_put_as_the_template_reads_them(name: str) -> None:
    """Arguments as text and as objects make the same prompt where one of them makes none."""
    template = ChatTemplate(TEMPLATES[name], bos_token="<s>", eos_token="</s>")
    prompts = set()
    for conversation in ("call", "call_as_text"):
        given = RECORDED["conversations"][conversation]
        messages = [{k: v for k, v in m.items() if k != "reasoning_content"} for m in given]
        messages[-1]["content"] = "21"
        try:
            prompts.add(template.render(messages_for(template, messages)))
        except ChatTemplateError:
            assert name == "gemma3"  # it knows no calls
    assert len(prompts) == (name != "gemma3")


OPENS = {
    # with the switch for reasoning left alone, on and off
    "apertus": ("", "", ""),
    "command-r7b": ("", "", ""),
    "deepseek-v3": ("", "<think>", ""),
    "exaone4": ("", "<think>\n", ""),
    "gemma4": ("", "", ""),
    "glm4": ("<think>", "<think>", ""),
    "minimax-m2": ("<think>\n", "<think>\n", "<think>\n"),
    "olmo3": ("<think>", "<think>", "<think>"),
}


@pytest.mark.parametrize("name", OPENS)
def test_prompts_that_open_the_reasoning(name: str) -> None:
    template = ChatTemplate(TEMPLATES[name], bos_token="<s>", eos_token="</s>")
    tokenizer = tokenizer_from_metadata(bpe_metadata("qwen2"))
    for value, opening in zip((None, True, False), OPENS[name], strict=True):
        got = chat_prompt(
            tokenizer, template, RECORDED["conversations"]["user"], enable_thinking=value
        )
        assert (got.opening, got.reasoning is not None) == (opening, opening != "")
        has_switch = name not in ("minimax-m2", "olmo3")
        assert (got.warnings == ()) == (has_switch or value is None)


def test_switches_of_reasoning() -> None:
    switches = {
        name: ChatTemplate(source, bos_token="", eos_token="").think_switch
        for name, source in TEMPLATES.items()
    }
    read = {name for name, switch in switches.items() if switch == "enable_thinking"}
    assert read == {"apertus", "command-r7b", "exaone4", "gemma4", "glm4", "hunyuan", "smollm3"}
    assert {name for name, switch in switches.items() if switch == "thinking"} == {
        "deepseek-v3",
        "granite",
    }
