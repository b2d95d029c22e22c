"""The chat API of a real server with the model that ships, by OpenAI's own client."""

from __future__ import annotations

import openai
import pytest


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
    with pytest.raises(openai.BadRequestError, match=r"\$\.top_p"):
        _asked(client, extra_body={"top_p": "much"})


def test_a_prompt_that_does_not_fit_is_refused_with_both_numbers(client: openai.OpenAI):
    with pytest.raises(openai.BadRequestError) as error:
        _asked(client, messages=[{"role": "user", "content": "dog " * 3000}])
    assert error.value.body["type"] == "exceed_context_size_error"
    assert error.value.body["n_prompt_tokens"] > error.value.body["n_ctx"] == 2048
