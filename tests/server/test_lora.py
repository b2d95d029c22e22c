"""Adapters of a server: what was loaded, scales for all requests and for each of a batch."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from localkv.llm import LLM
from support.adapters import write_adapter
from support.paths import MODELS
from support.server import RunningServer

F16 = MODELS / "tales-4M-F16.gguf"
REQUEST = {"prompt": "Once upon a time", "n_predict": 8, "temperature": 0.0, "seed": 1}
SCALES = (None, 0.0, 0.5, 1.0, -1.0)


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_adapter(tmp_path_factory.mktemp("lora") / "story.gguf", F16, size=0.3)


@pytest.fixture(scope="module")
def adapted(adapter: Path) -> Iterator[RunningServer]:
    running = RunningServer("--lora-scaled", f"{adapter}:0.25", model=F16).wait()
    yield running
    assert running.stop() == 0


@pytest.fixture(scope="module")
def texts(adapter: Path) -> dict[float | None, str]:
    """What the Python API writes with each of `SCALES`."""
    with LLM(F16, lora={str(adapter): 0.25}, n_ctx=256, progress=False) as llm:
        return {
            scale: llm.complete(
                REQUEST["prompt"],
                max_tokens=8,
                temperature=0.0,
                lora=None if scale is None else {0: scale},
            ).text
            for scale in SCALES
        }


def field(scale: float | None) -> dict[str, object]:
    return {} if scale is None else {"lora": [{"id": 0, "scale": scale}]}


def test_requests_of_a_batch_have_scales_of_their_own(
    adapted: RunningServer, texts: dict[float | None, str]
) -> None:
    with ThreadPoolExecutor(len(SCALES)) as pool:
        answers = pool.map(
            lambda scale: adapted.post("/completion", {**REQUEST, **field(scale)}), SCALES
        )
        found = dict(zip(SCALES, answers, strict=True))
    assert {scale: answer["content"] for scale, (_, answer) in found.items()} == texts
    assert len(set(texts.values())) == len(SCALES)
    settings = {scale: answer["generation_settings"] for scale, (_, answer) in found.items()}
    assert settings[0.5]["lora"] == [{"id": 0, "scale": 0.5}]
    assert settings[None]["lora"] == [{"id": 0, "scale": 0.25}]


def test_all_dialects_with_the_field_take_it(adapted: RunningServer) -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "temperature": 0}
    for path, body in (
        ("/v1/completions", {**REQUEST, "max_tokens": 4}),
        ("/v1/chat/completions", chat),
    ):
        found = [adapted.post(path, {**body, **field(scale)})[1] for scale in (0.0, 1.0)]
        texts = [one["choices"][0] for one in found]
        assert texts[0] != texts[1]
    assert adapted.post("/v1/chat/completions", {**chat, "lora": [{"id": 7, "scale": 1}]})[0] == 400


def test_scales_for_all_requests(
    adapted: RunningServer, adapter: Path, texts: dict[float | None, str]
) -> None:
    before = [{"id": 0, "path": str(adapter), "scale": 0.25}]
    assert adapted.get("/lora-adapters") == (200, before)
    try:
        assert adapted.post("/lora-adapters", [{"id": 0, "scale": 1.0}]) == (200, {"success": True})
        assert adapted.get("/lora-adapters")[1][0]["scale"] == 1.0
        assert adapted.post("/completion", REQUEST)[1]["content"] == texts[1.0]
        assert adapted.post("/completion", {**REQUEST, **field(0.5)})[1]["content"] == texts[0.5]
        assert adapted.post("/lora-adapters", [])[0] == 200  # what is left out has 0
        assert adapted.post("/completion", REQUEST)[1]["content"] == texts[0.0]
    finally:
        adapted.post("/lora-adapters", [{"id": 0, "scale": 0.25}])


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ([{"id": 1, "scale": 1.0}], "there is no adapter 1"),
        ([{"id": 0, "scale": 1.0}, {"id": 0, "scale": 0.5}], "named twice"),
        ([{"id": 0}], "scale"),
        ([{"id": -1, "scale": 1.0}], "id must be a whole number"),
        ([{"id": 0, "scale": 1e9}], "scale must be a number"),
        ({"id": 0, "scale": 1.0}, "array"),
        ([1], "object"),
    ],
)
def test_what_is_no_scale_is_refused(adapted: RunningServer, body: object, message: str) -> None:
    status, answer = adapted.post("/lora-adapters", body)
    assert status == 400
    assert message in answer["error"]["message"]
    if isinstance(body, list):
        assert adapted.post("/completion", {**REQUEST, "lora": body})[0] == 400
