"""OpenAI's API for plain text, by its own client."""

from __future__ import annotations

import openai
import pytest

from support.server import RunningServer

PROMPT = "Once upon a time"


def _asked(client: openai.OpenAI, **options: object) -> openai.types.Completion:
    given = {"model": "tales", "prompt": PROMPT, "max_tokens": 8, "temperature": 0, **options}
    return client.completions.create(**given)


def test_a_text_whole_and_in_chunks(client: openai.OpenAI):
    answer = _asked(client)
    chunks = list(_asked(client, stream=True, stream_options={"include_usage": True}))
    assert answer.choices[0].finish_reason == "length"
    assert "".join(c.choices[0].text for c in chunks if c.choices) == answer.choices[0].text
    assert chunks[-1].timings["predicted_n"] == 8
    assert chunks[-1].usage.completion_tokens == answer.usage.completion_tokens == 8


def test_prompts_of_text_and_tokens(client: openai.OpenAI, server: RunningServer):
    ids = server.post("/tokenize", {"content": PROMPT, "add_special": True})[1]["tokens"]
    other = "The dog was"
    answer = _asked(client, prompt=[PROMPT, other], n=2)
    texts = [choice.text for choice in answer.choices]
    assert texts[0] == texts[1] == _asked(client, prompt=ids).choices[0].text
    assert texts[2] == texts[3] == _asked(client, prompt=other).choices[0].text
    assert [c.text for c in _asked(client, prompt=[ids, ids]).choices] == texts[:2]
    assert answer.usage.completion_tokens == 32
    assert answer.usage.prompt_tokens == len(ids) + _asked(client, prompt=other).usage.prompt_tokens


def test_echo(client: openai.OpenAI):
    text = _asked(client).choices[0].text
    assert _asked(client, echo=True).choices[0].text == PROMPT + text
    chunks = list(_asked(client, echo=True, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == PROMPT + text


def test_logprobs_in_the_shape_of_this_api(client: openai.OpenAI):
    answer = _asked(client, logprobs=3).choices[0]
    found = answer.logprobs
    assert "".join(found.tokens) == answer.text
    assert found.text_offset == [len("".join(found.tokens[:i])) for i in range(8)]
    best = [max(top.values()) for top in found.top_logprobs]
    assert found.token_logprobs == pytest.approx(best)
    chunks = [c.choices[0].logprobs for c in _asked(client, logprobs=3, stream=True)]
    assert [at for one in chunks if one for at in one.text_offset] == found.text_offset


@pytest.mark.parametrize(
    ("fields", "status", "message"),
    [
        ({"best_of": 3}, 501, "best_of"),
        ({"suffix": "end"}, 501, "filling in the middle"),
        ({"echo": True, "logprobs": 1}, 501, "logprobs of a prompt"),
        ({"prompt": []}, 400, "empty"),
        ({"prompt": [["a"], None]}, 400, "neither a text nor a token"),
        ({"prompt": [1, 2, 10**9]}, 400, "no token id"),
        ({"prompt": True}, 400, "prompt must be a text"),
        ({"n": 0}, 400, "n must be"),
        ({"prompt": ["a"] * 300}, 400, "prompt must be up to 256 prompts, not 300"),
        ({"prompt": {"prompt_string": "a", "multimodal_data": ["x"]}}, 501, "multimodal_data"),
    ],
)
def test_what_is_refused(server: RunningServer, fields: dict, status: int, message: str):
    got, answer = server.post("/v1/completions", {"prompt": "a", "max_tokens": 1, **fields})
    assert got == status
    assert message.replace("\\", "") in answer["error"]["message"]
