"""llama-server's own `/completion`, and its `/slots`."""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from typing import Any

import pytest

from localkv.engine_process.text_server import placed
from support.server import RunningServer

PROMPT = "Once upon a time"
REQUEST = {"prompt": PROMPT, "n_predict": 8, "temperature": 0}


def _asked(server: RunningServer, **fields: Any) -> Any:
    status, answer = server.post("/completion", {**REQUEST, **fields})
    assert status == 200, answer
    return answer


def _streamed(server: RunningServer, **fields: Any) -> list[dict[str, Any]]:
    text = server.post("/completion", {**REQUEST, "stream": True, **fields})[1]
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]


def test_a_text_and_all_that_is_said_of_it(server: RunningServer):
    answer = _asked(server, return_tokens=True, seed=7)
    assert (answer["stop"], answer["stop_type"], answer["stopping_word"]) == (True, "limit", "")
    assert answer["tokens_predicted"] == len(answer["tokens"]) == 8
    assert (
        answer["tokens_evaluated"] == answer["timings"]["prompt_n"] + answer["timings"]["cache_n"]
    )
    assert server.post("/detokenize", {"tokens": answer["tokens"]})[1]["content"].strip() == (
        answer["content"].strip()
    )
    settings = answer["generation_settings"]
    assert (settings["seed"], settings["n_predict"], settings["logit_bias"]) == (7, 8, [])
    assert answer["prompt"].endswith(PROMPT)
    assert (answer["truncated"], answer["has_new_line"]) == (False, False)


def test_a_stream_is_the_same_text_and_tokens(server: RunningServer):
    whole = _asked(server, return_tokens=True)
    chunks = _streamed(server, n_probs=2, timings_per_token=True, return_progress=True)
    pieces = [chunk for chunk in chunks if "completion_probabilities" in chunk]
    assert "".join(chunk["content"] for chunk in chunks) == whole["content"]
    assert [token for chunk in chunks for token in chunk["tokens"]] == whole["tokens"]
    assert [chunk["stop"] for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    progress = [chunk["prompt_progress"] for chunk in chunks if "prompt_progress" in chunk]
    assert progress[0]["processed"] == progress[0]["cache"] > 0
    assert progress[-1]["processed"] == progress[-1]["total"] == whole["tokens_evaluated"]
    assert chunks[0]["timings"]["prompt_ms"] == 0.0
    assert pieces[-1]["timings"]["predicted_n"] == 8


def test_a_stop_word_is_named_and_its_tokens_told(server: RunningServer):
    whole = _asked(server, return_tokens=True)
    word = whole["content"].split()[3]
    answer = _asked(server, stop=[word], return_tokens=True)
    assert (answer["stop_type"], answer["stopping_word"]) == ("word", word)
    assert answer["content"] == whole["content"][: whole["content"].index(word)]
    assert len(answer["tokens"]) == answer["tokens_predicted"]
    assert answer["tokens"] == whole["tokens"][: len(answer["tokens"])]


def test_prompts_of_every_kind(server: RunningServer):
    ids = server.post("/tokenize", {"content": PROMPT, "add_special": True})[1]["tokens"]
    text = _asked(server)["content"]
    many = _asked(server, prompt=[ids, PROMPT, {"prompt_string": PROMPT}, [*ids[:1], PROMPT]])
    assert [one["content"] for one in many] == [text] * 4
    assert [one["index"] for one in many] == [0, 1, 2, 3]
    assert len(_asked(server, n_cmpl=2)) == 2


def test_nothing_is_generated_where_only_the_prompt_is_wanted(server: RunningServer):
    prompt = "A prompt that nobody else has: zebra"
    answer = _asked(server, prompt=prompt, n_predict=0, return_tokens=True)
    assert (answer["content"], answer["tokens"], answer["tokens_predicted"]) == ("", [], 0)
    assert _asked(server, prompt=prompt)["timings"]["cache_n"] > 0


def test_probabilities_and_chosen_fields(server: RunningServer):
    answer = _asked(
        server, n_probs=3, response_fields=["generation_settings/n_predict", "x/y", "content"]
    )
    assert sorted(answer) == ["content", "generation_settings/n_predict"]
    tokens = _asked(server, n_probs=3)["completion_probabilities"]
    assert [len(token["top_logprobs"]) for token in tokens] == [3] * 8
    assert all(token["logprob"] == token["top_logprobs"][0]["logprob"] for token in tokens)


def test_probabilities_after_samplers(server: RunningServer):
    after = {"n_probs": 40, "post_sampling_probs": True}
    answer = _asked(server, temperature=1.0, seed=3, **after)
    assert answer["content"] == _asked(server, temperature=1.0, seed=3)["content"]
    for token in answer["completion_probabilities"]:
        assert sum(top["prob"] for top in token["top_probs"]) == pytest.approx(1)
        assert token["prob"] in [top["prob"] for top in token["top_probs"]]
    greedy = _asked(server, **after)["completion_probabilities"]
    assert {len(token["top_probs"]) for token in greedy} == {1}


def test_ignored_ends_are_named_as_biases(server: RunningServer):
    bias = _asked(server, ignore_eos=True)["generation_settings"]["logit_bias"]
    assert bias
    assert all(one["bias"] is None for one in bias)


@pytest.mark.parametrize(
    ("fields", "expected", "message"),
    [
        ({"lora": [{"id": 0, "scale": 1}]}, 400, "there is no adapter 0"),
        ({"audit": True}, 501, "audit"),
    ],
)
def test_what_is_not_there_is_refused(
    server: RunningServer, fields: dict, expected: int, message: str
):
    status, answer = server.post("/completion", {**REQUEST, **fields})
    assert status == expected
    assert message in answer["error"]["message"]


def test_a_slot_is_the_place_of_what_runs(server: RunningServer):
    n_slots = server.get("/props")[1]["total_slots"]
    assert [slot["is_processing"] for slot in server.get("/slots")[1]] == [False] * n_slots
    long = {**REQUEST, "n_predict": -1, "ignore_eos": True, "stream": True}
    request = urllib.request.Request(server.url + "/completion", json.dumps(long).encode())
    with urllib.request.urlopen(request) as answer:
        answer.readline()
        busy = [slot for slot in server.get("/slots")[1] if slot["is_processing"]]
    assert len(busy) == 1
    assert busy[0]["next_token"][0]["n_decoded"] > 0
    assert busy[0]["params"]["temperature"] == 0
    assert "logit_bias" not in busy[0]["params"]
    end = time.monotonic() + 5
    while any(slot["is_processing"] for slot in server.get("/slots")[1]):
        assert time.monotonic() < end
        threading.Event().wait(0.02)


def test_places_are_kept_as_long_as_their_requests_run():
    assert placed((0, 0, 0), [5]) == (5, 0, 0)
    assert placed((5, 0, 0), [6, 5, 7]) == (5, 6, 7)
    assert placed((5, 6, 7), [8, 7]) == (8, 0, 7)
