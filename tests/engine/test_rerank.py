"""Rerankers: llama.cpp's stored scores, the tokens of a pair, the order, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from localkv import LLM
from localkv.errors import ContextOverflowError, UsageError
from localkv.loader.metadata import Metadata
from localkv.loader.tokenizer import Tokenizer, tokenizer_from_metadata
from support.encoder_models import RERANKERS, TEXTS, TOKENS, write_encoder, write_qwen3_rank
from support.paths import ROOT

STORED = json.loads((ROOT / "tests" / "data" / "llama_cpp_scores.json").read_text())
DOCUMENTS = ["the red drum", "the fox ran home", "", "fox"]


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder("bert-rank", tmp_path_factory.mktemp("rerankers") / "bert-rank.gguf")


@pytest.mark.parametrize("device", ["cpu", "reference"])
@pytest.mark.parametrize("name", STORED)
def test_llama_cpp_scores(name: str, device: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    if name in RERANKERS:
        write_encoder(name, path)
    else:
        write_qwen3_rank(path)
    with LLM(path, device=device, progress=False) as llm:
        assert llm.warnings == []
        np.testing.assert_allclose(llm.engine.scores(TEXTS), STORED[name], atol=2e-3)


def test_the_best_document_is_first(reranker: Path) -> None:
    with LLM(reranker, progress=False) as llm:
        ranked = llm.rerank("the fox", DOCUMENTS)
        pairs = [llm.pair_ids("the fox", document) for document in DOCUMENTS]
        scores = llm.engine.scores(pairs)[:, 0]
        assert [one.index for one in ranked] == np.argsort(-scores, kind="stable").tolist()
        assert [one.score for one in ranked] == scores[[one.index for one in ranked]].tolist()
        assert all(one.scores == (one.score,) for one in ranked)
        assert llm.rerank("the fox", DOCUMENTS, top_n=2) == ranked[:2]
        assert llm.rerank("the fox", []) == []


def test_all_classes(tmp_path: Path) -> None:
    with LLM(write_encoder("bert-classes", tmp_path / "model.gguf"), progress=False) as llm:
        (only,) = llm.rerank("the fox", ["a drum"])
        assert len(only.scores) == 3
        assert only.score == only.scores[0]


def test_what_can_not_be_scored(reranker: Path, tiny_model: Path) -> None:
    with LLM(reranker, progress=False) as llm:
        with pytest.raises(UsageError, match="top_n must be at least 1, not 0"):
            llm.rerank("the fox", DOCUMENTS, top_n=0)
        with pytest.raises(ContextOverflowError, match="text 2 of 2 has"):
            llm.rerank("the fox", ["a", "a " * 200])
        with pytest.raises(UsageError, match="trained to score texts") as caught:
            llm.embed("the fox")
        assert "localkv rerank" in (caught.value.hint or "")
        assert llm.embed("the fox", pooling="cls").shape == (1, 64)
    refused = pytest.raises(UsageError, match="the llama model has no head that scores texts")
    with LLM(tiny_model, progress=False) as llm, refused:
        llm.rerank("the fox", DOCUMENTS)


def test_a_pair_in_wordpieces(reranker: Path) -> None:
    """[CLS] query [SEP] document [SEP], as BERT was trained; markup is text."""
    with LLM(reranker, progress=False) as llm:
        ids = llm.pair_ids("the fox", "ran [SEP] home")
        texts = [llm.tokenizer.id_to_token(token) for token in ids]
        assert texts[:4] == ["[CLS]", "▁the", "▁fox", "[SEP]"]
        assert texts[4] == "▁ran"
        assert texts[-2:] == ["▁home", "[SEP]"]
        assert texts.count("[SEP]") == 2


def unigrams(**more: object) -> Tokenizer:
    tokens = ["<s>", "<pad>", "</s>", "<unk>", "▁a", "▁b"]
    keys = {
        "tokenizer.ggml.model": "t5",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 4 + [-1.0, -2.0],
        "tokenizer.ggml.token_type": [3, 3, 3, 2, 1, 1],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.seperator_token_id": 2,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_space_prefix": True,
        "tokenizer.ggml.remove_extra_whitespaces": True,
    }
    return tokenizer_from_metadata(Metadata({**keys, **more}))


def test_a_pair_in_unigrams() -> None:
    """XLM-R's <s> query </s> </s> document </s>, where the file asks for a separator."""
    assert unigrams().encode_pair("a", "b") == [0, 4, 2, 5, 2]
    paired = unigrams(**{"tokenizer.ggml.add_sep_token": True})
    assert paired.encode_pair("a", "b") == [0, 4, 2, 2, 5, 2]


def test_a_text_that_both_are_put_into(tmp_path: Path) -> None:
    """Only the file's own text has control tokens."""
    model = RERANKERS["bert-rank"]()
    model.texts["tokenizer.chat_template.rerank"] = "[MASK] {document} [SEP] {query} [CLS]"
    with LLM(model.write(tmp_path / "model.gguf"), progress=False) as llm:
        mask, sep, cls = (TOKENS.index(text) for text in ("[MASK]", "[SEP]", "[CLS]"))
        ids = llm.pair_ids("{document} [SEP]", "fox")
        assert (ids[0], ids[-1]) == (mask, cls)
        assert ids.count(sep) == 1
        assert ids.count(TOKENS.index("fox")) == 1
