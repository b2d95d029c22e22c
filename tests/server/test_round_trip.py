"""What this server answers is taken back as it was, in each dialect's history."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from localkv.engine.stream import Timings, Usage
from localkv.engine_process.texts import Ended
from localkv.loader.chat_messages import in_turns, messages_for
from localkv.loader.chat_template import ChatTemplate
from localkv.loader.named_templates import NAMED_TEMPLATES
from localkv.server.answer import AnswerReader, Answers, Delta, Parts, Reasoning
from localkv.server.chat_request import ChatBody
from localkv.server.dialects import anthropic as anthropic_api
from localkv.server.dialects import ollama as ollama_api
from localkv.server.dialects import openai_responses as openai
from localkv.server.dialects.openai import ChatChoice
from localkv.server.json_body import decoded
from localkv.tool_calls.source import CallArguments, CallBegun, Content
from support.family_templates import FAMILIES

TEMPLATES = [
    ChatTemplate(source, bos_token="", eos_token="")
    for source in (*NAMED_TEMPLATES.values(), *(family.source for family in FAMILIES.values()))
]
END = Ended(0, "stop", Usage(1, 1, 2, 0), Timings(0.1, 1, 0.1, 1, 0.1), 0)

said = st.text("ab <{\n", min_size=1, max_size=6)
arguments = st.dictionaries(st.sampled_from(["a", "b"]), st.one_of(said, st.integers()))


@st.composite
def answers(draw: st.DrawFn) -> list[Delta]:
    """Reasoning, text and calls, each or none; the last call may have been cut."""
    deltas = list[Delta]()
    if draw(st.booleans()):
        deltas.append(Reasoning("r" + draw(said)))
    if draw(st.booleans()):
        deltas.append(Content("c" + draw(said)))
    given = draw(st.lists(arguments, max_size=2))
    for index, one in enumerate(given):
        text = json.dumps(one)
        if index + 1 == len(given):
            text = text[: draw(st.integers(1, len(text)))]
        deltas += [CallBegun(index, f"call_{index}", "look"), CallArguments(index, text)]
    return deltas


def sent_back(body: dict[str, Any], kind: type[msgspec.Struct]) -> Any:
    return decoded(json.dumps(body).encode(), kind)


def chat(deltas: list[Delta]) -> list[dict[str, Any]]:
    choice = ChatChoice(AnswerReader())
    for delta in deltas:
        choice.reader.content += delta.text if isinstance(delta, Content) else ""
        choice.reader.reasoning += delta.text if isinstance(delta, Reasoning) else ""
    choice.take(deltas)
    nulls = {"refusal": None, "annotations": [], "audio": None, "function_call": None, "name": None}
    message = {"tool_calls": None, **choice.message, **nulls}  # as OpenAI's client dumps it
    return sent_back({"messages": [message]}, ChatBody).messages


def responses(deltas: list[Delta]) -> list[dict[str, Any]]:
    answers = Answers(None, [AnswerReader()])  # type: ignore[arg-type]
    answer = openai.ResponseAnswer(openai.ResponsesBody(input=""), answers, "tales")
    answer.parts.push(deltas)
    body = sent_back({"input": answer._final(END)["output"]}, openai.ResponsesBody)
    return openai.chat_body(body).messages


def messages(deltas: list[Delta]) -> list[dict[str, Any]]:
    parts = Parts()
    parts.push(deltas)
    content = [anthropic_api._block(part, part.text) for part in parts.all]
    body = {"max_tokens": 1, "messages": [{"role": "assistant", "content": content}]}
    read = sent_back(body, anthropic_api.MessagesBody)
    return anthropic_api.chat_body(read).messages


def ollama(deltas: list[Delta]) -> list[dict[str, Any]]:
    asked = ollama_api.ChatRequest(model="tales")
    answer = ollama_api.OllamaAnswer(Answers(None, [AnswerReader()]), asked, 0.0)  # type: ignore[arg-type]
    text, thinking = answer._take(deltas)
    calls, unread = answer._called()
    message = answer._said(text + unread, thinking, calls, ())["message"]
    read = sent_back({"model": "tales", "messages": [message]}, ollama_api.ChatRequest)
    return ollama_api.chat_body(read, ollama_api.Options()).messages


@pytest.mark.parametrize("dialect", [chat, responses, messages, ollama])
@given(deltas=answers())
def test_an_answer_is_taken_back(
    dialect: Callable[[list[Delta]], list[dict[str, Any]]], deltas: list[Delta]
) -> None:
    user = {"role": "user", "content": "word"}
    back = dialect(deltas)
    reasoned = "".join(delta.text for delta in deltas if isinstance(delta, Reasoning))
    assert "".join(one.get("reasoning_content") or "" for one in back) == reasoned
    content = "".join(delta.text for delta in deltas if isinstance(delta, Content))
    assert "".join(one.get("content") or "" for one in back).startswith(content)
    n_calls = sum(isinstance(delta, CallBegun) for delta in deltas)
    shown = sum(len(one.get("tool_calls") or ()) for one in back)
    assert shown == n_calls or (dialect is ollama and shown >= n_calls - 1)
    results = [
        {"role": "tool", "tool_call_id": call.get("id"), "content": "21"}
        for one in back
        for call in one.get("tool_calls") or ()
    ]
    for template in TEMPLATES[:: 1 + len(TEMPLATES) // 4]:
        turns, _ = in_turns(template, messages_for(template, [user, *back, *results, user]))
        assert "None" not in template.render(turns)
