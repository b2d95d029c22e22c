"""Conversations through `LLM`: what templates are given, begun answers, reasoning that ends."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest

from localkv import LLM
from localkv import llm as llm_module
from localkv.chat.conversation import split_reasoning
from localkv.errors import UsageError
from localkv.llm import TextModel
from localkv.loader.answer_tags import CHANNELS
from localkv.loader.chat_template import ChatTemplate
from localkv.loader.tokenizer import tokenizer_from_metadata
from support import tiny_model as tiny_model_file
from support.family_templates import GPT_OSS
from support.tiny_vocabulary import bpe_metadata, spm_metadata, spm_model

HELLO = [{"role": "user", "content": "Tell me of the fox"}]
GREEDY = {"temperature": 0, "ignore_eos": True}
OPENS = """{{ bos_token }}<|user|>{{ messages[0].content }}<|assistant|>
{%- if messages[1] is defined %}{{ messages[1].content + eos_token }}{% endif %}
{%- if add_generation_prompt %}{{ '<think>\\n' }}{% endif %}"""


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> LLM:
    return LLM(tiny_model, n_ctx=200)


@pytest.fixture(scope="module")
def opens(llm: LLM) -> ChatTemplate:
    """A template that opens the reasoning."""
    return llm.chat_template_from(OPENS)


def new_ids(llm: LLM, n_prompt: int) -> list[int]:
    """The tokens that the last text added; the last one has no row yet."""
    return llm.engine.cached_ids[n_prompt:]


def test_a_prompt_of_a_conversation_is_a_prompt(llm: LLM) -> None:
    prompt = llm.chat_prompt(HELLO)
    assert prompt.text == "<s><|user|>Tell me of the fox<|assistant|>"
    options = {"max_tokens": 5, **GREEDY}
    text = llm.chat(HELLO, **options).completion.text
    assert llm.complete(prompt, **options).text == text
    assert llm.complete(prompt.ids, **options).text == text


def test_a_prefill_begins_the_text(llm: LLM, opens: ChatTemplate) -> None:
    stream = llm.chat(HELLO, template=opens, prefill="Once upon", max_tokens=6, **GREEDY)
    assert next(stream) == "Once upon"
    completion = stream.completion
    prompt = llm.chat_prompt(HELLO, template=opens, prefill="Once upon")
    assert completion.usage.prompt_tokens == len(prompt.ids)
    assert completion.usage.completion_tokens == 6
    final = [*HELLO, {"role": "assistant", "content": "Once upon"}]
    more = llm.chat(
        final, template=opens, continue_final_message=True, max_tokens=6, **GREEDY
    ).completion
    assert completion.text == f"Once upon{more.text}"
    assert more.usage.prompt_tokens == len(prompt.ids)


def test_a_prefill_is_not_looked_through_for_stop_strings(llm: LLM, opens: ChatTemplate) -> None:
    options: dict[str, Any] = {"template": opens, "prefill": "stop", "max_tokens": 6, **GREEDY}
    whole = llm.chat(HELLO, **options).completion
    assert llm.chat(HELLO, stop="stop", **options).completion.text == whole.text


def test_a_stream_that_is_closed_at_once_has_the_prefill(llm: LLM) -> None:
    stream = llm.chat(HELLO, prefill="Once", max_tokens=6)
    stream.close()
    completion = stream.completion
    assert (completion.text, completion.finish_reason) == ("Once", "cancelled")


@pytest.mark.parametrize("most", [0, 1, 4])
def test_a_budget_ends_the_reasoning(llm: LLM, opens: ChatTemplate, most: int) -> None:
    """The tag that ends it comes after that many tokens; the next ones are drawn after it."""
    close = llm.tokenizer.encode_segments([("</think>", True)], add_special=False)
    n_tokens = most + len(close) + 4
    options: dict[str, Any] = {"template": opens, "max_tokens": n_tokens, **GREEDY}
    prompt = llm.chat_prompt(HELLO, template=opens)
    n_prompt = len(prompt.ids)
    llm.chat(HELLO, **options).completion  # noqa: B018
    free = new_ids(llm, n_prompt)
    completion = llm.chat(HELLO, **options, reasoning_budget=most).completion
    ids = new_ids(llm, n_prompt)
    assert ids[: most + len(close)] == free[:most] + close
    assert completion.usage.completion_tokens == n_tokens
    assert "</think>" in completion.text
    for place in range(most + len(close), len(ids)):
        best = llm.logits(prompt.ids + ids[:place])[-1].argmax()
        assert ids[place] == int(best)


def test_a_budget_and_logprobs(llm: LLM, opens: ChatTemplate) -> None:
    """Tokens that are put there have a probability like any other."""
    options: dict[str, Any] = {"template": opens, "max_tokens": 12, **GREEDY}
    n_prompt = len(llm.chat_prompt(HELLO, template=opens).ids)
    plain = llm.chat(HELLO, **options, reasoning_budget=2).completion
    asked = llm.chat(HELLO, **options, reasoning_budget=2, logprobs=1).completion
    assert asked.text == plain.text
    assert asked.logprobs is not None
    assert len(asked.logprobs) == 12
    assert [one.id for one in asked.logprobs][:-1] == new_ids(llm, n_prompt)


def test_no_budget_changes_nothing(llm: LLM, opens: ChatTemplate) -> None:
    options: dict[str, Any] = {"template": opens, "max_tokens": 12, "seed": 3, "ignore_eos": True}
    texts = {
        llm.chat(HELLO, **options, reasoning_budget=most).completion.text
        for most in (None, -1, 12, 1000)
    }
    assert len(texts) == 1


def test_arguments_without_effect_are_warned_of(llm: LLM) -> None:
    with pytest.warns(UserWarning, match="does not read enable_thinking") as caught:
        llm.chat(HELLO, enable_thinking=True)
    assert caught[0].filename == __file__
    with pytest.warns(UserWarning, match="does not read tools"):
        llm.chat(HELLO, tools=[{"type": "function"}])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        llm.chat(HELLO)


def test_a_cut_answer_goes_on_from_its_rows(tiny_model: Path) -> None:
    """All that read as the same tokens again are reused, unless `exact` wants prompts evaluated."""
    for exact in (False, True):
        llm = LLM(tiny_model, n_ctx=200, exact=exact)
        options: dict[str, Any] = {"max_tokens": 8, "ignore_eos": True, "logit_bias": _words(llm)}
        first = llm.chat(HELLO, **options, seed=1).completion
        n_first = first.usage.prompt_tokens
        prompt = llm.chat_prompt(HELLO, continued=first.text)
        assert llm.detokenize(prompt.ids).endswith(f"<|assistant|>{first.text}")
        cached = llm.complete(prompt, **options).usage.cached_tokens
        if exact:
            assert cached == n_first
        else:
            assert cached > n_first


def _words(llm: LLM) -> dict[int, float]:
    """Only words: these are read as the same tokens again."""
    word = llm.tokenize(" fox", add_special=False)[-1]
    return {word: 1000.0}


def test_budgets_that_make_no_sense(llm: LLM) -> None:
    with pytest.raises(UsageError, match="reasoning_budget must be -1 or more, not -3"):
        llm.chat(HELLO, reasoning_budget=-3)


def test_a_template_for_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file's own one for conversations with tools is used for those, and only for those."""
    from support import tiny_model

    class Writer(tiny_model.gguf.GGUFWriter):
        def add_chat_template(self, template: Any) -> None:
            tools = "{{ tools | tojson }}, {{ messages[0].content }}"
            super().add_chat_template(
                [
                    {"name": "default", "template": "{{ messages[0].content }}"},
                    {"name": "tool_use", "template": tools},
                ]
            )

    monkeypatch.setattr(tiny_model.gguf, "GGUFWriter", Writer)
    llm = LLM(tiny_model.write_tiny_model(tmp_path / "tools.gguf"), n_ctx=64)
    assert llm.chat_prompt(HELLO).text == HELLO[0]["content"]
    tools = [{"type": "function", "function": {"name": "weather"}}]
    with_tools = llm.chat_prompt(HELLO, tools=tools)
    assert with_tools.text == f"{json.dumps(tools)}, {HELLO[0]['content']}"
    assert with_tools.warnings == ()


