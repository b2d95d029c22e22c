"""Token ids of documents, part by part, so that every token keeps the kind of its part."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from document import Document

_CHUNK = re.compile(r" ?[A-Za-z]+| ?\d| ?[^A-Za-z\d\s]+|\s")


class DocumentEncoder:
    """Encodes with any tokenizer of the model's vocabulary.

    No piece of the vocabulary crosses the border of a chunk (a word, a digit or a row of
    punctuation, with the space before it), so encoding chunks gives what encoding the text gives.

    Args:
        encode: ids of a plain text, without BOS and EOS.
        markers: the ids of the role markers and of the end.
        bos: the id that every document starts with.
    """

    def __init__(
        self, encode: Callable[[str], list[int]], markers: Mapping[str, int], bos: int
    ) -> None:
        self.bos = bos
        self._encode = encode
        self._markers = dict(markers)
        self._chunks: dict[str, list[int]] = {}

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
            lead = len(self._encode("\n"))
            known = self._chunks[chunk] = self._encode("\n" + chunk)[lead:]
        return known
