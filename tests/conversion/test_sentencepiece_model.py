"""SentencePiece's files, read as the library reads them."""

from __future__ import annotations

import tempfile
from contextlib import suppress
from pathlib import Path

import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st

from localkv.conversion.sentencepiece_model import BPE, read_sentencepiece
from localkv.errors import ModelFileError
from support.checkpoints import HEADS, sentencepiece_model


@pytest.mark.parametrize("heads", HEADS)
def test_as_the_library_reads_them(heads: str, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(sentencepiece_model(HEADS[heads], adds_space=heads == "llama"))
    model, theirs = read_sentencepiece(path), sentencepiece.SentencePieceProcessor(str(path))
    assert model.kind == BPE
    assert model.adds_space == (heads == "llama")
    assert len(model.pieces) == theirs.vocab_size()
    for i, (text, score, kind) in enumerate(model.pieces):
        assert (text, score) == (theirs.IdToPiece(i), theirs.GetScore(i))
        flags = theirs.IsUnknown(i), theirs.IsControl(i), theirs.IsByte(i)
        assert flags == (kind == 2, kind == 3, kind == 6)


@given(st.binary(max_size=60), st.integers(0, 400))
def test_damaged_files_cost_one_line(noise: bytes, at: int) -> None:
    whole = sentencepiece_model(HEADS["llama"])
    for data in (noise, whole[:at], whole[:at] + noise + whole[at + len(noise) :]):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "tokenizer.model"
            path.write_bytes(data)
            with suppress(ModelFileError):
                read_sentencepiece(path)
