"""Embeddings: the hidden states they are made of, pooling, norms, and llama.cpp's."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from localkv import LLM
from localkv.engine.embedding import Pool, Pooling, normalised, pooling_of_file, similarities
from localkv.errors import ContextOverflowError, LocalKVError, UsageError
from localkv.loader.metadata import Metadata
from support.paths import ROOT, TESTS

TEXTS = ["Once upon a time there was a fox", "The owl", ""]

CASES = json.loads((TESTS / "data" / "llama_cpp_embeddings.json").read_text())


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> LLM:
    return LLM(tiny_model, n_ctx=64)


def test_pooling_of_the_same_hidden_states(llm: LLM) -> None:
    states = llm.embed(TEXTS, pooling="none", normalize=False)
    n_tokens = [len(llm.tokenize(text)) for text in TEXTS]
    assert [one.shape for one in states] == [(n, llm.config.n_embd) for n in n_tokens]
    mean = llm.embed(TEXTS, pooling="mean", normalize=False)
    last = llm.embed(TEXTS, pooling="last", normalize=False)
    assert mean.dtype == last.dtype == np.float32
    assert mean.shape == last.shape == (3, llm.config.n_embd)
    np.testing.assert_allclose(mean, [one.mean(0) for one in states], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(last, [one[-1] for one in states])


def test_the_output_matrix_makes_logits_of_them(llm: LLM) -> None:
    ids = llm.tokenize(TEXTS[0])
    (states,) = llm.embed([ids], pooling="none", normalize=False)
    output = llm.engine.model.weights.output.weight.decode()
    logits = states.astype(np.float64) @ np.asarray(output, np.float64).T
    np.testing.assert_allclose(logits, np.asarray(llm.logits(ids)), atol=0.02)


def test_they_have_a_norm_of_one(llm: LLM) -> None:
    vectors = llm.embed(TEXTS)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=-1), 1, atol=1e-6)
    np.testing.assert_array_equal(vectors, llm.embed(TEXTS, pooling="mean"))
    raw = llm.embed(TEXTS, normalize=False)
    np.testing.assert_allclose(raw / np.linalg.norm(raw, axis=-1)[:, None], vectors, atol=1e-6)


def test_one_text_many_none(llm: LLM) -> None:
    both = llm.embed(TEXTS[:2])
    np.testing.assert_array_equal(llm.embed(TEXTS[1]), both[1:])
    ids = llm.tokenize(TEXTS[1])
    np.testing.assert_array_equal(llm.embed(ids), both[1:])
    np.testing.assert_array_equal(llm.embed([ids]), both[1:])
    assert llm.embed([]).shape == (0, llm.config.n_embd)
    assert llm.embed("").shape == (1, llm.config.n_embd)  # the BOS token's


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_batches_make_no_difference(tiny_model: Path, llm: LLM, pooling: str) -> None:
    small = LLM(tiny_model, n_ctx=64, n_batch=3)
    np.testing.assert_allclose(
        small.embed(TEXTS, pooling=pooling), llm.embed(TEXTS, pooling=pooling), atol=1e-6
    )


def test_what_came_before_makes_no_difference(llm: LLM) -> None:
    before = llm.embed(TEXTS[:1])
    text = llm.complete(TEXTS[0], max_tokens=5, temperature=0).text
    np.testing.assert_array_equal(llm.embed(TEXTS[:1]), before)
    assert llm.complete(TEXTS[0], max_tokens=5, temperature=0).text == text


def test_a_stream_goes_on_after_an_embedding(llm: LLM) -> None:
    whole = llm.complete(TEXTS[0], max_tokens=12, temperature=0).text
    stream = llm.stream(TEXTS[0], max_tokens=12, temperature=0)
    pieces = [next(stream), next(stream)]
    llm.embed("something else")
    assert "".join([*pieces, *stream]) == whole


def test_logits_of_a_text_that_is_kept(tiny_model: Path) -> None:
    model = LLM(tiny_model, n_ctx=1024, n_batch=32)
    ids = model.tokenize("Once upon a time there was a fox. " * 20)[:120]

    def logits() -> np.ndarray:
        return np.concatenate([np.array(part) for part in model.engine.logit_batches(ids)])

    want = logits()
    model.complete(ids, max_tokens=3)
    model.complete("The owl", max_tokens=3)
    np.testing.assert_array_equal(logits(), want)


@pytest.mark.parametrize(
    "options", [{}, {"n_parallel": 2}, {"cache_type_k": "q8_0", "kv_tail": 16}, {"n_ctx": 128}]
)
@pytest.mark.parametrize("pooling", ["mean", "last", "none"])
def test_a_long_text_lets_others_have_turns(tiny_model: Path, pooling: Pooling, options) -> None:
    """Its vector and what is written meanwhile have the bits that they have alone."""
    model = LLM(tiny_model, **{"n_ctx": 256, "n_batch": 32, **options})
    ids = model.tokenize("Once upon a time there was a fox. " * 20)[:120]
    (want,) = model.engine.embeddings([ids], pooling)
    text = model.complete(TEXTS[0], max_tokens=12, temperature=0).text
    other = model.engine.embeddings([ids[5:100]], pooling)
    model.engine.reset()
    stream = model.stream(TEXTS[0], max_tokens=12, temperature=0)
    pieces = list[str]()
    vectors = list[np.ndarray]()
    n_turns = 0
    for some in model.engine.embed_by_turns([ids], pooling):
        n_turns += 1
        vectors += some
        pieces.append(next(stream))
        np.testing.assert_array_equal(model.engine.embeddings([ids[5:100]], pooling), other)
    assert n_turns >= 3
    np.testing.assert_array_equal(vectors, [want])
    assert "".join([*pieces, *stream]) == text
    assert model.batch.pages.lost == 0


def test_the_reference_makes_the_same(tiny_model: Path, llm: LLM) -> None:
    reference = LLM(tiny_model, n_ctx=64, device="reference")
    for pooling in ("mean", "last"):
        ours = llm.embed(TEXTS, pooling=pooling)
        np.testing.assert_allclose(ours, reference.embed(TEXTS, pooling=pooling), atol=2e-3)


def test_refusals(llm: LLM) -> None:
    with pytest.raises(ContextOverflowError, match=r"^text 2 of 2 has \d+ tokens, but the context"):
        llm.embed(["The fox", "fox " * 100])
    with pytest.raises(ContextOverflowError, match=r"^the text has \d+ tokens, but the context"):
        llm.embed("fox " * 100)
    with pytest.raises(LocalKVError, match=r"^text 1 of 2 has no tokens"):
        llm.embed([[], [1]])
    with pytest.raises(
        UsageError, match=r"^pooling must be 'mean' or 'cls' or 'last' or 'none' or "
    ):
        llm.embed("The fox", pooling="max")


@pytest.mark.parametrize(
    ("number", "pooling"), [(None, "mean"), (0, "mean"), (1, "mean"), (2, "cls"), (3, "last")]
)
def test_the_pooling_that_a_file_names(number: int | None, pooling: str) -> None:
    assert pooling_of_file(number) == pooling


@pytest.mark.parametrize(("number", "name"), [(9, "9"), (-1, "-1")])
def test_a_pooling_that_needs_another_model(number: int, name: str) -> None:
    with pytest.raises(UsageError, match=rf"with pooling {name}, which is not supported"):
        pooling_of_file(number)


def test_a_file_that_names_its_pooling(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    last = llm.embed(TEXTS, pooling="last")

    def integer(self: Metadata, key: str, *default: object) -> object:
        return 3 if key == "llama.pooling_type" else default[0]

    monkeypatch.setattr(Metadata, "integer", integer)
    np.testing.assert_array_equal(llm.embed(TEXTS), last)


@pytest.mark.parametrize(("norm", "p"), [(1, 1), (2, 2), (3, 3), (80, 80)])
def test_p_norms(norm: int, p: float) -> None:
    vectors = np.random.default_rng(3).normal(0, 1e5, (4, 50)).astype(np.float32)
    got = normalised(vectors, norm).astype(np.float64)
    np.testing.assert_allclose((np.abs(got) ** p).sum(-1) ** (1 / p), 1, rtol=1e-5)
    np.testing.assert_allclose(got / got[:, :1], vectors / vectors[:, :1], rtol=1e-5)


def test_other_norms() -> None:
    vectors = np.array([[3, -4], [0, 0]], np.float32)
    np.testing.assert_array_equal(normalised(vectors, -1), vectors)
    np.testing.assert_allclose(normalised(vectors, 0), [[24570, -32760], [0, 0]])
    np.testing.assert_allclose(normalised(vectors, 2), [[0.6, -0.8], [0, 0]])


def _pooled(parts: list[np.ndarray], pooling: Pooling) -> np.ndarray:
    pool = Pool(pooling)
    for part in parts:
        pool.add(part)
    return pool.vector()


def test_a_mean_of_parts() -> None:
    rows = np.random.default_rng(4).normal(0, 1, (10, 6)).astype(np.float32)
    parts = [rows[:4], rows[4:5], rows[5:]]
    np.testing.assert_allclose(_pooled(parts, "mean"), rows.mean(0), rtol=1e-5)
    np.testing.assert_array_equal(_pooled(parts, "last"), rows[-1])
    np.testing.assert_array_equal(_pooled(parts, "none"), rows)
    np.testing.assert_array_equal(_pooled(parts, "cls"), rows[0])


def test_similarities() -> None:
    got = similarities([[3.0, 0.0], [0.0, 2.0], [-1.0, 0.0]])
    np.testing.assert_allclose(got, [[1, 0, -1], [0, 1, 0], [-1, 0, 1]], atol=1e-7)


@pytest.mark.parametrize(
    "case", CASES, ids=lambda case: f"{case['file']}-{len(case['ids'])}-{case['pooling']}"
)
def test_llama_cpp_s(case: dict, request: pytest.FixtureRequest) -> None:
    """The model that ships, and models whose last norm is another, give llama.cpp's vectors."""
    path = ROOT / "models" / case["file"]
    if not path.exists():
        (path,) = request.getfixturevalue("conformance").glob(f"archs*/{case['file']}")
    llm = LLM(path, n_ctx=256, cache_type_k="f32", cache_type_v="f32")
    (vector,) = llm.embed([case["ids"]], pooling=case["pooling"], normalize=False)
    norm = float(np.linalg.norm(vector))
    assert norm == pytest.approx(case["norm"], rel=3e-4)
    np.testing.assert_allclose(vector[:: case["step"]] / norm, case["parts"], atol=3e-4)
