"""The chat API of a real server with the model that ships, by OpenAI's own client."""

from __future__ import annotations

import asyncio

import openai
import pytest

from support.server import RunningServer


def _asked(client: openai.OpenAI, **options: object) -> openai.types.chat.ChatCompletion:
    return client.chat.completions.create(
        **{
            "model": "tales",
            "messages": [{"role": "user", "content": "Tell me of a dog."}],
            "max_tokens": 12,
            "temperature": 0,
            "extra_body": {"ignore_eos": True},
            **options,
        }
    )


def test_an_answer(client: openai.OpenAI):
    answer = _asked(client)
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 12


def test_what_has_no_effect_is_named(client: openai.OpenAI):
    """In a header; the template of this model shows no tools."""
    tools = [{"type": "function", "function": {"name": "look"}}]
    asked = {"messages": [{"role": "user", "content": "Hi"}], "model": "tales", "max_tokens": 1}
    create = client.chat.completions.with_raw_response.create
    for options, found in (
        ({}, None),
        ({"tools": tools}, "does not read tools"),
        ({"extra_body": {"chat_template_kwargs": {"\n\u263a": 1}}, "stream": True}, "\\u263a"),
    ):
        warning = create(**asked, **options).headers.get("x-localkv-warning")
        assert warning == found or found in warning
        assert warning is None or warning.isprintable()


def test_a_stream_is_the_same_text(client: openai.OpenAI):
    whole = _asked(client).choices[0].message.content
    chunks = list(_asked(client, stream=True, stream_options={"include_usage": True}))
    pieces = [c.choices[0].delta.content or "" for c in chunks if c.choices]
    assert "".join(pieces) == whole
    assert chunks[-1].usage.completion_tokens == 12


def test_choices_have_seeds_of_their_own(client: openai.OpenAI):
    answer = _asked(client, n=3, temperature=1.0, seed=5)
    texts = [choice.message.content for choice in answer.choices]
    assert len(set(texts)) > 1
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert _asked(client, temperature=1.0, seed=6).choices[0].message.content == texts[1]


def test_a_wrong_type_is_named_by_its_path(client: openai.OpenAI):
    with pytest.raises(openai.BadRequestError, match="top_p must be a number from 0 to 1, not"):
        _asked(client, extra_body={"top_p": "much"})


def test_a_prompt_that_does_not_fit_is_refused_with_both_numbers(client: openai.OpenAI):
    with pytest.raises(openai.BadRequestError) as error:
        _asked(client, messages=[{"role": "user", "content": "dog " * 3000}])
    assert error.value.body["type"] == "exceed_context_size_error"
    assert error.value.body["n_prompt_tokens"] > error.value.body["n_ctx"] == 2048


def test_logprobs_whole_and_in_chunks(client: openai.OpenAI):
    options = {"logprobs": True, "top_logprobs": 3, "max_tokens": 6}
    (choice,) = _asked(client, **options).choices
    found = choice.logprobs.content
    assert len(found) == 6
    assert bytes(b for one in found for b in one.bytes).decode().strip() == choice.message.content
    assert all(len(one.top_logprobs) == 3 for one in found)
    assert all(one.token in {top.token for top in one.top_logprobs} for one in found)
    chunks = [c.choices[0] for c in _asked(client, stream=True, **options) if c.choices]
    pieces = [one for c in chunks if c.logprobs for one in c.logprobs.content]
    assert [one.token for one in pieces] == [one.token for one in found]


def test_a_biased_token_is_never_or_always_drawn(client: openai.OpenAI):
    options = {"logprobs": True, "top_logprobs": 0, "max_tokens": 4}
    first = _asked(client, **options).choices[0].logprobs.content[0].id
    other = _asked(client, **options, logit_bias={str(first): -100})
    assert other.choices[0].logprobs.content[0].id != first
    always = _asked(client, **options, logit_bias={str(first): 100})
    assert {one.id for one in always.choices[0].logprobs.content} == {first}


def test_a_text_ends_before_a_stop_string(client: openai.OpenAI):
    whole = _asked(client).choices[0].message.content
    stop = whole.split()[3]
    for stops in (stop, ["never in it", stop]):
        answer = _asked(client, stop=stops).choices[0]
        assert answer.finish_reason == "stop"
        assert answer.message.content == whole[: whole.index(stop)]
    chunks = list(_asked(client, stop=[stop], stream=True))
    text = "".join(c.choices[0].delta.content or "" for c in chunks)
    assert text == whole[: whole.index(stop)]


def test_what_was_known_of_a_prompt_is_told_and_can_be_left_alone(client: openai.OpenAI):
    def asked(**fields: object) -> openai.types.CompletionUsage:
        body = {"ignore_eos": True, **fields}
        answer = _asked(client, extra_body=body, messages=[{"role": "user", "content": "Rain."}])
        timings = answer.timings
        assert timings["predicted_n"] == answer.usage.completion_tokens
        assert timings["cache_n"] == answer.usage.prompt_tokens_details.cached_tokens
        assert timings["cache_n"] + timings["prompt_n"] == answer.usage.prompt_tokens
        texts.add(answer.choices[0].message.content)
        return answer.usage.prompt_tokens_details.cached_tokens

    texts = set[str]()
    asked()
    assert asked() > 0
    assert asked(cache_prompt=False) == 0
    assert asked() > 0
    assert len(texts) == 1


def test_the_assistants_last_message_goes_on(client: openai.OpenAI, server: RunningServer):
    messages = [
        {"role": "user", "content": "Tell me of a dog."},
        {"role": "assistant", "content": "The dog"},
    ]

    def prompt(**fields: object) -> str:
        status, answer = server.post("/apply-template", {"messages": messages, **fields})
        return answer["prompt"] if status == 200 else f"{status}: {answer}"

    assert prompt().endswith("The dog")
    assert prompt() == prompt(continue_final_message=True)
    assert not prompt(continue_final_message=False).endswith("The dog")
    assert not prompt(add_generation_prompt=True).endswith("The dog")
    with pytest.raises(openai.BadRequestError, match="last two messages"):
        _asked(client, messages=[*messages, messages[-1]])
    both = prompt(continue_final_message=True, add_generation_prompt=True)
    assert both.startswith("400")
    assert "add_generation_prompt" in both


async def _streamed(url: str) -> str:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
        stream = await client.chat.completions.create(
            model="tales",
            messages=[{"role": "user", "content": "Tell me of a dog."}],
            max_tokens=12,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        return "".join([c.choices[0].delta.content or "" async for c in stream])


def test_the_asynchronous_client(client: openai.OpenAI, server: RunningServer):
    assert asyncio.run(_streamed(server.url)) == _asked(client).choices[0].message.content
