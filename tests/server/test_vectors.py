"""Embeddings and reranking over HTTP, by a model that writes text, an encoder and a reranker."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from threading import Thread

import numpy as np
import ollama
import openai
import pytest

from localkv import LLM
from support.server import SHIPPED_MODEL, RunningServer

TEXTS = ["the fox ran home", "the red drum", "lost"]


@pytest.fixture(scope="module")
def reranker(files: Path) -> Iterator[RunningServer]:
    running = RunningServer("-a", "bert", model=files / "bert-rank.gguf").wait()
    yield running
    assert running.stop() == 0


@pytest.fixture(scope="module")
def vectors(files: Path) -> np.ndarray:
    with LLM(files / "bert.gguf", progress=False) as llm:
        return llm.embed(TEXTS)


def test_openai_embeds(encoder: RunningServer, vectors: np.ndarray) -> None:
    """The client asks for base64 itself."""
    with openai.OpenAI(base_url=f"{encoder.url}/v1", api_key="none", max_retries=0) as client:
        got = client.embeddings.create(model="bert", input=TEXTS)
        np.testing.assert_array_equal(np.float32([one.embedding for one in got.data]), vectors)
        assert [one.index for one in got.data] == [0, 1, 2]
        assert got.usage.prompt_tokens == got.usage.total_tokens > 9
        short = client.embeddings.create(model="bert", input=TEXTS[0], dimensions=8)
        want = vectors[0, :8] / np.linalg.norm(vectors[0, :8])
        np.testing.assert_allclose(short.data[0].embedding, want, rtol=1e-5)


def test_forms_and_tokens(encoder: RunningServer, vectors: np.ndarray, files: Path) -> None:
    with LLM(files / "bert.gguf", progress=False) as llm:
        ids = [llm.tokenize(text) for text in TEXTS]
    for given in (TEXTS, ids):
        body = {"input": given, "encoding_format": "float"}
        data = encoder.post("/v1/embeddings", body)[1]["data"]
        np.testing.assert_array_equal(np.float32([one["embedding"] for one in data]), vectors)
    parts = [{"type": "text", "text": "the fox "}, {"type": "text", "text": "ran home"}]
    objects = [{"content": parts}, {"prompt_string": TEXTS[1]}, [*ids[2][:-1], ids[2][-1]]]
    data = encoder.post("/v1/embeddings", {"input": objects})[1]["data"]
    np.testing.assert_array_equal(np.float32([one["embedding"] for one in data]), vectors)
    mixed = encoder.post("/v1/embeddings", {"input": ["the fox", ids[1][0], "red"]})[1]
    assert len(mixed["data"]) == 1
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    assert encoder.post("/v1/embeddings", {"input": {"content": [image]}})[0] == 501
    one = encoder.post("/v1/embeddings", {"input": ids[1], "encoding_format": "base64"})[1]
    raw = base64.b64decode(one["data"][0]["embedding"])
    np.testing.assert_array_equal(np.frombuffer(raw, "<f4"), vectors[1])


def test_llama_server_embeds(encoder: RunningServer, vectors: np.ndarray) -> None:
    for path, field in (("/embedding", "content"), ("/embeddings", "input")):
        answer = encoder.post(path, {field: TEXTS})[1]
        rows = [one["embedding"] for one in answer]
        np.testing.assert_array_equal(np.float32(rows), vectors[:, None])
    answer = encoder.post("/embedding", {"content": TEXTS[0], "embd_normalize": -1})[1]
    row = np.float32(answer[0]["embedding"][0])
    np.testing.assert_allclose(row / np.linalg.norm(row), vectors[0], rtol=1e-5)


def test_pooling(files: Path) -> None:
    """Without pooling, tokens have vectors as the model gives them, and texts have none."""
    with LLM(files / "bert.gguf", progress=False) as llm:
        last = llm.embed(TEXTS, pooling="last")
        tokens = llm.embed(TEXTS[:1], pooling="none", normalize=False)[0]
    running = RunningServer("--pooling", "last", model=files / "bert.gguf").wait()
    data = running.post("/v1/embeddings", {"input": TEXTS})[1]["data"]
    np.testing.assert_array_equal(np.float32([one["embedding"] for one in data]), last)
    assert running.stop() == 0
    running = RunningServer("--pooling", "none", model=files / "bert.gguf").wait()
    (answer,) = running.post("/embedding", {"content": TEXTS[0]})[1]
    np.testing.assert_array_equal(np.float32(answer["embedding"]), tokens)
    for path in ("/v1/embeddings", "/api/embed"):
        status, answer = running.post(path, {"model": "bert", "input": TEXTS[0]})
        assert status == 400
        assert "without pooling" in str(answer["error"])
    assert running.stop() == 0


def test_ollama_embeds(encoder: RunningServer, vectors: np.ndarray) -> None:
    answer = encoder.post("/api/embed", {"model": "bert:latest", "input": TEXTS})[1]
    np.testing.assert_array_equal(np.float32(answer["embeddings"]), vectors)
    assert answer["prompt_eval_count"] > 9
    assert encoder.post("/api/embed", {"model": "bert", "input": []})[1]["embeddings"] == []
    old = encoder.post("/api/embeddings", {"model": "bert", "prompt": TEXTS[0]})[1]["embedding"]
    np.testing.assert_allclose(old / np.linalg.norm(old), vectors[0], rtol=1e-5)


def test_a_text_that_is_too_long(encoder: RunningServer) -> None:
    long = "fox " * 500
    status, answer = encoder.post("/v1/embeddings", {"input": ["fox", long]})
    assert (status, answer["error"]["type"]) == (400, "exceed_context_size_error")
    cut = encoder.post("/api/embed", {"model": "bert", "input": long})
    assert (cut[0], cut[1]["prompt_eval_count"]) == (200, 128)
    whole = {"model": "bert", "input": long, "truncate": False}
    assert encoder.post("/api/embed", whole)[0] == 400


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/v1/embeddings", {"input": []}, "input has no texts"),
        ("/v1/embeddings", {"input": {"content": "fox"}}, "an object has no text"),
        ("/v1/embeddings", {"input": {"content": [{"type": "x"}]}}, "an object has no text"),
        ("/v1/embeddings", {"input": [[]]}, "input has no tokens"),
        ("/v1/embeddings", {"input": [[10**6]]}, "is no token id"),
        ("/v1/embeddings", {"input": [1.5]}, "neither a text nor a list"),
        ("/v1/embeddings", {"input": "a", "dimensions": 65}, "the model has 64"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ("/v1/embeddings", {"input": ["a"] * 2049}, "up to 2048 texts"),
        ("/embedding", {}, "there is no text"),
        ("/rerank", {"query": "a", "documents": []}, "there are no documents"),
        ("/rerank", {"query": "a", "documents": [1, 2]}, "is no document"),
        ("/rerank", {"query": "a", "documents": ["a"]}, "has no head that scores texts"),
        ("/completion", {"prompt": "a"}, "makes embeddings, and no text"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, "template"),
    ],
)
def test_refusals(encoder: RunningServer, path: str, body: dict, message: str) -> None:
    status, answer = encoder.post(path, body)
    assert status == 400, answer
    assert message in answer["error"]["message"]


def test_documents_in_order(reranker: RunningServer, files: Path) -> None:
    with LLM(files / "bert-rank.gguf", progress=False) as llm:
        ranked = llm.rerank("the fox", TEXTS)
    for path in ("/rerank", "/v1/rerank", "/reranking", "/v1/reranking"):
        answer = reranker.post(path, {"query": "the fox", "documents": TEXTS})[1]
        got = [(one["index"], one["relevance_score"]) for one in answer["results"]]
        assert got == [(one.index, one.score) for one in ranked]
        assert answer["usage"]["prompt_tokens"] > 9
    body = {"query": "the fox", "documents": [{"text": text} for text in TEXTS]}
    body |= {"top_n": 1, "return_documents": True}
    (best,) = reranker.post("/v1/rerank", body)[1]["results"]
    assert best["document"] == {"text": TEXTS[ranked[0].index]}
    tei = reranker.post("/rerank", {"query": "the fox", "texts": TEXTS, "return_text": True})[1]
    assert [(one["index"], one["score"]) for one in tei] == got
    assert tei[0]["text"] == TEXTS[ranked[0].index]
    status, answer = reranker.post("/v1/embeddings", {"input": "fox"})
    assert (status, "trained to score texts" in answer["error"]["message"]) == (400, True)


def test_a_model_that_writes_embeds_beside_its_texts(server: RunningServer) -> None:
    """A text that is written is the same whatever is embedded meanwhile."""
    with LLM(SHIPPED_MODEL, n_threads=1, progress=False) as llm:
        want = llm.embed(["The fox ran home.", "The owl slept."])
    body = {"prompt": "Once upon a time", "n_predict": 150, "temperature": 0, "ignore_eos": True}
    alone = server.post("/completion", body)[1]["content"]
    written = list[str]()
    thread = Thread(target=lambda: written.append(server.post("/completion", body)[1]["content"]))
    thread.start()
    while True:
        given = {"input": ["The fox ran home.", "The owl slept."]}
        data = server.post("/v1/embeddings", given)[1]["data"]
        got = np.float32([one["embedding"] for one in data])
        np.testing.assert_allclose(got, want, atol=1e-5)
        if not thread.is_alive():
            break
    thread.join()
    assert written == [alone]
    assert server.get("/localkv/cache")[1]["pages"]["lost"] == 0


def test_an_encoder_is_described(encoder: RunningServer) -> None:
    assert encoder.get("/health")[0] == 200
    assert encoder.get("/v1/models")[1]["data"][0]["id"] == "bert"
    assert encoder.get("/props")[0] == 200
    assert encoder.get("/localkv/cache")[1]["bytes"] == 0
    assert encoder.get("/metrics")[0] == 200
    assert encoder.post("/api/show", {"model": "bert"})[0] == 200


def test_ollamas_client_embeds(encoder: RunningServer, vectors: np.ndarray) -> None:
    client = ollama.Client(host=encoder.url)
    with closing(client._client):
        got = client.embed(model="bert", input=TEXTS)
        old = np.float32(client.embeddings(model="bert", prompt=TEXTS[0]).embedding)
    np.testing.assert_array_equal(np.float32(got.embeddings), vectors)
    np.testing.assert_allclose(old / np.linalg.norm(old), vectors[0], rtol=1e-5)
