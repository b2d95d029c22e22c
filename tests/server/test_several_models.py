"""Several models in one server: which are loaded, which go for others, and who waits."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from localkv.chat.engine import ChatRequest
from localkv.chat.model_choice import Models
from localkv.chat.server_engine import ServerEngine
from localkv.errors import LocalKVError
from localkv.server.failures import RequestError
from localkv.server.models import Keep
from support.paths import MODELS
from support.rude_client import children, read_until, until
from support.server import START_SECONDS, RunningServer

ROOM_FOR_TWO = ("--models-memory", "360MiB")
"""By `localkv plan`'s arithmetic each of the models takes about 180 MiB, most of it the program."""
NAMES = ("tales-4M-F16", "tales-4M-Q8_0", "tales-hybrid-Q8_0")
SHORT = {"prompt": "Once upon a time", "n_predict": 6, "temperature": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models, one more in a folder of its own, and files that are no models."""
    folder = tmp_path_factory.mktemp("several")
    for name in NAMES[:2]:
        shutil.copy(MODELS / f"{name}.gguf", folder)
    (folder / NAMES[2]).mkdir()
    shutil.copy(MODELS / f"{NAMES[2]}.gguf", folder / NAMES[2] / "any.gguf")
    (folder / "readme.txt").write_text("none")
    (folder / "broken.gguf").write_text("none")
    return folder


def serving(*arguments: str) -> RunningServer:
    """A server without the one model that others have."""
    return RunningServer(*arguments, model=None)


@pytest.fixture(scope="module")
def several(folder: Path) -> Iterator[RunningServer]:
    """With room for two of three models."""
    running = serving("--models-dir", str(folder), *ROOM_FOR_TWO)
    yield running
    assert running.stop() == 0
    assert "Traceback" not in "".join(running.lines)


def states(server: RunningServer) -> dict[str, str]:
    """What each model does."""
    listed = server.get("/v1/models")[1]["data"]
    return {one["id"]: one["status"]["value"] for one in listed}


def text(server: RunningServer, model: str | None, **fields: Any) -> str:
    """The text that a model writes."""
    status, answer = server.post("/completion", {**SHORT, "model": model, **fields})
    assert status == 200, answer
    assert model is None or answer["model"] == model
    content: str = answer["content"]
    return content


def test_models_are_loaded_by_requests_and_go_for_others(several: RunningServer):
    assert set(states(several)) == {*NAMES, "broken"}
    for name in (*NAMES, NAMES[0]):
        text(several, name)
        assert states(several)[name] == "loaded"
    now = states(several)
    assert [name for name in NAMES if now[name] == "loaded"] == [NAMES[0], NAMES[2]]  # the latest
    assert several.get("/health")[0] == 200
    loaded = several.get("/api/ps")[1]["models"]
    assert {one["name"] for one in loaded} == {f"{NAMES[0]}:latest", f"{NAMES[2]}:latest"}
    assert len(several.get("/api/tags")[1]["models"]) == 4
    said = "".join(several.lines)
    assert f"{NAMES[1]} takes 17" in said
    assert "the loaded ones may take 360.00 MiB (--models-memory)" in said


def test_names(several: RunningServer):
    assert text(several, f"{NAMES[0]}:latest".removesuffix(":latest"))
    body = {**SHORT, "model": f"{NAMES[0]}:latest"}
    assert several.post("/completion", body)[1]["model"] == NAMES[0]
    status, answer = several.post("/completion", {**SHORT, "model": "another"})
    assert status == 404
    assert "there is no model 'another' here (use " in answer["error"]["message"]
    for path in ("/v1/models/another", "/props?model=another", "/metrics?model=another"):
        assert several.get(path)[0] == 404
    assert several.get(f"/props?model={NAMES[0]}")[1]["model_alias"] == NAMES[0]
    assert several.get(f"/localkv/facts?model={NAMES[0]}")[1]["architecture"] == "llama"


def test_a_model_that_cannot_be_loaded_says_why_and_holds_up_nobody(several: RunningServer):
    status, answer = several.post("/completion", {**SHORT, "model": "broken"})
    assert status == 500
    assert "the model 'broken' can't be loaded" in answer["error"]["message"]
    told = several.get("/v1/models/broken")[1]["status"]
    assert (told["value"], told["failed"], told["exit_code"]) == ("unloaded", True, 1)
    status, answer = several.post(
        "/v1/messages", {"model": "broken", "messages": [], "max_tokens": 1}
    )
    assert (status, answer["type"]) == (500, "error")
    assert text(several, NAMES[0])


def test_metrics_have_a_label_for_each_model(several: RunningServer):
    text(several, NAMES[0])
    every = several.get("/metrics")[1]
    assert f'localkv_generated_tokens_total{{model="{NAMES[0]}"}}' in every
    assert every.count("# HELP localkv_generated_tokens_total") == 1
    assert "localkv_http_requests_total{" in every
    one = several.get(f"/metrics?model={NAMES[0]}")[1]
    assert "model=" not in one
    assert "\nlocalkv_generated_tokens_total " in one


def test_load_and_unload(several: RunningServer):
    status, answer = several.post("/models/unload", {"model": "none"})
    assert status == 404
    text(several, NAMES[0])
    assert several.post("/models/unload", {"model": NAMES[0]}) == (200, {"success": True})
    until(lambda: states(several)[NAMES[0]] == "unloaded")
    status, answer = several.post("/models/unload", {"model": NAMES[0]})
    assert (status, answer["error"]["message"]) == (400, f"the model {NAMES[0]!r} is not loaded")
    assert several.get(f"/slots?model={NAMES[0]}")[0] == 503
    body = {**SHORT, "model": NAMES[0]}
    status, answer = several.post("/completion?autoload=false", body)
    assert status == 400
    assert "POST /models/load" in answer["error"]["message"]
    assert several.post("/models/load", {"model": NAMES[0]}) == (200, {"success": True})
    until(lambda: states(several)[NAMES[0]] == "loaded")
    assert several.post("/models/load", {"model": NAMES[0]})[0] == 200


def test_a_chat_chooses_among_them(several: RunningServer):
    models = Models()
    models.beside = several.url
    offered = {one.name: one for one in models.all() if one.state}
    assert set(offered) == set(states(several))
    name = NAMES[1]
    several.post("/models/unload", {"model": name})
    address = models.find(name)
    assert address == offered[name].model == f"{several.url}#{name}"
    engine = ServerEngine(address)
    facts = engine.load(lambda progress: None)  # which waits until it is loaded
    assert states(several)[name] == "loaded"
    assert facts.server == address
    [*_, finished] = engine.answer(
        ChatRequest([{"role": "user", "content": "A fox"}], max_tokens=4)
    )
    assert finished.completion_tokens > 0
    with pytest.raises(LocalKVError, match="no such model"):
        ServerEngine(f"{several.url}#nothing").load(lambda progress: None)


def test_ollama_says_how_long_a_model_stays(several: RunningServer):
    def expires() -> str:
        found = several.get("/api/ps")[1]["models"]
        return next(one["expires_at"] for one in found if one["name"].startswith(NAMES[0]))

    body = {"model": f"{NAMES[0]}:latest", "prompt": "Once", "stream": False}
    few = {"num_predict": 2}
    assert several.post("/api/generate", {**body, "options": few, "keep_alive": "5m"})[0] == 200
    assert expires() < "9999"
    assert several.post("/api/generate", {**body, "options": few, "keep_alive": -1})[0] == 200
    assert expires().startswith("9999")
    answer = several.post("/api/generate", {"model": NAMES[0], "keep_alive": 0})[1]
    assert answer["done_reason"] == "unload"
    until(lambda: states(several)[NAMES[0]] != "loaded")
    answer = several.post("/api/chat", {"model": NAMES[0], "keep_alive": "10s"})[1]
    assert answer["done_reason"] == "load"
    assert states(several)[NAMES[0]] == "loaded"
    few = {"num_predict": 1}
    answer = several.post("/api/generate", {**body, "options": few, "keep_alive": 0})[1]
    assert answer["done"]
    until(lambda: states(several)[NAMES[0]] == "sleeping")
    answer = several.post("/api/generate", {**body, "options": few})[1]
    assert answer["load_duration"] > 0
    status, answer = several.post("/api/generate", {**body, "keep_alive": "5 parsecs"})
    assert status == 400
    assert "keep_alive" in answer["error"]
    assert several.post("/api/show", {"model": "broken"})[0] == 500
    shown = several.post("/api/show", {"model": NAMES[2]})[1]
    assert shown["model_info"]["general.architecture"] == "qwen35"


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        (300, 300.0),
        (0, 0.0),
        ("0", 0.0),
        ("1h30m", 5400.0),
        ("1.5s", 1.5),
        ("300ms", 0.3),
        (-1, None),
        ("-1", None),
        ("-5m", None),
        (1e12, None),
    ],
)
def test_durations(given: float | str, seconds: float | None):
    assert Keep.of(given) == Keep(seconds)


@pytest.mark.parametrize(
    "given", ["", "5x", "m5", "5m ", "1 h", "--1", "1e3", "٣s", "5" * 65 + "x"]
)
def test_what_is_no_duration_is_refused(given: str):
    with pytest.raises(RequestError) as refused:
        Keep.of(given)
    assert refused.value.status == 400


def test_who_cannot_fit_is_told_the_numbers(folder: Path):
    server = serving("--models-dir", str(folder), "--models-memory", "170MiB")
    try:
        status, answer = server.post("/completion", {**SHORT, "model": NAMES[0]})
        assert status == 400
        message = answer["error"]["message"]
        assert f"the model {NAMES[0]!r} takes 17" in message
        assert " MiB (8.01 MiB of weights, " in message
        assert "all models together may take 170.00 MiB (--models-memory)" in message
        assert text(server, NAMES[2])
        assert server.get("/health")[0] == 200
    finally:
        assert server.stop() == 0


def _streamed(server: RunningServer, body: dict[str, Any]) -> socket.socket:
    """A connection on which a text was asked for."""
    url, data = urlsplit(server.url), json.dumps({**body, "stream": True}).encode()
    head = f"POST /completion HTTP/1.1\r\nHost: {url.netloc}\r\nContent-Length: {len(data)}\r\n\r\n"
    sock = socket.create_connection((url.hostname, url.port), 30)
    sock.sendall(head.encode() + data)
    return sock


@pytest.mark.slow
@pytest.mark.long
def test_one_that_answers_never_goes_and_others_wait_in_order(folder: Path):
    server = serving("--models-dir", str(folder), "--models-max", "1", "--sleep-idle-seconds", "1")
    try:
        alone = {name: text(server, name) for name in NAMES}
        sock = _streamed(server, {**SHORT, "model": NAMES[0], "n_predict": 600, "ignore_eos": True})
        read_until(sock, b'"content":"')
        with ThreadPoolExecutor(8) as pool:
            order = [NAMES[1], NAMES[0], NAMES[2], NAMES[0]]
            asked = []
            for name in order:
                asked.append((name, pool.submit(text, server, name)))
                time.sleep(0.1)
            assert states(server)[NAMES[0]] == "loaded"
            rest = read_until(sock, b'"stop":true')
            assert b"error" not in rest
            for name, one in asked:
                assert one.result() == alone[name]
        sock.close()
        until(lambda: "sleeping" in states(server).values())
        assert "loaded" not in states(server).values()
        assert not [one for one in children(server) if _is_engine(one)]
        assert text(server, NAMES[2]) == alone[NAMES[2]]
    finally:
        assert server.stop() == 0


def _is_engine(pid: int) -> bool:
    try:
        return b"engine_process" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


@pytest.mark.slow
def test_an_only_model_sleeps_and_wakes():
    server = RunningServer("-a", "tales", "--sleep-idle-seconds", "1").wait()
    try:
        first = text(server, None)
        until(lambda: states(server)["tales"] == "sleeping")
        assert not [one for one in children(server) if _is_engine(one)]
        assert server.get("/health")[0] == 200
        assert server.get("/props")[1]["is_sleeping"] is True
        assert server.get("/localkv/facts")[0] == 200
        assert states(server)["tales"] == "sleeping"
        assert text(server, None) == first
        assert server.get("/props")[1]["is_sleeping"] is False
    finally:
        assert server.stop() == 0


@pytest.mark.slow
def test_a_stream_tells_how_far_loading_is(folder: Path):
    """An engine that stands still as it loads keeps its client informed, and nobody else waits."""
    server = serving("--models-dir", str(folder), *ROOM_FOR_TWO)
    try:
        text(server, NAMES[0])
        sock = _streamed(server, {**SHORT, "model": NAMES[1], "return_progress": True})
        until(lambda: states(server)[NAMES[1]] == "loading" and len(_engines(server)) == 2)
        late = max(_engines(server))
        os.kill(late, signal.SIGSTOP)
        told = read_until(sock, b": loading, ")
        assert b'"load_progress":{"stage":"' in told
        assert text(server, NAMES[0])
        os.kill(late, signal.SIGCONT)
        read_until(sock, b'"stop":true')
        sock.close()
    finally:
        assert server.stop() == 0


def _engines(server: RunningServer) -> list[int]:
    return [one for one in children(server) if _is_engine(one)]


REQUESTS = 200


@pytest.mark.slow
@pytest.mark.long
def test_200_requests_to_three_models_with_room_for_two_while_processes_are_killed(folder: Path):
    """Every answer is the one that the model gives alone, whatever dies in between."""
    bodies = [_body(number) for number in range(REQUESTS)]
    alone = dict[str, list[str]]()
    for name in NAMES:
        only = RunningServer("-c", "512", model=next(folder.rglob(_file(name)))).wait()
        try:
            with ThreadPoolExecutor(4) as pool:
                mine = [body for body in bodies if body["model"] == name]
                answers = pool.map(partial(only.post, "/completion"), mine)
                alone[name] = [answer["content"] for _, answer in answers]
        finally:
            assert only.stop() == 0
    expected = [alone[body["model"]].pop(0) for body in bodies]
    port, draw = _free_port(), random.Random(3)
    options = ("--models-dir", str(folder), *ROOM_FOR_TWO, "-c", "512", "--port", str(port))
    servers = [serving(*options)]
    found, n_kills = dict[int, str](), [0]

    def answered(number: int) -> None:
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end:
            try:
                status, answer = servers[-1].post("/completion", bodies[number])
            except OSError:  # the server is gone
                status, answer = 503, None
            if status == 200:
                found[number] = answer["content"]
                return
            assert status == 503, answer
            time.sleep(0.1)
        raise AssertionError(f"no answer to request {number}")

    try:
        with ThreadPoolExecutor(6) as pool:
            asked = [pool.submit(answered, number) for number in range(REQUESTS)]
            for kill in range(6):
                wanted = (kill + 1) * REQUESTS // 8
                # an engine may have to compile a kernel first, which a busy machine takes long over
                until(lambda wanted=wanted: len(found) >= wanted, seconds=300)
                if kill == 3:  # the server itself
                    servers[-1].process.kill()
                    servers[-1].process.wait()
                    servers.append(serving(*options))
                elif engines := _engines(servers[-1]):
                    os.kill(draw.choice(engines), signal.SIGKILL)
                    n_kills[0] += 1
            for one in asked:
                one.result()
        now = states(servers[-1])
    finally:
        codes = [server.stop() for server in servers]
    assert [found[number] for number in range(REQUESTS)] == expected
    assert n_kills[0] >= 4
    assert sum(value == "loaded" for value in now.values()) <= 2
    assert codes[-1] == 0
    assert "Traceback" not in "".join(line for server in servers for line in server.lines)


def _file(name: str) -> str:
    return "any.gguf" if name == NAMES[2] else f"{name}.gguf"


def _body(number: int) -> dict[str, Any]:
    """A request: two models in turn for a while, then another two."""
    kinds: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 1.1}, {"top_k": 5}]
    return {
        "model": NAMES[(number // 25 + (number % 3 == 0)) % 3],
        "prompt": "Once upon a time there was " + "a very big " * (number * 5 % 17),
        "n_predict": 2 + number % 9,
        "seed": number,
        **kinds[number % 3],
    }


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port: int = sock.getsockname()[1]
        return port
