"""Two engines on Ray Serve: where requests go, streams, and an engine that dies."""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from threading import Event
from typing import Any, TypeVar

import pytest

from support.paths import MODELS, ROOT

ray = pytest.importorskip("ray", reason="Ray is not installed (localkv[ray])")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore"),  # Ray's own
]

T = TypeVar("T")

SECONDS = 180.0
CPUS = 2
"""The machine's CPUs, as Ray is told."""
ARGUMENTS = {
    "model": str(MODELS / "tales-4M-Q8_0.gguf"),
    "replicas": "2",
    "n_parallel": "4",
    "n_threads": "1",
    "name": "tales",
}


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Ray on a machine of few CPUs, and the address of its Serve, which has no application.

    Processes that share these tests take turns: two Rays on one machine get in each other's way.
    """
    with (tmp_path_factory.getbasetemp().parent / "ray.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield from ray_machine()


def ray_machine() -> Iterator[str]:
    from ray import serve

    folder = tempfile.mkdtemp(prefix="lkv", dir="/tmp")  # its sockets want a short name
    ray.init(
        num_cpus=CPUS,
        include_dashboard=False,
        log_to_driver=False,
        configure_logging=False,
        _temp_dir=folder,
    )
    port = free_port()
    try:
        serve.start(http_options={"port": port})
        yield f"http://127.0.0.1:{port}"
        serve.shutdown()
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def command(machine: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """`serve run` of an application on the machine, until it is interrupted."""
    from ray import serve

    serve.start(http_options={"port": int(machine.rpartition(":")[2])})  # the last one ended it
    process = subprocess.Popen(
        [str(Path(sys.executable).with_name("serve")), "run", *arguments],
        env={**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
        serve.shutdown()
        until(lambda: not ray.util.list_named_actors(all_namespaces=True))  # it may still end


def of_the_docs() -> list[str]:
    """The arguments of docs/cluster.md's `serve run`, with a model that is there."""
    text = (ROOT / "docs" / "cluster.md").read_text()
    (line,) = [line for line in text.splitlines() if line.startswith("serve run ")]
    return [
        f"model={ARGUMENTS['model']}" if word.startswith("model=") else word
        for word in shlex.split(line)[2:]
    ]


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def until(attempt: Callable[[], T | None], seconds: float = SECONDS) -> T:
    """The first result that is not None; a server that does not answer yet counts as None."""
    end, last = time.monotonic() + seconds, ""
    while time.monotonic() < end:
        try:
            if found := attempt():
                return found
        except urllib.error.HTTPError as error:
            with error:
                last = f"{error.code}: {error.read().decode()}"
        except OSError as error:  # refused, reset, or no answer in time
            last = str(error)
        time.sleep(0.3)
    raise AssertionError(f"nothing in {seconds} s; the last error is {last or 'none'}")


def refusal(url: str, path: str) -> tuple[str | None, dict[str, Any]] | None:
    """Retry-After and the body of a 503; None for other statuses, such as Ray's own before it
    knows the application."""
    request = urllib.request.Request(f"{url}{path}", b"{}", {"content-type": "application/json"})
    try:
        urllib.request.urlopen(request, timeout=10).close()
    except urllib.error.HTTPError as error:
        with error:
            if error.code == 503:
                return error.headers["retry-after"], json.load(error)
    return None


def test_the_command_of_the_docs(machine: str):
    """The engines that it names have room on as many CPUs, with everything else."""
    with command(machine, *of_the_docs()):
        assert len(two_engines(machine)) == CPUS


def test_a_replica_of_several_models_answers_with_each(machine: str):
    names = ("tales-4M-Q8_0", "tales-hybrid-Q8_0")
    files = ",".join(str(MODELS / f"{name}.gguf") for name in names)
    build = ("localkv.server.cluster.ray_app:build", f"model={files}", "name=one,other")
    texts = dict[str, str]()
    with command(machine, *build, "n_threads=1"):
        for name in ("one", "other", "one"):
            _, body = until(lambda name=name: ask(machine, conversation(1), model=name))
            answer = json.loads(body)
            assert answer["model"] == name
            text = answer["choices"][0]["message"]["content"]
            assert texts.setdefault(name, text) == text
        with pytest.raises(urllib.error.HTTPError) as error:
            ask(machine, conversation(1), model="none")
        with error.value as refused:
            assert refused.code == 404
    assert texts["one"] != texts["other"]


SHAPES = {
    "/v1/chat/completions": lambda body: body["error"]["type"] == "unavailable_error",
    "/v1/responses": lambda body: body["error"]["code"] == 503,
    "/completion": lambda body: body["error"]["code"] == 503,
    "/v1/messages": lambda body: body["error"]["type"] == "overloaded_error",
    "/api/chat": lambda body: isinstance(body["error"], str),
}


def test_what_has_no_place_is_said_and_refused(machine: str):
    engines = [word for word in of_the_docs() if not word.startswith("replicas=")]
    with command(machine, *engines, "cpus=8"):
        until(lambda: "cpus=2" in str(refusal(machine, "/v1/chat/completions")))
        for path, is_right in SHAPES.items():
            started = time.monotonic()
            found = refusal(machine, path)
            assert found is not None
            retry_after, body = found
            assert time.monotonic() - started < 5
            assert retry_after == "5"
            assert is_right(body), body
            assert "there is room for 0 of 1 engine: each takes 8 CPU" in json.dumps(body)


