"""The tokenizer: a sentencepiece BPE model trained on the corpus."""

from __future__ import annotations

import io
from collections.abc import Iterable
from pathlib import Path

import sentencepiece
from document import ASSISTANT, END, SYSTEM, USER
from document_encoder import DocumentEncoder


def train_tokenizer(lines: Iterable[str], vocabulary: int, path: Path) -> None:
    """Train a BPE model and write it to `path`.

    The role markers are control symbols: text never turns into them, only `encode_document` and a
    runtime that knows the chat template put them in.
    """
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        model_type="bpe",
        vocab_size=vocabulary,
        byte_fallback=True,
        split_digits=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=True,
        character_coverage=1.0,
        control_symbols=[SYSTEM, USER, ASSISTANT],
        unk_id=0,
        bos_id=1,
        eos_id=2,
        pad_id=-1,
        max_sentence_length=20000,
        num_threads=1,
        minloglevel=2,
    )
    path.write_bytes(model.getvalue())


class Tokenizer(DocumentEncoder):
    """The trained model, for text and for documents."""

    def __init__(self, path: Path) -> None:
        self.processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
        self.eos: int = self.processor.eos_id()
        self.size: int = self.processor.vocab_size()
        markers = {
            marker: self.processor.piece_to_id(marker) for marker in (SYSTEM, USER, ASSISTANT, END)
        }
        super().__init__(self.encode, markers, bos=self.processor.bos_id())

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.processor.encode(text)
        return ids

    def decode(self, ids: list[int]) -> str:
        text: str = self.processor.decode(ids)
        return text
