"""`localkv rerank`: documents from anywhere, in order, as lines or as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from localkv import LLM
from support.encoder_models import write_encoder

DOCUMENTS = ["the red drum", "the fox ran home", "fox"]


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder("bert-rank", tmp_path_factory.mktemp("rerank") / "bert-rank.gguf")


def test_lines_and_json(program, reranker: Path, tmp_path: Path) -> None:
    with LLM(reranker, progress=False) as llm:
        ranked = llm.rerank("the fox", DOCUMENTS)
    path = tmp_path / "documents.txt"
    path.write_text("\n".join(DOCUMENTS) + "\n")
    run = ("rerank", "-m", reranker, "--query", "the fox")
    result = program(*run, "-p", r"the red drum\nthe fox ran home\nfox")
    assert (result.code, len(result.err_lines)) == (0, 1)
    assert "no cache" in result.err
    lines = [line.split("\t") for line in result.out.splitlines()]
    assert [text for _, text in lines] == [DOCUMENTS[one.index] for one in ranked]
    assert [float(score) for score, _ in lines] == pytest.approx(
        [one.score for one in ranked], rel=1e-5
    )
    assert program(*run, "-q", "-f", path).out == result.out
    assert program(*run, "-q", stdin=path.read_bytes()).out == result.out
    assert program(*run, "-q", "-p", "|".join(DOCUMENTS), "--separator", "|").out == result.out
    assert program(*run, "-q", "-f", path, "--top-n", 1).out == result.out.splitlines()[0] + "\n"
    found = json.loads(program(*run, "-q", "-f", path, "--json").out)
    assert [*found] == ["model", "results"]
    assert found["results"] == [
        {
            "index": one.index,
            "relevance_score": pytest.approx(one.score),
            "document": {"text": DOCUMENTS[one.index]},
        }
        for one in ranked
    ]
    target = tmp_path / "out.txt"
    assert program(*run, "-q", "-f", path, "-o", target).out == ""
    assert target.read_text() == result.out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["-p", "a"], "there is no query: give --query TEXT"),
        (["--query", "a"], "there are no documents: give -p TEXT, -f FILE, or text on stdin"),
        (["--query", "a", "-p", "a", "-f", "b"], "-p and -f both give the documents, use one"),
        (["--query", "a", "-f", "none"], "the documents none: No such file or directory"),
    ],
)
def test_refusals(program, reranker: Path, argv: list[str], message: str) -> None:
    result = program("rerank", "-m", reranker, *argv, stdin=b"")
    assert (result.code, result.out) == (2, "")
    assert message in result.err


def test_a_model_that_scores_nothing(program, tiny_model: Path) -> None:
    result = program("rerank", "-q", "-m", tiny_model, "--query", "a", "-p", "b")
    assert result.code == 2
    assert "has no head that scores texts" in result.err
