"""Anthropic's API of a real server, by Anthropic's own client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from support.server import RunningServer

ASK: dict[str, Any] = {
    "model": "tales",
    "max_tokens": 12,
    "messages": [{"role": "user", "content": "Tell me of a dog."}],
    "extra_body": {"temperature": 0},
}


@pytest.fixture(scope="module")
def claude(server: RunningServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


def test_a_message(claude: anthropic.Anthropic):
    message = claude.messages.create(**ASK)
    assert message.content[0].text
    assert message.stop_reason in ("max_tokens", "end_turn")
    assert 0 < message.usage.output_tokens <= 12


def test_a_stream_is_the_same_message(claude: anthropic.Anthropic):
    whole = claude.messages.create(**ASK)
    with claude.messages.stream(**ASK) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text == final.content[0].text
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens


def test_a_stream_says_first_how_long_the_prompt_is(claude: anthropic.Anthropic):
    start = next(iter(claude.messages.create(**ASK, stream=True)))
    count = claude.messages.count_tokens(model="tales", messages=ASK["messages"])
    assert start.message.usage.input_tokens == count.input_tokens


def test_tokens_are_counted_as_the_prompt_has_them(claude: anthropic.Anthropic):
    system = [{"type": "text", "text": "Be kind."}]
    count = claude.messages.count_tokens(model="tales", messages=ASK["messages"], system=system)
    usage = claude.messages.create(**ASK, system=system).usage
    assert count.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_a_stop_sequence_is_named(claude: anthropic.Anthropic):
    text = claude.messages.create(**ASK).content[0].text
    word = text.split()[1]
    message = claude.messages.create(**ASK, stop_sequences=[word])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", word)
    assert message.content[0].text == text[: text.index(word)]


def test_an_answer_that_is_begun_goes_on(claude: anthropic.Anthropic):
    begun = [*ASK["messages"], {"role": "assistant", "content": "Once upon a"}]
    assert claude.messages.create(**{**ASK, "messages": begun}).content


def test_a_header_that_changes_with_each_request_is_left_out(claude: anthropic.Anthropic):
    def system(n: int) -> list[dict[str, str]]:
        texts = [f"x-anthropic-billing-header: cch={n};", "Answer in verse."]
        return [{"type": "text", "text": text} for text in texts]

    claude.messages.create(**ASK, system=system(1))
    again = claude.messages.create(**ASK, system=system(2)).usage
    assert again.cache_read_input_tokens > again.input_tokens


def test_a_prompt_that_does_not_fit_is_refused_in_anthropics_words(claude: anthropic.Anthropic):
    said = r"prompt is too long: \d+ tokens > 2048 maximum"  # Claude Code reads both numbers
    with pytest.raises(anthropic.BadRequestError, match=said):
        claude.messages.create(**{**ASK, "messages": [{"role": "user", "content": "dog " * 3000}]})


def test_an_image_is_refused_by_name(claude: anthropic.Anthropic):
    image = {"type": "image", "source": {"type": "url", "url": "https://example.org/a.png"}}
    with pytest.raises(anthropic.APIStatusError, match="image") as error:
        claude.messages.create(**{**ASK, "messages": [{"role": "user", "content": [image]}]})
    assert error.value.status_code == 501
    assert error.value.body["type"] == "error"


@pytest.mark.parametrize(
    "block",
    [
        {
            "type": "document",
            "source": {"type": "text", "media_type": "text/plain", "data": "an owl and a fox"},
        },
        {
            "type": "search_result",
            "source": "https://example.org",
            "title": "Tales",
            "content": [{"type": "text", "text": "an owl and a fox"}],
        },
        {
            "type": "tool_result",
            "tool_use_id": "a",
            "content": [{"type": "tool_reference", "tool_name": "an owl and a fox"}],
        },
    ],
    ids=lambda block: block["type"],
)
def test_blocks_that_hold_text_are_read(claude: anthropic.Anthropic, block: dict[str, Any]):
    def counted(blocks: list[Any]) -> int:
        call = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
        messages: list[Any] = [*ASK["messages"], {"role": "assistant", "content": [call]}]
        messages.append({"role": "user", "content": blocks})
        return claude.messages.count_tokens(model="tales", messages=messages).input_tokens

    empty = {"type": "tool_result", "tool_use_id": "a"}
    base = [] if block["type"] == "tool_result" else [empty]
    assert counted([*base, block]) >= counted([empty]) + 5


def test_a_result_of_a_tool_becomes_a_message_of_its_own(server: RunningServer):
    from localkv.server.dialects.anthropic import MessagesBody, chat_body
    from localkv.server.json_body import decoded

    body = decoded(
        b"""{"max_tokens": 1, "messages": [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm.", "signature": ""},
            {"type": "tool_use", "id": "a1", "name": "weather", "input": {"at": "Bern"}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a1", "content":
            [{"type": "text", "text": "rain"}]}, {"type": "text", "text": "And?"}]}]}""",
        MessagesBody,
    )
    _, call, result, question = chat_body(body).messages
    assert call["reasoning_content"] == "Hm."
    assert call["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"at": "Bern"}'}
    assert result == {"role": "tool", "tool_call_id": "a1", "content": "rain"}
    assert question["content"] == "And?"
