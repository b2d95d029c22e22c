"""Libraries index pages of this project by a server's embeddings, and find paragraphs in them.

langchain and LlamaIndex are not installed for development: 21 and 44 packages come with them.

    pip install langchain-openai llama-index-core llama-index-embeddings-openai-like
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import ollama
import openai
import pytest

from localkv import LLM
from support.paths import ROOT
from support.server import RunningServer

PAGES = sorted((ROOT / "docs").glob("s*.md"))
PARTS = list(
    dict.fromkeys(
        " ".join(part.split())[:100]
        for page in PAGES
        for part in page.read_text().split("\n\n")
        if len(part) > 100
    )
)
"""Beginnings of paragraphs, short enough for the encoder, whose tokens are letters."""
ASKED = (3, 40, 77, -1)
N_FOUND = 5

Search = Callable[[str], list[str]]
"""From a text to the `N_FOUND` parts that are most like it, the most alike first."""


def with_openai(url: str, parts: Sequence[str]) -> Search:
    def embedded(texts: Sequence[str]) -> np.ndarray:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            got = client.embeddings.create(model="bert", input=list(texts))
        return np.float32([one.embedding for one in got.data])

    return _most_alike(embedded, parts)


def with_ollama(url: str, parts: Sequence[str]) -> Search:
    def embedded(texts: Sequence[str]) -> np.ndarray:
        client = ollama.Client(host=url)
        with closing(client._client):
            return np.float32(client.embed(model="bert", input=texts).embeddings)

    return _most_alike(embedded, parts)


def _most_alike(embedded: Callable[[Sequence[str]], np.ndarray], parts: Sequence[str]) -> Search:
    index = embedded(parts)

    def search(text: str) -> list[str]:
        order = np.argsort(-index @ embedded([text])[0], kind="stable")
        return [parts[number] for number in order[:N_FOUND]]

    return search


def with_langchain(url: str, parts: Sequence[str]) -> Search:
    library = pytest.importorskip("langchain_openai")
    stores = pytest.importorskip("langchain_core.vectorstores")
    embeddings = library.OpenAIEmbeddings(
        model="bert",
        base_url=f"{url}/v1",
        api_key="none",
        check_embedding_ctx_length=False,  # else it sends tokens of OpenAI's vocabulary
    )
    store = stores.InMemoryVectorStore.from_texts(list(parts), embeddings)
    return lambda text: [one.page_content for one in store.similarity_search(text, k=N_FOUND)]


def with_llama_index(url: str, parts: Sequence[str]) -> Search:
    core = pytest.importorskip("llama_index.core")
    nodes = pytest.importorskip("llama_index.core.schema")
    library = pytest.importorskip("llama_index.embeddings.openai_like")
    embeddings = library.OpenAILikeEmbedding(model_name="bert", api_base=f"{url}/v1")
    index = core.VectorStoreIndex(
        [nodes.TextNode(text=part) for part in parts], embed_model=embeddings
    )
    retriever = index.as_retriever(similarity_top_k=N_FOUND)
    return lambda text: [found.text for found in retriever.retrieve(text)]


@pytest.mark.parametrize(
    "client",
    [with_openai, with_ollama, with_langchain, with_llama_index],
    ids=lambda one: one.__name__,
)
def test_a_folder_of_documents_is_searched(
    encoder: RunningServer, files: Path, client: Callable[[str, Sequence[str]], Search]
) -> None:
    """Each paragraph is the most like itself, and the others come in the order of their cosines."""
    with LLM(files / "bert.gguf", progress=False) as llm:
        index = llm.embed(PARTS)
    search = client(encoder.url, PARTS)
    for number in ASKED:
        found = search(PARTS[number])
        assert found[0] == PARTS[number]
        cosines = index @ index[number]
        np.testing.assert_allclose(
            [cosines[PARTS.index(part)] for part in found],
            np.sort(cosines)[::-1][:N_FOUND],
            atol=1e-5,
        )


def test_what_was_found_is_put_in_order(encoder: RunningServer, files: Path) -> None:
    """A reranker reads the paragraphs that an index found; clients send it plain HTTP."""
    question = "how much memory"
    found = with_openai(encoder.url, PARTS)(question)
    found = [part[:80] for part in found]
    with LLM(files / "bert-rank.gguf", progress=False) as llm:
        expected = [(one.index, one.score) for one in llm.rerank(question, found, top_n=3)]
    reranker = RunningServer(model=files / "bert-rank.gguf").wait()
    body = {"query": question, "documents": found, "top_n": 3}
    results = reranker.post("/v1/rerank", body)[1]["results"]
    assert [(one["index"], one["relevance_score"]) for one in results] == expected
    assert reranker.stop() == 0
