"""What Prometheus and the log are told of requests."""

from __future__ import annotations

import json
import os

from prometheus_client.parser import text_string_to_metric_families

from localkv.engine.stream import Timings, Usage
from localkv.engine_process.texts import Ended, Piece, Reading, Status
from localkv.server.metrics import Metrics, ObservedTexts, rows_label
from localkv.server.request_record import AccessLog, RequestRecord, request_id
from support.front import front_of
from support.server import RunningServer

CHAT = {
    "messages": [{"role": "user", "content": "Tell me of a secret cat."}],
    "max_tokens": 8,
    "ignore_eos": True,
}


def _samples(text: str) -> dict[str, float]:
    return {
        sample.name + "".join(sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_a_request_is_counted(server: RunningServer):
    before = _samples(server.get("/metrics")[1])
    status, answer = server.post("/v1/chat/completions", CHAT)
    assert status == 200
    after = _samples(server.get("/metrics")[1])
    usage = answer["usage"]

    def grown(name: str) -> float:
        return after[name] - before.get(name, 0)

    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert grown("localkv_generated_tokens_total") == usage["completion_tokens"] == 8
    assert grown("localkv_prefix_asked_tokens_total") == usage["prompt_tokens"]
    assert grown("vllm:prefix_cache_hits_total") == cached
    assert grown("llamacpp:prompt_tokens_total") == usage["prompt_tokens"] - cached
    assert grown("vllm:time_to_first_token_seconds_count") == 1
    assert grown("localkv_texts_ended_totallength") == 1
    assert after["llamacpp:requests_processing"] == 0
    assert after["localkv_cache_pagesrunning"] == 0


def test_texts_that_become_vectors_are_counted(server: RunningServer):
    before = _samples(server.get("/metrics")[1])
    answer = server.post("/v1/embeddings", {"input": ["The fox ran home.", "lost"]})[1]
    after = _samples(server.get("/metrics")[1])
    n_tokens = answer["usage"]["prompt_tokens"]
    for name in ("localkv_prefix_asked_tokens", "localkv_prompt_tokens", "llamacpp:prompt_tokens"):
        assert after[f"{name}_total"] - before[f"{name}_total"] == n_tokens > 5
    assert after["llamacpp:prompt_seconds_total"] > before["llamacpp:prompt_seconds_total"]
    assert after["llamacpp:n_decode_total"] > before["llamacpp:n_decode_total"]
    assert after["localkv_prefix_hit_tokens_total"] == before["localkv_prefix_hit_tokens_total"]


def test_texts_that_break_off_are_counted():
    metrics = Metrics(front_of().supervisor)
    record = RequestRecord("a", "POST", "/")
    texts = ObservedTexts(metrics, record, {1: 10, 2: 10, 3: 10})
    texts.take(Reading(1, 10, 4, 4))
    texts.take(Piece(1, "x", 3))
    texts.take(Reading(2, 10, 0, 5))
    texts.take(Ended(2, "stop", Usage(10, 5, 15, 2, 0, 4, 3, 2), Timings(1, 1, 1, 1), 0))
    texts.broke_off({1, 3}, "disconnected")
    found = _samples(metrics.text().decode())
    assert found["localkv_generated_tokens_total"] == 8
    assert found["localkv_prefix_asked_tokens_total"] == 20
    assert found["localkv_prefix_hit_tokens_total"] == 6
    assert found["localkv_texts_ended_totaldisconnected"] == 2
    for whose in ("vllm", "llamacpp"):
        names = ("draft_tokens", "accepted_tokens", "drafts")
        values = [found[f"{whose}:spec_decode_num_{name}_total"] for name in names]
        assert values == [4, 3, 2]
    assert (record.n_prompt, record.n_cached, record.n_generated) == (20, 6, 8)
    assert record.ended == "disconnected"


def test_steps_are_sorted_by_rows():
    rows = [rows_label(n) for n in (0, 1, 2, 3, 4, 5, 16, 17)]
    assert " ".join(rows) == "1 1 2 4 4 8 16 32"
    metrics = Metrics(front_of().supervisor)
    metrics.take_status(Status(rows=(3, 0), step_ms=7))
    metrics.take_status(Status(rows=(3, 9), step_ms=70))
    found = _samples(metrics.text().decode())
    assert found["localkv_step_milliseconds_sum4"] == 7
    assert found["localkv_step_milliseconds_sumprompt"] == 70


def test_ids_of_requests_are_words():
    assert request_id("trace-1.A_b") == "trace-1.A_b"
    for given in ("", "a b", "a\nb", "é", "x" * 65):
        assert len(request_id(given)) == 16


def test_a_line_of_the_log(tmp_path):
    said: list[str] = []
    log = AccessLog(str(tmp_path / "log"), said.append)
    record = RequestRecord("a", "POST", "/v1\n/x", status=200, n_prompt=3, n_generated=2, key=1)
    log.write(record)
    os.rename(tmp_path / "log", tmp_path / "log.1")
    log.write(record)
    line = json.loads((tmp_path / "log").read_text())
    assert line.items() >= {"id": "a", "path": "/v1\n/x", "status": 200, "tokens": 2}.items()
    assert (tmp_path / "log.1").read_text().count("\n") == 1
    assert said == []
    full = AccessLog("/dev/full", said.append)
    full.write(record)
    full.write(record)
    full.close()
    log.close()
    assert len(said) == 1
    assert "No space left" in said[0]
