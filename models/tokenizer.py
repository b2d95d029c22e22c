"""The tokenizer: a sentencepiece BPE model trained on the corpus, and document encoding."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable
from pathlib import Path

import sentencepiece
from document import ASSISTANT, END, SYSTEM, USER, Document

_CHUNK = re.compile(r" ?[A-Za-z]+| ?\d| ?[^A-Za-z\d\s]+|\s")


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


class Tokenizer:
    """Encodes documents part by part, so that every token keeps the kind of its part.

    No piece of the vocabulary crosses the border of a chunk (a word, a digit or a row of
    punctuation, with the space before it), so encoding chunks gives what encoding the text gives.
    """

    def __init__(self, path: Path) -> None:
        self.processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
        self._chunks: dict[str, list[int]] = {}
        self._markers = {
            marker: self.processor.piece_to_id(marker) for marker in (SYSTEM, USER, ASSISTANT, END)
        }
        self.bos: int = self.processor.bos_id()
        self.eos: int = self.processor.eos_id()
        self.size: int = self.processor.vocab_size()

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.processor.encode(text)
        return ids

    def decode(self, ids: list[int]) -> str:
        text: str = self.processor.decode(ids)
        return text

    def encode_document(self, document: Document) -> tuple[list[int], list[int]]:
        """The ids of a document and, for every id, its kind."""
        ids: list[int] = []
        kinds: list[int] = []
        starts_run = True
        for part in document.parts:
            if part.is_marker:
                ids.append(self._markers[part.text])
                kinds.append(int(part.kind))
                starts_run = True
                continue
            before = len(ids)
            for chunk in _CHUNK.findall(" " + part.text if starts_run else part.text):
                ids += self._encode_chunk(chunk)
            kinds += [int(part.kind)] * (len(ids) - before)
            starts_run = False
        return ids, kinds

    def _encode_chunk(self, chunk: str) -> list[int]:
        known = self._chunks.get(chunk)
        if known is None:
            # A line break takes the space that sentencepiece puts before every text.
            lead = len(self.encode("\n"))
            known = self._chunks[chunk] = self.encode("\n" + chunk)[lead:]
        return known
