"""OpenAI's Responses API of a real server, by OpenAI's own client."""

from __future__ import annotations

from typing import Any

import openai
import pytest

ASK: dict[str, Any] = {
    "model": "tales",
    "input": "Tell me of a dog.",
    "max_output_tokens": 12,
    "temperature": 0,
}


def test_a_response(client: openai.OpenAI):
    response = client.responses.create(**{**ASK, "max_output_tokens": 3})
    assert response.output_text
    assert response.status == response.output[-1].status == "incomplete"
    assert response.usage.output_tokens == 3


def test_a_stream_is_the_same_response(client: openai.OpenAI):
    whole = client.responses.create(**ASK)
    with client.responses.stream(**ASK) as stream:
        events = list(stream)
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text
    final = events[-1].response
    assert final.output_text == whole.output_text
    raw = list(client.responses.create(**ASK, stream=True))
    assert [event.sequence_number for event in raw] == list(range(len(raw)))


def test_nothing_is_stored_and_that_is_said(client: openai.OpenAI):
    with pytest.raises(openai.BadRequestError, match="stores no responses"):
        client.responses.create(**ASK, previous_response_id="resp_1")
    with pytest.raises(openai.BadRequestError, match="stores no responses"):
        client.responses.create(**ASK, store=True)


def test_a_conversation_with_items_of_all_kinds(client: openai.OpenAI):
    items = [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": [{"type": "input_text", "text": "Hello"}]},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Hello!", "annotations": []}],
        },
        {"role": "user", "content": "Who are you?"},
    ]
    response = client.responses.create(**{**ASK, "input": items}, instructions="Be brief.")
    assert response.usage.input_tokens > 10


def test_calls_and_their_results_become_messages():
    from localkv.server.dialects.openai_responses import ResponsesBody, chat_body

    call = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"at": 1}'}
    items = [
        {"role": "user", "content": "Weather?"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]},
        call,
        {**call, "call_id": "c2"},
        {"type": "function_call_output", "call_id": "c1", "output": "rain"},
    ]
    _, own, result = chat_body(ResponsesBody(input=items)).messages
    assert own["reasoning_content"] == "Hm."
    assert [one["id"] for one in own["tool_calls"]] == ["c1", "c2"]
    assert result == {"role": "tool", "tool_call_id": "c1", "content": "rain"}


def test_input_tokens_are_counted(client: openai.OpenAI):
    count = client.responses.input_tokens.count(model="tales", input=ASK["input"])
    assert count.input_tokens == client.responses.create(**ASK).usage.input_tokens
