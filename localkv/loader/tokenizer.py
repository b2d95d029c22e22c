"""Text to token ids and back, as llama.cpp does it, from nothing but a GGUF file's metadata.

A text is first searched for special tokens (`tokenizer_st_partition` in llama.cpp's
`src/llama-vocab.cpp`); the text between them goes to the BPE, the SentencePiece or the unigram
model. Control tokens are found only on request and only where the caller allows them; no text
merges into one, where llama.cpp lets a SentencePiece vocabulary do that. This file knows nothing
about chat templates.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from localkv.errors import UsageError
from localkv.loader.bpe_tokenizer import bpe_encoder, bpe_token_bytes
from localkv.loader.plamo_tokenizer import plamo_encoder
from localkv.loader.spm_tokenizer import spm_encoder, spm_token_bytes
from localkv.loader.stream_decoder import StreamDecoder
from localkv.loader.token_types import SPACE, SPECIAL_TYPES, TokenType
from localkv.loader.vocabulary import Vocabulary, read_vocabulary

if TYPE_CHECKING:
    from localkv.loader.metadata import Metadata

_CONTROL_TYPES = frozenset((TokenType.CONTROL, TokenType.UNKNOWN))
_C_SPACES = " \t\n\v\f\r"  # C's isspace
_SURROGATE = re.compile("[\ud800-\udfff]")


def load_tokenizer(path: str | os.PathLike[str], *, override_pre: str | None = None) -> Tokenizer:
    """The tokenizer of a GGUF file, which need not hold a model.

    Args:
        path: the file.
        override_pre: pre-tokenizer family to use instead of the one the file names.

    Raises:
        NoTokenizerError: the file holds none.
        ModelFileError: the file is malformed, or its tokenizer is not supported.
        UsageError: there is no such family.
    """
    from localkv.loader.gguf_file import open_gguf

    return tokenizer_from_metadata(open_gguf(path).metadata, override_pre=override_pre)


def tokenizer_from_metadata(metadata: Metadata, *, override_pre: str | None = None) -> Tokenizer:
    """The tokenizer that a file's metadata describes; raises as `load_tokenizer` does."""
    return Tokenizer(read_vocabulary(metadata, override_pre=override_pre))


