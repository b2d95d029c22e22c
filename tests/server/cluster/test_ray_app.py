"""Two engines on Ray Serve: where requests go, streams, and an engine that dies."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import pytest

from support.paths import MODELS

ray = pytest.importorskip("ray", reason="Ray is not installed (localkv[ray])")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore"),  # Ray's own
]

PORT = 18411
SECONDS = 60.0
ARGUMENTS = {
    "model": str(MODELS / "tales-4M-Q8_0.gguf"),
    "replicas": "2",
    "n_parallel": "4",
    "n_threads": "1",
    "name": "tales",
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    from ray import serve

    from localkv.server.cluster.ray_app import build

    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, configure_logging=False)
    serve.start(http_options={"port": PORT})
    serve.run(build(ARGUMENTS), name="tales")
    yield f"http://127.0.0.1:{PORT}"
    serve.shutdown()
    ray.shutdown()


def ask(url: str, messages: list[dict[str, str]], **fields: Any) -> tuple[str, bytes]:
    """The engine that answers, and the body of its answer."""
    body = {"messages": messages, "max_tokens": 4, "temperature": 0, **fields}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=SECONDS) as answer:
        return answer.headers["x-localkv-engine"], answer.read()


def conversation(number: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"{number} " + "dog and cat " * 60}]


def test_conversations_stay_with_an_engine_and_are_spread(cluster: str):
    engines = []
    for number in range(4):
        messages = conversation(number)
        for turn in range(3):
            engine, body = ask(cluster, messages)
            answer = json.loads(body)
            if turn:
                assert engine == engines[-1]
                known = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
                assert known > 100
            engines.append(engine)
            text = answer["choices"][0]["message"]["content"]
            messages += [
                {"role": "assistant", "content": text},
                {"role": "user", "content": "And?"},
            ]
    assert len(set(engines)) == 2


def test_a_stream_comes_in_pieces_and_is_the_same_text(cluster: str):
    _, whole = ask(cluster, conversation(9))
    _, stream = ask(cluster, conversation(9), stream=True)
    lines = [line[6:] for line in stream.decode().splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    deltas = [json.loads(line)["choices"][0]["delta"].get("content") or "" for line in lines[:-1]]
    assert "".join(deltas) == json.loads(whole)["choices"][0]["message"]["content"]


def test_errors_are_the_engines(cluster: str):
    with pytest.raises(urllib.error.HTTPError) as error:
        ask(cluster, [])
    with error.value as answer:
        assert answer.code == 400
        assert "messages is empty" in json.load(answer)["error"]["message"]


def test_an_update_ends_no_request(cluster: str):
    """Engines are replaced one after the other; each ends what it has begun."""
    from ray import serve

    from localkv.server.cluster.ray_app import build

    updated = Event()

    def ask_on(number: int) -> set[str]:
        engines = set[str]()
        while not updated.is_set():
            engine, body = ask(cluster, conversation(number))
            assert json.loads(body)["choices"][0]["finish_reason"]
            engines.add(engine)
        return engines

    with ThreadPoolExecutor() as pool:
        long = pool.submit(
            ask, cluster, conversation(40), stream=True, max_tokens=900, ignore_eos=True
        )
        others = [pool.submit(ask_on, number) for number in (41, 42)]
        time.sleep(0.5)
        try:
            serve.run(build({**ARGUMENTS, "n_parallel": "3"}), name="tales")
        finally:
            updated.set()
        before, stream = long.result()
        assert b"[DONE]" in stream
        seen = set[str]().union(*(other.result() for other in others))
    after = {ask(cluster, conversation(number))[0] for number in range(50, 56)}
    assert before not in after
    assert seen - after  # they were served by those that are gone, too


def test_others_answer_when_an_engine_dies(cluster: str):
    messages = conversation(20)
    engine, _ = ask(cluster, messages)
    named = ray.util.list_named_actors(all_namespaces=True)
    (victim,) = [one for one in named if one["name"].endswith(f"#{engine}")]
    ray.kill(ray.get_actor(victim["name"], namespace=victim["namespace"]))
    end = time.monotonic() + SECONDS
    while True:
        try:
            other, _ = ask(cluster, messages)
            break
        except urllib.error.HTTPError as error:
            error.close()
            assert time.monotonic() < end
            time.sleep(0.2)
    assert other != engine