def test_an_answer_in_channels_is_one_text(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a conversation; a text that is continued is as the model writes it."""
    options: dict[str, Any] = {"max_tokens": 6, **GREEDY}
    n_prompt = len(llm.chat_prompt(HELLO).ids)
    plain = llm.chat(HELLO, **options).completion
    third = new_ids(llm, n_prompt)[2]
    monkeypatch.setattr(llm_module, "channel_markers", lambda _: {third: "<|end|>"})
    assert "\n\n" not in plain.text
    assert "\n\n" in llm.chat(HELLO, **options).completion.text
    text = llm.chat_prompt(HELLO).text
    assert "\n\n" not in llm.complete(text, parse_special=True, **options).text


def test_tags_and_calls_are_part_of_the_text_where_they_are_control_tokens() -> None:
    control = ("<|endoftext|>", "[THINK]", "[/THINK]", "[TOOL_CALLS]", "<|channel>", "<|im_end|>")
    model = TextModel()
    model.tokenizer = tokenizer_from_metadata(bpe_metadata("tekken", control=control))
    kept = {model.tokenizer.id_to_token(token) for token in model._kept_ids}
    assert kept == {"[THINK]", "[/THINK]", "[TOOL_CALLS]", "<|channel>"}
    model = TextModel()
    model.tokenizer = tokenizer_from_metadata(spm_metadata(spm_model(byte_fallback=False)))
    assert model._kept_ids == frozenset()  # what no token stands for is no tag


def test_a_budget_closes_the_channel_of_the_reasoning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All the way: the template's markers, the tokens that are put there, and the text of them."""
    monkeypatch.setattr(tiny_model_file, "CONTROL", GPT_OSS.control)
    monkeypatch.setattr(tiny_model_file, "TEMPLATE", GPT_OSS.source)
    llm = LLM(tiny_model_file.write_tiny_model(tmp_path / "m.gguf"))
    options: dict[str, Any] = {"max_tokens": 60, "reasoning_budget": 2, **GREEDY}
    prefill = "<think>\nThe fox"
    completion = llm.chat(HELLO, prefill=prefill, **options).completion
    parts = split_reasoning(completion.text)
    assert completion.text.startswith(prefill)
    assert "<|" not in completion.text
    assert (parts.open, parts.reasoning[:7], parts.answer != "") == (False, "The fox", True)
    ids = new_ids(llm, len(llm.chat_prompt(HELLO, prefill=prefill).ids))
    assert llm.tokenizer.decode(ids).startswith(CHANNELS.close)
    answer = {"role": "assistant", "content": completion.text}
    again = llm.chat_prompt([*HELLO, answer, *HELLO]).text
    assert "analysis<|message|>" not in again
    assert f"<|channel|>final<|message|>{parts.answer}<|end|>" in again