def test_what_is_lacking():
    from localkv.server.cluster.ray_app import lacking

    one = [{"CPU": 2.0, "memory": 1e9}]
    assert lacking({"CPU": 1.0}, 2, one) == ""
    assert lacking({}, 9, one) == ""
    line = lacking({"CPU": 1.0}, 3, one)
    assert line.startswith("there is room for 2 of 3 engines: each takes 1 CPU, and this machine")
    assert line.endswith("has 2 CPU; replicas=2, cpus=0.66 or another machine would fit")
    assert "gpus=0" in lacking({"CPU": 1.0, "GPU": 1.0}, 1, one)
    assert lacking({"CPU": 2.0}, 3, [*one, {"CPU": 4.0}]) == ""
    assert "replicas=1 or another machine" in lacking({"CPU": 3.0}, 2, [*one, {"CPU": 5.0}])


def test_why_no_engine_can_start_is_said(machine: str):
    with command(machine, "localkv.server.cluster.ray_app:build", "model=/no/model.gguf"):
        found = until(lambda: "no such file" in str(answer := refusal(machine, "/x")) and answer)
        message = found[1]["error"]["message"]
        assert message == "no engine is ready: engines can't start: /no/model.gguf: no such file"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({}, "no model is named"),
        *(
            ({"model": "x", name: value}, f"{name} is {value!r}, expected a ")
            for name, value in [
                *(("replicas", "0"), ("replicas", "two"), ("replicas", "1.5"), ("cpus", "-1")),
                *(("cpus", "nan"), ("gpus", "x"), ("most_replicas", "0"), ("cpus", "1e9")),
            ]
        ),
    ],
)
def test_arguments_that_make_no_sense(arguments: dict[str, str], says: str):
    from localkv.errors import UsageError
    from localkv.server.cluster.ray_app import build

    with pytest.raises(UsageError, match=says):
        build(arguments)


@pytest.fixture(scope="module")
def cluster(machine: str) -> str:
    from ray import serve

    from localkv.server.cluster.ray_app import build

    serve.start(http_options={"port": int(machine.rpartition(":")[2])})
    serve.run(build(ARGUMENTS), name="tales")  # ready once the gate is, which may be before engines
    two_engines(machine)
    return machine


def ask(
    url: str, messages: list[dict[str, str]], begun: Event | None = None, **fields: Any
) -> tuple[str, bytes]:
    """The engine that answers, and the body of its answer.

    Args:
        begun: set when the first bytes of the body are here.
    """
    body = {"messages": messages, "max_tokens": 4, "temperature": 0, **fields}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=SECONDS) as answer:
        first = answer.read(1)
        if begun:
            begun.set()
        return answer.headers["x-localkv-engine"], first + answer.read()


LONG = {"stream": True, "max_tokens": 1500, "ignore_eos": True}
"""Fields of a request whose answer takes about a second."""


def conversation(number: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"{number} " + "dog and cat " * 60}]


def test_conversations_are_spread_and_stay_with_an_engine(cluster: str):
    for engine, messages in two_engines(cluster).items():
        for _ in range(3):
            again, body = ask(cluster, messages)
            assert again == engine
            answer = json.loads(body)
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 100
            text = answer["choices"][0]["message"]["content"]
            messages += [
                {"role": "assistant", "content": text},
                {"role": "user", "content": "And?"},
            ]


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


def test_others_answer_when_a_replica_dies(cluster: str):
    """Its front dies with it, and its streams end in an error of their dialect."""
    messages = conversation(20)
    engine, _ = ask(cluster, messages)
    named = ray.util.list_named_actors(all_namespaces=True)
    (victim,) = [one for one in named if one["name"].endswith(f"#{engine}")]
    actor, begun = ray.get_actor(victim["name"], namespace=victim["namespace"]), Event()
    with ThreadPoolExecutor() as pool:
        stream = pool.submit(ask, cluster, messages, begun, **LONG)
        assert begun.wait(SECONDS)
        ray.kill(actor)
        other, _ = until(lambda: ask(cluster, messages))
        assert other != engine
        last = stream.result()[1].strip().splitlines()[-1]
        assert b"the engine that had the request has ended" in last


def engine_process(engine: str) -> int:
    """The process of a replica's engine."""
    from ray.serve.context import _get_global_client

    deployments = _get_global_client().get_serve_details()["applications"]["tales"]["deployments"]
    replicas = deployments["Engine"]["replicas"]
    (parent,) = [one["pid"] for one in replicas if one["replica_id"].endswith(engine)]
    children = Path(f"/proc/{parent}/task").glob("*/children")
    for pid in (pid for file in children for pid in file.read_text().split()):
        if b"engine_process" in Path(f"/proc/{pid}/cmdline").read_bytes():
            return int(pid)
    raise AssertionError("the replica has no engine")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_only_the_requests_of_an_engine_that_dies_fail(cluster: str):
    conversations = two_engines(cluster)
    dead, living = conversations
    process = engine_process(dead)
    begun = {engine: Event() for engine in conversations}
    with ThreadPoolExecutor() as pool:
        streams = {
            engine: pool.submit(ask, cluster, messages, begun[engine], **LONG)
            for engine, messages in conversations.items()
        }
        assert all(one.wait(SECONDS) for one in begun.values())
        os.kill(process, signal.SIGKILL)
        engine, body = streams[dead].result()
        assert engine == dead
        assert b'"error"' in body
        assert b"[DONE]" not in body.split(b'"error"')[0]
        engine, body = streams[living].result()
        assert engine == living
        assert b'"error"' not in body
        assert body.endswith(b"data: [DONE]\n\n")
    assert until(lambda: ask(cluster, conversations[dead]))[0] in conversations  # it is back


def two_engines(url: str) -> dict[str, list[dict[str, str]]]:
    """For each of the two engines, a conversation that it has begun."""
    found = dict[str, list[dict[str, str]]]()

    def begin_another() -> bool:
        messages = conversation(next(NUMBERS))
        found[ask(url, messages)[0]] = messages
        return len(found) == CPUS

    until(begin_another)
    return found


NUMBERS = count(60)