class Tokenizer:
    """A vocabulary and how text is cut into it.

    Attributes:
        kind: "spm" (SentencePiece), "bpe" (with merges) or "plamo" (unigrams).
        pre: name of the pre-tokenizer family, "default" where there is none.
        n_vocab: number of tokens.
        bos_id, eos_id: None if there is none.
        add_bos, add_eos: whether `encode` puts them around a text.
        eog_ids: tokens that end a generation.
        suppressed_ids: tokens that are never drawn.
        warnings: one line each on points that the file leaves open, such as its pre-tokenizer.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self.kind = vocabulary.kind
        self.pre = vocabulary.pre
        self.n_vocab = len(vocabulary.tokens)
        self.bos_id = vocabulary.bos_id
        self.eos_id = vocabulary.eos_id
        self.add_bos = vocabulary.add_bos
        self.add_eos = vocabulary.add_eos
        self.eog_ids = vocabulary.eog_ids
        self.suppressed_ids = vocabulary.suppressed_ids
        self.warnings = vocabulary.warnings
        self._bytes_of: dict[int, bytes] = {}

    def __repr__(self) -> str:
        return f"<Tokenizer {self.kind} {self.pre}: {self.n_vocab} tokens>"

    def encode(self, text: str, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Ids of a text.

        Args:
            text: any text; a lone surrogate counts as U+FFFD.
            add_special: put BOS before it and EOS after it, where the model wants that.
            parse_special: read the text of a control token as that token. Tokens that the model's
                makers defined as text (`USER_DEFINED`) are read so in any case.
        """
        return self.encode_segments([(text, parse_special)], add_special)

    def encode_segments(
        self, segments: Iterable[tuple[str, bool]], add_special: bool = True
    ) -> list[int]:
        """Ids of a text that is partly markup: control tokens are read in markup only.

        The segments are one text to everything else, so the ids do not depend on where one ends
        unless it ends within the text of a control token.

        Args:
            segments: pieces of the text in order, each with whether it is markup.
            add_special: as for `encode`.
        """
        pieces = [(_SURROGATE.sub("\ufffd", text), is_markup) for text, is_markup in segments]
        text = "".join(piece for piece, _ in pieces)
        markup = b"".join(bytes((is_markup,)) * len(piece) for piece, is_markup in pieces)
        ids = [self.bos_id] if add_special and self.add_bos and self.bos_id is not None else []
        space = " " if self._vocabulary.add_space_prefix else ""
        after_text = False
        for fragment in self._fragments(text, markup):
            if isinstance(fragment, int):
                ids.append(fragment)
                after_text = False
            else:
                ids += self._encode_plain(fragment if after_text else space + fragment)
                after_text = True
        if add_special and self.add_eos and self.eos_id is not None:
            ids.append(self.eos_id)
        return ids

    def least_tokens(self, text: str) -> int:
        """A lower bound of a text's tokens, from its length alone."""
        if self._longest is None:
            return 0
        is_plain = text.isascii()
        n_bytes = len(text) if is_plain else len(text.encode("utf-8", errors="surrogatepass"))
        if self._vocabulary.lstrip_ids or self._vocabulary.rstrip_ids:
            n_bytes -= sum(map(text.count, _C_SPACES))
        return -(-n_bytes // self._longest)

    @cached_property
    def _longest(self) -> int | None:
        """Bytes of the longest token; None if the tokenizer leaves out text that has no tokens."""
        tokens = self._vocabulary.tokens
        data = [self.token_bytes(token) for token in range(self.n_vocab) if len(tokens[token]) < 7]
        if len({one for one in data if len(one) == 1}) < 256:
            return None
        longest = 1
        sizes = [len(text.encode("utf-8", errors="replace")) for text in tokens]
        for token in sorted(range(self.n_vocab), key=sizes.__getitem__, reverse=True):
            if sizes[token] <= longest:
                break
            longest = max(longest, len(self.token_bytes(token, special=True)))
        return longest

    def encode_within(self, text: str) -> list[int]:
        """Ids of plain text that goes on after another: no space is put before it."""
        text, ids = _SURROGATE.sub("\ufffd", text), list[int]()
        for fragment in self._fragments(text, bytes(len(text))):
            ids += [fragment] if isinstance(fragment, int) else self._encode_plain(fragment)
        return ids

    def decode(self, ids: Iterable[int], skip_special: bool = False) -> str:
        """Text of a sequence of tokens, the inverse of `encode`.

        So the space is taken away again that `encode` puts, in most SentencePiece models, before a
        text and after a special token: once at the start and once after each special token, where
        llama.cpp's `llama_detokenize` does so at the start only. Nothing else is cleaned up. Bytes
        that are not UTF-8 become U+FFFD. Not restored are U+2581, which SentencePiece
        takes for a space; text that a vocabulary has no token for; white space that a special token
        swallows (Phi-3).

        Args:
            ids: the tokens.
            skip_special: leave control and unknown tokens out, rather than write their texts.

        Raises:
            UsageError: there is no such token.
        """
        after_text = False
        pieces = []
        for token in ids:
            data, after_text = self.piece(token, after_text=after_text, skip_special=skip_special)
            pieces.append(data)
        return b"".join(pieces).decode("utf-8", errors="replace")

    def stream_decoder(
        self,
        after: Sequence[int] = (),
        *,
        skip_special: bool = False,
        kept: Container[int] = (),
    ) -> StreamDecoder:
        """A decoder for a sequence that grows.

        Args:
            after: the tokens before it, if any, which tell whether it continues a text: then its
                first word keeps its space.
            skip_special: as for `decode`.
            kept: control tokens that are written nevertheless.
        """
        after_text = bool(after) and not self._is_special(after[-1])
        return StreamDecoder(self, after_text=after_text, skip_special=skip_special, kept=kept)

    def piece(self, token: int, *, after_text: bool, skip_special: bool) -> tuple[bytes, bool]:
        """The text that a token adds, and whether a token after it continues a text."""
        data = self.token_bytes(token, special=not skip_special)
        if self._is_special(token):
            return data, False
        vocabulary = self._vocabulary
        if (
            vocabulary.add_space_prefix
            and not after_text
            and vocabulary.tokens[token].startswith(SPACE)
        ):
            data = data[1:]
        return data, True

    def token_bytes(self, token: int, special: bool = False) -> bytes:
        """The bytes that a token stands for, a SentencePiece word's space included.

        Args:
            token: its id.
            special: whether a control or unknown token stands for its text; else for nothing.

        Raises:
            UsageError: there is no such token.
        """
        token_type = self._vocabulary.types[self._checked(token)]
        if not special and self.is_control(token):
            return b""
        data = self._bytes_of.get(token)
        if data is None:
            data = self._bytes_of[token] = self._token_bytes(token, token_type)
        return data

    def id_to_token(self, token: int) -> str:
        """The text of a token as the vocabulary has it, escapes and all.

        Raises:
            UsageError: there is no such token.
        """
        return self._vocabulary.tokens[self._checked(token)]

    def token_to_id(self, text: str) -> int | None:
        """The token whose text in the vocabulary this is, None if there is none."""
        return self._vocabulary.ids.get(text)

    def is_control(self, token: int) -> bool:
        """Whether `decode` can leave a token out: control tokens, and the unknown one.

        Not those that are part of a text, gpt-oss's `<|channel|>` for one.

        Raises:
            UsageError: there is no such token.
        """
        vocabulary = self._vocabulary
        is_control = vocabulary.types[self._checked(token)] in _CONTROL_TYPES
        return is_control and token not in vocabulary.shown_ids

    def is_marker(self, token: int) -> bool:
        """Whether a token is of a control type, part of a text or not."""
        return self._vocabulary.types[self._checked(token)] in _CONTROL_TYPES

    def _checked(self, token: int) -> int:
        if not 0 <= token < self.n_vocab:
            raise UsageError(f"token {token} is not in the vocabulary of {self.n_vocab}")
        return token

    def _is_special(self, token: int) -> bool:
        return self._vocabulary.types[self._checked(token)] in SPECIAL_TYPES

    def _token_bytes(self, token: int, token_type: int) -> bytes:
        text = self._vocabulary.tokens[token]
        if token_type in SPECIAL_TYPES:
            return text.encode("utf-8", errors="replace")
        if self.kind == "plamo" and token_type == TokenType.NORMAL:
            return text.encode("utf-8", errors="replace")
        is_escaped = self.kind == "spm" or self._vocabulary.of_characters
        if token_type == TokenType.BYTE or (is_escaped and token_type == TokenType.NORMAL):
            return spm_token_bytes(text, token_type)
        return bpe_token_bytes(text) if token_type == TokenType.NORMAL else b""

    @cached_property
    def _encode_plain(self) -> Callable[[str], list[int]]:
        """Ids of text without special tokens. Built on first use: it is most of the cost."""
        encoders = {"spm": spm_encoder, "bpe": bpe_encoder, "plamo": plamo_encoder}
        return encoders[self.kind](self._vocabulary)

    @cached_property
    def _special_tokens(self) -> list[tuple[str, int, bool]]:
        """Text, id and whether it needs markup of the special tokens, longest in UTF-8 first."""
        tokens, types = self._vocabulary.tokens, self._vocabulary.types
        special = [
            (tokens[token], token, token_type in _CONTROL_TYPES)
            for token, token_type in enumerate(types)
            if token_type in SPECIAL_TYPES
        ]
        return sorted(special, key=lambda item: -len(item[0].encode("utf-8", errors="replace")))

    def _fragments(self, text: str, markup: bytes) -> Iterator[int | str]:
        """Cut a text into special tokens and the text between them.

        A longer token goes before a shorter one, wherever they are, and of one token the leftmost.

        Args:
            text: the text.
            markup: one byte for each character: whether it is markup.
        """
        has_markup = b"\1" in markup
        taken = bytearray(len(text))  # characters that belong to a token, or that it swallows
        found: list[tuple[int, int, int]] = []  # start, end, id
        for special, token, needs_markup in self._special_tokens:
            if needs_markup and not has_markup:
                continue
            start = text.find(special)
            while start >= 0:
                end = start + len(special)
                if b"\1" in taken[start:end] or (needs_markup and b"\0" in markup[start:end]):
                    start = text.find(special, start + 1)
                    continue
                first, last = self._swallowed(text, taken, token, start, end)
                taken[first:last] = b"\1" * (last - first)
                found.append((first, last, token))
                start = text.find(special, end)
        position = 0
        for first, last, token in sorted(found):
            if position < first:
                yield text[position:first]
            yield token
            position = last
        if position < len(text):
            yield text[position:]

    def _swallowed(
        self, text: str, taken: bytearray, token: int, start: int, end: int
    ) -> tuple[int, int]:
        """The range of a special token with the white space that it takes along."""
        if token in self._vocabulary.lstrip_ids:
            while start > 0 and not taken[start - 1] and text[start - 1] in _C_SPACES:
                start -= 1
        if token in self._vocabulary.rstrip_ids:
            while end < len(text) and not taken[end] and text[end] in _C_SPACES:
                end += 1
        return start, end
