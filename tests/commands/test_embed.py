"""`localkv embed`: which texts, and in what form their vectors are printed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from localkv import LLM

TEXTS = ["The fox", "the owl said hello"]


@pytest.fixture(scope="module")
def vectors(tiny_model: Path) -> np.ndarray:
    return LLM(tiny_model).embed(TEXTS)


def numbers(text: str) -> np.ndarray:
    return np.array([[float(word) for word in line.split()] for line in text.splitlines()])


def test_a_line_for_each_text(program, tiny_model: Path, tmp_path: Path, vectors) -> None:
    """Exactly the numbers of the API, wherever the texts come from."""
    path = tmp_path / "texts.txt"
    path.write_text("\n".join(TEXTS) + "\n")
    run = ("embed", "-m", tiny_model)
    result = program(*run, "-p", r"The fox\nthe owl said hello")
    assert (result.code, len(result.err_lines)) == (0, 1)
    assert result.err.startswith("memory: weights ")
    np.testing.assert_array_equal(numbers(result.out).astype(np.float32), vectors)
    assert program(*run, "-q", "-f", path).out == result.out
    assert program(*run, "-q", stdin=path.read_bytes()).out == result.out
    assert program(*run, "-q", "-f", "-", stdin=path.read_bytes()).out == result.out
    assert program(*run, "-p", "|".join(TEXTS), "--embd-separator", "|").out == result.out
    target = tmp_path / "out.txt"
    assert program(*run, "-f", path, "-o", target).out == ""
    assert target.read_text() == result.out


def test_one_text_with_line_breaks(program, tiny_model: Path) -> None:
    run = ("embed", "-q", "-m", tiny_model, "-p", r"The fox\nthe owl")
    assert len(program(*run).out.splitlines()) == 2
    assert len(program(*run, "--embd-separator", "").out.splitlines()) == 1


def test_forms(program, tiny_model: Path, vectors) -> None:
    run = ("embed", "-q", "-m", tiny_model, "-p", r"The fox\nthe owl said hello")
    arrays = json.loads(program(*run, "--embd-output-format", "array").out)
    np.testing.assert_array_equal(np.array(arrays, np.float32), vectors)
    openai = json.loads(program(*run, "--json").out)
    assert [*openai] == ["object", "model", "data"]
    assert openai["data"] == [
        {"object": "embedding", "index": index, "embedding": vector}
        for index, vector in enumerate(arrays)
    ]
    more = json.loads(program(*run, "--embd-output-format", "json+").out)
    cosines = more.pop("cosineSimilarity")
    assert more == openai
    np.testing.assert_allclose(cosines, vectors @ vectors.T, atol=1e-6)
    result = program(*run, "--json", "--embd-output-format", "raw")
    assert (result.code, result.err) == (2, "error: --json and --embd-output-format raw: use one\n")


def test_norms_and_pooling(program, tiny_model: Path) -> None:
    llm = LLM(tiny_model)
    run = ("embed", "-q", "-m", tiny_model, "-p", TEXTS[0])
    last = llm.embed(TEXTS[0], pooling="last", normalize=False)
    got = numbers(program(*run, "--pooling", "last", "--embd-normalize", "-1").out)
    np.testing.assert_array_equal(got.astype(np.float32), last)
    whole = program(*run, "--embd-normalize", "0").out
    assert "." not in whole
    assert np.abs(numbers(whole)).max() == 32760
    each = numbers(program(*run, "--pooling", "none").out)
    assert len(each) == len(llm.tokenize(TEXTS[0]))
    np.testing.assert_allclose(np.linalg.norm(each, axis=-1), 1, atol=1e-6)


@pytest.mark.parametrize(
    ("argv", "stdin", "message"),
    [
        ([], None, "there is no text: give -p TEXT, -f FILE, or text on stdin"),
        (["-p", "a", "-f", "b"], b"", "-p and -f both give the text, use one"),
        (["-f", "none"], b"", "the text none: No such file or directory"),
        (["-p", "a", "--pooling", "max"], b"", "--pooling: 'max' is not one of"),
    ],
)
def test_refusals(program, tiny_model: Path, argv, stdin, message) -> None:
    result = program("embed", "-m", tiny_model, *argv, stdin=stdin)
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith(f"error: {message}")


def test_a_text_that_is_too_long(program, tiny_model: Path) -> None:
    result = program("embed", "-q", "-m", tiny_model, "-c", "8", "-p", r"x\n" + "fox " * 50)
    assert (result.code, result.out) == (1, "")
    assert result.err_lines[0].startswith("error: text 2 of 2 has ")
    assert result.err_lines[1].startswith("hint: use a context of at least ")
