"""A model that wants to end a text at once, while a grammar must still begin."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from localkv import LLM
from localkv.engine.reasoning import FINAL, ReasoningBudget
from localkv.loader.answer_tags import REASONING_TAGS, THINK_TAGS
from localkv.loader.chat_prompt import ChatPrompt
from localkv.loader.tokenizer import tokenizer_from_metadata
from support import family_templates
from support import tiny_model as tiny_model_file
from support.tiny_vocabulary import bpe_metadata

ASKED = [{"role": "user", "content": "The fox said"}]
SCHEMA = {"type": "object", "properties": {"is": {"type": "boolean"}}, "required": ["is"]}
LOOK = {"name": "look", "description": "Look.", "parameters": SCHEMA}
TOOLS = [{"type": "function", "function": LOOK}]
TEMPLATES = {
    "opened by the prompt": (
        family_templates.QWEN3.source.replace(
            "assistant\\n' }}{% endif %}", "assistant\\n<think>\\n' }}{% endif %}"
        ),
        (*family_templates.QWEN3.control, *THINK_TAGS),
    ),
    "opened by the model": (
        family_templates.QWEN3.source,
        (*family_templates.QWEN3.control, *THINK_TAGS),
    ),
    "channels": (family_templates.GPT_OSS.source, family_templates.GPT_OSS.control),
}


@pytest.fixture(scope="module", params=TEMPLATES)
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    source, control = TEMPLATES[request.param]
    path = tmp_path_factory.mktemp("model") / "m.gguf"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny_model_file, "CONTROL", control)
        patch.setattr(tiny_model_file, "TEMPLATE", source)
        tiny_model_file.write_tiny_model(path)
    with LLM(path, n_ctx=1024, progress=False) as llm:
        vocabulary = llm.tokenizer._vocabulary
        llm.tokenizer._vocabulary = replace(vocabulary, add_space_prefix=False)
        yield llm


def eager(llm: LLM) -> dict[int, float]:
    """Biases with which a model ends its text where it may, and first opens its reasoning."""
    bias = dict.fromkeys(llm.tokenizer.eog_ids, 100.0)
    if (token := llm.tokenizer.token_to_id(THINK_TAGS.open)) is not None:
        bias[token] = 60.0
    return bias


CASES: list[dict[str, Any]] = [
    {"schema": SCHEMA},
    {"grammar": 'root ::= "{\\"is\\": " ("true" | "false") "}"'},
    {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False},
    {"tools": TOOLS, "tool_choice": "look", "parallel_tool_calls": False},
]


@pytest.mark.parametrize("others", [{}, {"reasoning_budget": 5}, {"spec": "ngram"}])
@pytest.mark.parametrize("options", CASES, ids=["schema", "grammar", "required", "named"])
@pytest.mark.filterwarnings("ignore:the chat template does not")
def test_what_must_follow_follows(llm: LLM, options: Any, others: Any) -> None:
    done = llm.chat(
        ASKED, max_tokens=200, seed=3, logit_bias=eager(llm), **options, **others
    ).completion
    assert done.finish_reason == "stop", done.text
    if "tools" in options:
        ((call),) = done.tool_calls
        assert set(call.values) == {"is"}
    else:
        answer = done.text.rpartition(THINK_TAGS.close)[2]
        assert set(json.loads(answer)) == {"is"}, done.text


@pytest.mark.filterwarnings("ignore:the chat template does not")
def test_reasoning_is_counted_apart_from_what_follows(llm: LLM) -> None:
    options = CASES[2]
    done = llm.chat(ASKED, reasoning_budget=5, max_tokens=200, seed=4, **options).completion
    n = done.usage.reasoning_tokens
    begins = llm.chat(ASKED, reasoning_budget=0, max_tokens=200, seed=4, **options).completion
    assert n in (0, 5)
    assert begins.usage.reasoning_tokens == 0
    assert done.usage.completion_tokens > n + 5


@pytest.mark.filterwarnings("ignore:the chat template does not")
def test_what_may_follow_need_not(llm: LLM) -> None:
    done = llm.chat(ASKED, tools=TOOLS, max_tokens=50, logit_bias=eager(llm)).completion
    assert (done.finish_reason, done.tool_calls) == ("stop", ())
    assert done.usage.completion_tokens < 5
    done = llm.chat(ASKED, schema=SCHEMA, max_tokens=3, seed=3).completion
    assert done.finish_reason == "length"


TOKENIZER = tokenizer_from_metadata(
    bpe_metadata(
        "llama-bpe", control=["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|constrain|>"]
    )
)
MESSAGES = [
    "",
    "<|channel|>",
    "<|channel|>an",
    "<|channel|>analysis<|message|>",
    "<|channel|>analysis<|message|>the" + " the" * 3000,
    "<|channel|>analysis<|message|>é the<|end|>",
    "<|channel|>analysis<|message|>the<|end|><|start|>",
    "<|channel|>analysis<|message|>the<|end|><|start|>assis",
    "<|channel|>analysis<|message|>the<|end|><|start|>assistant",
    "<|channel|>commentary to=functions.look <|constrain|>json<|message|>{",
    "<|channel|>commentary<|message|>the<|end|><|start|>assistant<|channel|>fin",
    "<|channel|>final",
    "<|channel|>final <|constrain|>json",
]


@pytest.mark.parametrize("written", MESSAGES)
def test_a_final_message_begins_wherever_channels_are(written: str) -> None:
    prompt = ChatPrompt(TOKENIZER.encode("<|start|>assistant", parse_special=True), "")
    budget = ReasoningBudget(None, prompt, TOKENIZER, must_follow=True)
    for token in TOKENIZER.encode(written, add_special=False, parse_special=True):
        budget.accept(token)
    assert budget.leads_on
    budget.lead_on()
    forced = []
    while (token := budget.forced()) is not None:
        assert not budget.leads_on
        budget.accept(token)
        forced.append(token)
    whole = "assistant" + written + TOKENIZER.decode(forced)
    assert FINAL.search(whole.encode()) is not None, whole[-80:]
    assert whole.count("<|start|>assistant") == whole.count("<|start|>")
    assert not budget.leads_on


@pytest.mark.parametrize("tags", REASONING_TAGS[:-1])
def test_each_pair_of_tags_is_closed(tags: Any) -> None:
    tokenizer = tokenizer_from_metadata(bpe_metadata("llama-bpe", control=[*tags]))
    for prompt, begin in (
        (ChatPrompt([1], "", reasoning=tags), ""),
        (ChatPrompt([1], ""), tags.open),
    ):
        budget = ReasoningBudget(None, prompt, tokenizer, must_follow=True)
        for token in tokenizer.encode(f"{begin}the the", add_special=False, parse_special=True):
            budget.accept(token)
        assert budget.leads_on
        budget.lead_on()
        assert budget.forced() == tokenizer.token_to_id(tags.close)
        budget.accept(tokenizer.token_to_id(tags.close))
        assert not budget.leads_on
        assert budget.forced() is None
