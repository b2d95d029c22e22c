"""Text to token ids and back, as llama.cpp does it, from nothing but a GGUF file's metadata.

A text is first searched for special tokens (`tokenizer_st_partition` in llama.cpp's
`src/llama-vocab.cpp`); the text between them goes to the BPE, the SentencePiece, the unigram or the
WordPiece model. Control tokens are found only on request and only where the caller allows them; no
text merges into one, where llama.cpp lets a SentencePiece vocabulary do that. This file knows
nothing about chat templates, nor which expressions belong to which model
(`localkv.loader.pre_tokenizers`).
"""

from __future__ import annotations

import codecs
import math
import os
import re
import struct
import time
import warnings
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from functools import cache, cached_property
from typing import TYPE_CHECKING, Final, Protocol

from localkv.config import Overrides
from localkv.errors import ModelFileError, UsageError
from localkv.loader.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from localkv.loader.vocabulary import (
    BYTE_TEXTS,
    SPACE,
    SPECIAL_TYPES,
    TokenType,
    Vocabulary,
    ids_of_types,
    read_vocabulary,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer as FastTokenizer
    from tokenizers.pre_tokenizers import PreTokenizer as Step

    from localkv.loader.metadata import Metadata
    from localkv.loader.token_texts import TokenTexts

_CONTROL_TYPES = frozenset((TokenType.CONTROL, TokenType.UNKNOWN))
_C_SPACES = " \t\n\v\f\r"  # C's isspace
_SURROGATE = re.compile("[\ud800-\udfff]")


def load_tokenizer(path: str | os.PathLike[str], overrides: Overrides | None = None) -> Tokenizer:
    """The tokenizer of a GGUF file, which need not hold a model.

    Args:
        path: the file.
        overrides: what options put in the place of what it says.

    Raises:
        NoTokenizerError: the file holds none.
        ModelFileError: the file is malformed, or its tokenizer is not supported.
        UsageError: an option makes no sense.
    """
    from localkv.loader.gguf_file import open_gguf
    from localkv.loader.model_header import with_overrides

    gguf = open_gguf(path)
    return tokenizer_from_metadata(
        (gguf if overrides is None else with_overrides(gguf, overrides)).metadata
    )


def tokenizer_from_metadata(metadata: Metadata) -> Tokenizer:
    """The tokenizer that a file's metadata describes; raises as `load_tokenizer` does."""
    started = time.perf_counter()
    tokenizer = Tokenizer(read_vocabulary(metadata))
    tokenizer.read_seconds = time.perf_counter() - started
    return tokenizer


class Tokenizer:
    """A vocabulary and how text is cut into it.

    Attributes:
        kind: "spm" (SentencePiece), "bpe" (with merges), "plamo" (PLaMo's unigrams), "wordpiece" or
            "unigram" (SentencePiece's).
        pre: name of the pre-tokenizer family, "default" where there is none.
        n_vocab: number of tokens.
        bos_id, eos_id: None if there is none.
        add_bos, add_eos: whether `encode` puts them around a text.
        eog_ids: tokens that end a generation.
        fim: tokens for filling in the middle.
        suppressed_ids: tokens that are never drawn.
        warnings: one line each on points that the file leaves open, such as its pre-tokenizer.
        read_seconds: time that reading the vocabulary has taken so far, and preparing to encode.
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
        self.fim = vocabulary.fim
        self.suppressed_ids = vocabulary.suppressed_ids
        self.warnings = vocabulary.warnings
        self.read_seconds = 0.0
        self._bytes_of: dict[int, bytes] = {}
        self._encode: Callable[[str], list[int]] | None = None
        self._partial_encoders: list[tuple[str, Callable[[str], list[int]]]] = []

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
        fragments = list[int | str]()
        for fragment in self._fragments(text, markup):
            if isinstance(fragment, str) and not after_text:
                fragment = space + fragment
            fragments.append(fragment)
            after_text = isinstance(fragment, str)
        ids += self._encode_fragments(fragments)
        if add_special and self.add_eos and self.eos_id is not None:
            ids.append(self.eos_id)
        return ids

    def encode_pair(self, query: str, document: str) -> list[int]:
        """Ids of a query and a document that are scored together, with the tokens around and
        between them that the model wants. Control tokens written in them are plain text."""
        end = [self.eos_id] if self.add_eos and self.eos_id is not None else []
        return [
            *([self.bos_id] if self.add_bos and self.bos_id is not None else []),
            *self.encode(query, add_special=False),
            *self._vocabulary.between_ids,
            *self.encode(document, add_special=False),
            *end,
        ]

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
        tokens = self._vocabulary.tokens.every
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
        text = _SURROGATE.sub("\ufffd", text)
        return self._encode_fragments([*self._fragments(text, bytes(len(text)))])

    def special_tokens(self, markup: str) -> list[int]:
        """The tokens that are found in markup as a whole, before anything is merged."""
        fragments = self._fragments(markup, b"\1" * len(markup))
        return [fragment for fragment in fragments if isinstance(fragment, int)]

    def decode(self, ids: Iterable[int], skip_special: bool = False) -> str:
        """Text of a sequence of tokens, the inverse of `encode`.

        In most SentencePiece models `encode` puts a space before a text and after a special token.
        That space is taken away again: once at the start and once after each special token, where
        llama.cpp's `llama_detokenize` does so at the start only. Nothing else is cleaned up. Bytes
        that are not UTF-8 become U+FFFD. Not restored are U+2581, which SentencePiece takes for a
        space; text that a vocabulary has no token for; white space that a special token swallows
        (Phi-3).

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
        self, after: Sequence[int] = (), *, skip_special: bool = False, kept: Container[int] = ()
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
        return self._vocabulary.tokens.find(text)

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
        is_escaped = self.kind in _WITH_SPACES or self._vocabulary.of_characters
        if token_type == TokenType.BYTE or (is_escaped and token_type == TokenType.NORMAL):
            return spm_token_bytes(text, token_type)
        return bpe_token_bytes(text) if token_type == TokenType.NORMAL else b""

    def _encode_fragments(self, fragments: Sequence[int | str]) -> list[int]:
        """Ids of special tokens and of text between them."""
        texts = [fragment for fragment in fragments if isinstance(fragment, str)]
        encode = self._encoder(texts) if texts else _no_ids
        ids = list[int]()
        for fragment in fragments:
            ids += [fragment] if isinstance(fragment, int) else encode(fragment)
        return ids

    def _encoder(self, texts: list[str]) -> Callable[[str], list[int]]:
        """Ids of text without special tokens.

        The first short texts don't wait for an encoder of all texts, which is most of a
        tokenizer's cost: they have one of the tokens that can be in them.
        """
        if self._encode is not None:
            return self._encode
        for known, encode in self._partial_encoders:
            if all(text in known for text in texts):
                return encode
        whole = "".join(texts)
        if (
            self.kind not in _PARTIAL
            or self.n_vocab < _LARGE
            or len(whole) > _SHORT
            or len(self._partial_encoders) >= _MOST_PARTIAL
            or not self._vocabulary.tokens.can_find(whole)
        ):
            return self.prepare()
        encode = self._built(whole)
        self._partial_encoders.append((whole, encode))
        return encode

    def prepare(self) -> Callable[[str], list[int]]:
        """Make the encoder of all texts, so that no later text waits for it."""
        if self._encode is None:
            self._encode = self._built(None)
        return self._encode

    def _built(self, whole: str | None) -> Callable[[str], list[int]]:
        started = time.perf_counter()
        encode = _ENCODERS[self.kind](self._vocabulary, whole)
        self.read_seconds += time.perf_counter() - started
        return encode

    @cached_property
    def _special_tokens(self) -> list[tuple[str, int, bool]]:
        """Text, id and whether it needs markup of the special tokens, longest in UTF-8 first."""
        tokens, types = self._vocabulary.tokens, self._vocabulary.types
        ids = ids_of_types(types, SPECIAL_TYPES)
        special = [
            (text, token, types[token] in _CONTROL_TYPES)
            for text, token in zip(tokens.some(ids), ids, strict=True)
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


class _Pieces(Protocol):
    """A tokenizer as a stream decoder needs it."""

    def piece(self, token: int, *, after_text: bool, skip_special: bool) -> tuple[bytes, bool]: ...


class StreamDecoder:
    """Decodes a sequence of tokens as it grows, in pieces that are always whole characters.

    The pieces joined are `Tokenizer.decode` of the whole sequence. A character whose
    bytes are spread over several tokens comes with the last of them; bytes that are no UTF-8 come
    as U+FFFD, as soon as that is clear.

    Args:
        tokenizer: where the tokens are from.
        after_text: whether the first token continues a text.
        skip_special: whether control tokens are left out.
        kept: control tokens that are not.
    """

    def __init__(
        self, tokenizer: _Pieces, *, after_text: bool, skip_special: bool, kept: Container[int] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._after_text = after_text
        self._skip_special = skip_special
        self._kept = kept
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """The characters that are complete with this token; often none.

        Raises:
            UsageError: there is no such token.
        """
        skip = self._skip_special and token not in self._kept
        data, self._after_text = self._tokenizer.piece(
            token, after_text=self._after_text, skip_special=skip
        )
        return self._utf8.decode(data)

    def flush(self, *, is_cut: bool = False) -> str:
        """U+FFFD if the last character is still incomplete, else nothing.

        Args:
            is_cut: the text was cut, so an incomplete character is left out.
        """
        rest = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return "" if is_cut else rest


LONG = 4096
"""Least characters of a text that is cut into tokens while other threads go on."""

_WITH_SPACES = ("spm", "unigram", "wordpiece")
"""Kinds whose tokens have `SPACE` for a space."""
_PARTIAL = ("spm", "bpe")
"""Kinds that have partial encoders."""
_LARGE = 4096
"""Least tokens of a vocabulary that has partial encoders."""
_SHORT = 1024
"""Most characters that a partial encoder is for."""
_MOST_PARTIAL = 4
"""Partial encoders that are made, before one of all texts is."""


def bpe_encoder(vocabulary: Vocabulary, whole: str | None = None) -> Callable[[str], list[int]]:
    """BPE by a list of merges, through Hugging Face's `tokenizers`: a function from text to ids.

    Merges are of bytes, in GPT-2's alphabet, or of characters, with SentencePiece's way to write
    spaces and bytes. The function yields no control token for any text.

    A byte without a token is left out, as in llama.cpp; the vocabularies in use have all 256.

    Args:
        vocabulary: of the model.
        whole: a text whose parts alone the function is for; one that `can_find`.
    """
    from tokenizers.pre_tokenizers import ByteLevel

    family = PRE_TOKENIZERS[vocabulary.pre]
    if whole is None:
        ids, merges = _reachable(vocabulary, vocabulary.tokens.ids), vocabulary.merges.every()
    else:
        if family.of_characters:
            written, characters = whole.replace(" ", SPACE), BYTE_TEXTS
        else:
            characters = tuple(sorted(_byte_of_character(), key=_byte_of_character().__getitem__))
            written = "".join(characters[byte] for byte in whole.encode())
        found = _parts(vocabulary.tokens, written)
        ids = _reachable(vocabulary, found | vocabulary.tokens.find_all(characters))
        merges = vocabulary.merges.within(written)
        merges = [(a, b) for a, b in merges if a in ids and b in ids and a + b in ids]
    # Bytes without a token are left out after the merging: before, their neighbours could merge.
    n_vocab, missing = len(vocabulary.tokens), "<no token>"
    names = BYTE_TEXTS if family.of_characters else _byte_of_character()
    has_all_bytes = all(name in ids for name in names)
    if not has_all_bytes:
        ids[missing] = n_vocab
    unk_token = None if has_all_bytes else missing
    steps = [] if family.of_characters else [ByteLevel(add_prefix_space=False, use_regex=False)]
    tokenizer = _tokenizer(family, ids, merges, unk_token, steps)

    def encode(text: str) -> list[int]:
        if len(text) < LONG:
            found: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        else:
            found = tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return found if has_all_bytes else [token for token in found if token < n_vocab]

    if not family.of_characters:
        return encode
    line_breaks = re.compile(r"(\n+)")

    def encode_characters(text: str) -> list[int]:
        text = text.replace(" ", SPACE)
        if not family.newline_tokens:
            return encode(text)
        found: list[int] = []
        for piece in filter(None, line_breaks.split(text)):
            is_token = piece[0] == "\n" and piece in ids
            found += (ids[piece],) if is_token else encode(piece)
        return found

    return encode_characters


def _reachable(vocabulary: Vocabulary, ids: dict[str, int]) -> dict[str, int]:
    types = vocabulary.types
    return {text: i for text, i in ids.items() if types[i] not in _CONTROL_TYPES}


def _parts(tokens: TokenTexts, text: str) -> dict[str, int]:
    """The tokens that are parts of a text."""
    every = tokens.within(text)[::-1]
    return dict(zip(tokens.some(every), every, strict=True))


def _no_ids(text: str) -> list[int]:
    raise AssertionError(text)


def _tokenizer(
    family: PreTokenizer,
    ids: dict[str, int],
    pairs: list[tuple[str, str]],
    unk_token: str | None,
    steps: Iterable[Step],
) -> FastTokenizer:
    from tokenizers import Regex
    from tokenizers import Tokenizer as FastTokenizer
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import Sequence, Split

    options = {
        "unk_token": unk_token,
        "ignore_merges": family.ignore_merges,
        "byte_fallback": family.of_characters,
    }
    try:
        model = BPE(ids, pairs, **options)
    except Exception:  # `tokenizers` refuses merges of or into unknown tokens
        pairs = [(a, b) for a, b in pairs if a in ids and b in ids and a + b in ids]
        model = BPE(ids, pairs, **options)
    tokenizer = FastTokenizer(model)
    splits = [Split(Regex(regex), "isolated") for regex in family.regexes]
    tokenizer.pre_tokenizer = Sequence([*splits, *steps])
    return tokenizer


@cache
def _byte_of_character() -> dict[str, int]:
    """GPT-2's alphabet: bytes that print stand for themselves, the others for U+0100 onwards."""
    printing = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printing]
    alphabet = {chr(byte): byte for byte in printing}
    return alphabet | {chr(256 + i): byte for i, byte in enumerate(others)}


def bpe_token_bytes(text: str) -> bytes:
    """The bytes that a token's text stands for; a text outside the alphabet stands for itself."""
    alphabet = _byte_of_character()
    try:
        return bytes(alphabet[character] for character in text)
    except KeyError:
        return text.encode("utf-8", errors="replace")


_BPE = 2  # TrainerSpec.ModelType


def spm_encoder(vocabulary: Vocabulary, whole: str | None = None) -> Callable[[str], list[int]]:
    """SentencePiece BPE, through the `sentencepiece` library: a function from text to ids.

    A GGUF file holds the pieces, scores and types of a SentencePiece model, and no merges. The pair
    that makes the token with the highest score is merged first, and the leftmost of equal pairs.
    The model is put together again in SentencePiece's own file format
    (`sentencepiece_model.proto`), so that the original program does that. The function yields no
    control token for any text.

    A character without a token becomes its UTF-8 bytes, or the unknown token in a vocabulary
    without byte tokens (where llama.cpp fails), or nothing if there is none either.

    Args:
        vocabulary: of the model.
        whole: a text whose parts alone the function is for; one that `can_find`.

    Raises:
        ModelFileError: SentencePiece refuses the vocabulary.
    """
    with warnings.catch_warnings():
        # Its SWIG wrapper defines types in a way that Python 3.12 and later complain about.
        warnings.simplefilter("ignore", DeprecationWarning)
        from sentencepiece import SentencePieceProcessor

    model, real_ids = _model_proto(vocabulary, whole)
    try:
        processor = SentencePieceProcessor(model_proto=model)
    except RuntimeError as error:
        raise ModelFileError(
            f"the tokenizer is malformed: {' '.join(str(error).split())}"
        ) from None
    n_vocab = len(vocabulary.tokens)

    def encode(text: str) -> list[int]:
        ids: list[int] = processor.encode(text)
        if real_ids is not None:
            ids = [real_ids[i] for i in ids]
        if max(ids, default=0) >= n_vocab:
            return [token for token in ids if token < n_vocab]
        return ids

    return encode


def _model_proto(vocabulary: Vocabulary, whole: str | None) -> tuple[bytes, list[int] | None]:
    """A SentencePiece model, and the ids of its pieces, where they are not their places."""
    tokens, types, unk_id = vocabulary.tokens, vocabulary.types, vocabulary.unk_id
    bytes_of = tokens.find_all(BYTE_TEXTS)
    has_bytes = len(bytes_of) == len(BYTE_TEXTS)
    byte_ids = {*bytes_of.values()} if has_bytes else set[int]()
    # SentencePiece wants exactly one unknown piece.
    if unk_id is None or types[unk_id] not in (TokenType.UNKNOWN, TokenType.CONTROL):
        unk_id = len(tokens)
    trainer = _int_field(3, _BPE) + _int_field(35, has_bytes)
    normalizer = _int_field(3, False) + _int_field(4, False) + _int_field(5, True)
    ending = _bytes_field(2, trainer) + _bytes_field(3, normalizer)
    if whole is None:
        plain = _plain_pieces(vocabulary, byte_ids, unk_id)
        if plain is not None:
            return plain + ending, None
        first, real_ids = tokens.ids, None
        texts = [*enumerate([*tokens, ""] if unk_id == len(tokens) else tokens)]
    else:
        first = _parts(tokens, whole.replace(" ", SPACE))
        if has_bytes:
            first |= bytes_of
        real_ids = sorted({*first.values(), unk_id})
        name_of = {token: text for text, token in first.items()}
        texts = [(token, name_of.get(token, "")) for token in real_ids]
    names, pieces = first.keys(), list[bytes]()
    scores = vocabulary.scores
    for token, text in texts:
        if token in byte_ids:
            piece_type = TokenType.BYTE
        elif token == unk_id:
            piece_type = TokenType.UNKNOWN
        elif first[text] != token or "\0" in text:
            piece_type = TokenType.CONTROL  # SentencePiece would refuse it
        elif types[token] in (TokenType.NORMAL, TokenType.USER_DEFINED):
            # Those that users defined are matched before; to the merges they are like any other.
            piece_type = TokenType.NORMAL
        elif types[token] == TokenType.UNUSED:
            piece_type = TokenType.UNUSED
        else:
            piece_type = TokenType.CONTROL
        score = float(scores[token]) if token < len(tokens) else 0.0
        if piece_type in (TokenType.UNKNOWN, TokenType.CONTROL):
            # Any name, as long as it is no piece's and too long for a single character.
            text = f"<special {token}>"
            while text in names:
                text += ">"
        body = _bytes_field(1, text.encode("utf-8", errors="replace"))
        pieces.append(
            _bytes_field(1, body + b"\x15" + struct.pack("<f", score) + _int_field(3, piece_type))
        )
    return b"".join(pieces) + ending, real_ids


_LONGEST_PLAIN = 1 << 12


def _plain_pieces(vocabulary: Vocabulary, byte_ids: set[int], unk_id: int) -> bytes | None:
    """The pieces of a model, made all at once; None if the texts of its tokens are not plain."""
    import numpy as np

    from localkv.loader.gguf_header import Strings
    from localkv.loader.token_texts import spread

    tokens = vocabulary.tokens
    strings, n_vocab = tokens.strings, len(tokens)
    if (strings.ends - strings.starts).max() > _LONGEST_PLAIN or b"<special " in strings.data:
        return None
    if not tokens.are_plain():
        return None
    types = np.full(n_vocab + 1, TokenType.CONTROL, np.uint8)
    types[ids_of_types(vocabulary.types, (TokenType.NORMAL, TokenType.USER_DEFINED))] = (
        TokenType.NORMAL
    )
    types[ids_of_types(vocabulary.types, (TokenType.UNUSED,))] = TokenType.UNUSED
    types[unk_id] = TokenType.UNKNOWN
    types[[*byte_ids]] = TokenType.BYTE
    n = max(n_vocab, unk_id + 1)
    types = types[:n]
    named = np.flatnonzero((types == TokenType.UNKNOWN) | (types == TokenType.CONTROL))
    names = Strings.of([f"<special {token}>" for token in named.tolist()])
    starts, ends = np.zeros((2, n), np.int32)
    starts[:n_vocab], ends[:n_vocab] = strings.starts, strings.ends
    starts[named] = names.starts + len(strings.data)
    ends[named] = names.ends + len(strings.data)
    lengths = ends - starts
    scores = np.zeros(n, "<f4")
    scores[:n_vocab] = vocabulary.scores
    # Lengths take two bytes each, and there are seven bytes after a text.
    sizes = lengths + 13
    pieces = spread(Strings(strings.data + names.data, starts, ends), sizes, at=6)
    first = np.cumsum(sizes, dtype=np.int32) - sizes
    last = first + sizes - 7
    pieces[first], pieces[first + 3], pieces[last], pieces[last + 5] = 10, 10, 0x15, 3 << 3
    pieces[first + 1], pieces[first + 2] = sizes - 3 & 0x7F | 0x80, sizes - 3 >> 7
    pieces[first + 4], pieces[first + 5] = lengths & 0x7F | 0x80, lengths >> 7
    for offset, part in enumerate(scores.view(np.uint8).reshape(-1, 4).T, 1):
        pieces[last + offset] = part
    pieces[last + 6] = types
    return pieces.tobytes()


def _int_field(number: int, value: int) -> bytes:
    return _varint(number << 3) + _varint(value)


def _bytes_field(number: int, value: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def spm_token_bytes(text: str, token_type: int) -> bytes:
    """The bytes that a token stands for (`token_to_piece` of llama.cpp)."""
    if token_type == TokenType.BYTE:
        try:
            return bytes((int(text[3:5], 16),))
        except ValueError:
            return b""
    return text.replace(SPACE, " ").encode("utf-8", errors="replace")


_SCALE = 1e4
_UNKNOWN = -10_000_000
"""Score of a character without a token."""
_LEAST = -20_000_000
"""A token with a score that is not above it is never taken."""

_MOST_CHARS = 1 << 28
"""Characters of all beginnings of all tokens together; real vocabularies have some five million."""

_REACHABLE = frozenset((TokenType.NORMAL, TokenType.USER_DEFINED, TokenType.UNUSED))


def plamo_encoder(vocabulary: Vocabulary, whole: str | None = None) -> Callable[[str], list[int]]:
    """PLaMo 2's and 3's tokenizer: a function from text to the tokens of the best score.

    Of all ways to cut the text it takes the one whose scores have the largest sum.

    That is a unigram model (T. Kudo, https://arxiv.org/abs/1804.10959), found from the end of the
    text to its start. The rules are the ones of the models' own program and of llama.cpp
    (`llm_tokenizer_plamo2` in `src/llama-vocab.cpp`). Scores are whole numbers. Of equal ways the
    one with the longer token counts. A character without a token becomes the tokens of its bytes.
    The function yields no control token for any text.

    A byte order mark at the start is left out, as in llama.cpp.

    Raises:
        ModelFileError: there is no token for some byte, or tokens are too long.
    """
    byte_ids = vocabulary.tokens.find_all(BYTE_TEXTS)
    missing = next((text for text in BYTE_TEXTS if text not in byte_ids), None)
    if missing is not None:
        raise ModelFileError(f"the tokenizer is malformed: it has no token {missing}")
    bytes_of = [byte_ids[text] for text in BYTE_TEXTS]
    tokens = _scored(vocabulary)
    if sum(len(text) ** 2 for text in tokens) > 2 * _MOST_CHARS:
        longest = max(map(len, tokens))
        raise ModelFileError(f"the tokenizer has too long tokens, of up to {longest} characters")
    beginnings = {text[:end] for text in tokens for end in range(1, len(text) + 1)}

    def encode(text: str) -> list[int]:
        text = text.removeprefix("\ufeff")
        costs = [0] * (len(text) + 1)
        ends = [0] * len(text)
        ids = [-1] * len(text)
        for start in range(len(text) - 1, -1, -1):
            least, ends[start] = costs[start + 1] - _UNKNOWN, start + 1
            end = start + 1
            while end <= len(text) and (piece := text[start:end]) in beginnings:
                if (found := tokens.get(piece)) is not None:
                    score, token = found
                    if (cost := costs[end] - score) <= least:
                        least, ends[start], ids[start] = cost, end, token
                end += 1
            costs[start] = least
        found_ids, start = [], 0
        while start < len(text):
            if ids[start] >= 0:
                found_ids.append(ids[start])
            else:
                found_ids += [bytes_of[byte] for byte in text[start].encode()]
            start = ends[start]
        return found_ids

    return encode


def _scored(vocabulary: Vocabulary) -> dict[str, tuple[int, int]]:
    """Score and id of each token that a text can be cut into."""
    scored, scores = {}, vocabulary.scores.tolist()
    for token, text in enumerate(vocabulary.tokens):
        score = scores[token] * _SCALE
        whole = math.floor(score + 0.5) if score > 0 else math.ceil(score - 0.5)
        if vocabulary.types[token] in _REACHABLE and whole > _LEAST:
            scored[text] = whole, token
    return scored


_WORD_CHARACTERS = 100
"""A longer word is unknown, as in BERT's own tokenizer."""


def wordpiece_encoder(
    vocabulary: Vocabulary, whole: str | None = None
) -> Callable[[str], list[int]]:
    """BERT's WordPiece, through Hugging Face's `tokenizers`: a function from text to ids.

    A text is cut into words, at punctuation and around Chinese characters, and a word into the
    longest tokens, from its start on. Files have a space before tokens that begin a word, and
    nothing before the others, where BERT has nothing and `##`. The function yields no control token
    for any text but the unknown token, for a word that can't be cut.

    Raises:
        ModelFileError: there is no unknown token.
    """
    from tokenizers import Tokenizer as FastTokenizer
    from tokenizers.models import WordPiece
    from tokenizers.normalizers import BertNormalizer
    from tokenizers.pre_tokenizers import BertPreTokenizer

    unk_id, normalizer = vocabulary.unk_id, vocabulary.normalizer
    if unk_id is None:
        raise ModelFileError("the tokenizer is malformed: it has no unknown token")
    assert normalizer is not None
    going_on, unknown = "##", "[UNK]"
    ids = {unknown: unk_id}
    for text, token in _reachable(vocabulary, vocabulary.tokens.ids).items():
        name = text.removeprefix(SPACE) if text.startswith(SPACE) else going_on + text
        if name and not text.startswith(SPACE + going_on):
            ids.setdefault(name, token)
    tokenizer = FastTokenizer(
        WordPiece(ids, unk_token=unknown, max_input_chars_per_word=_WORD_CHARACTERS)
    )
    tokenizer.normalizer = BertNormalizer(
        lowercase=normalizer.lowercase, strip_accents=normalizer.strip_accents
    )
    tokenizer.pre_tokenizer = BertPreTokenizer()
    return _plain_encoder(tokenizer)


def _plain_encoder(tokenizer: FastTokenizer) -> Callable[[str], list[int]]:
    def encode(text: str) -> list[int]:
        if len(text) < LONG:
            found: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        else:
            found = tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return found

    return encode


_NO_CHARACTER = "\U0010ffff"


_AT_ONCE = 4096
"""Units of a map of characters that are looked at together."""


def check_charsmap(data: bytes) -> None:
    """Refuse a map of characters in which `tokenizers` would read what is not there.

    SentencePiece's `precompiled_charsmap` is the size of a double array (Darts-clone), its units of
    four bytes, and the texts that characters become, each with a zero after it. From each unit that
    can be reached 256 others are looked at, and some tell where a text begins.

    Raises:
        ModelFileError: it is damaged.
    """
    import numpy as np

    size = int.from_bytes(data[:4], "little")
    texts = np.frombuffer(data[4 + size :], np.uint8)
    damaged = ModelFileError("the tokenizer is malformed: its map of characters is damaged")
    if size % 4 or 4 + size > len(data) or not size or not len(texts) or texts[-1]:
        raise damaged
    units = np.frombuffer(data[4 : 4 + size], "<u4").astype(np.int64)
    bases = np.arange(len(units)) ^ ((units >> 10) << ((units & (1 << 9)) >> 6))
    letters = np.arange(1, 256)
    is_known = np.zeros(len(units), bool)
    is_known[0] = True
    waiting = [np.zeros(1, np.int64)]
    while waiting:
        reached = waiting.pop()
        reached, rest = reached[:_AT_ONCE], reached[_AT_ONCE:]
        if len(rest):
            waiting.append(rest)
        base = bases[reached]
        if (base | 255).max() >= len(units):
            raise damaged
        begins = units[base[(units[reached] >> 8 & 1) == 1]] & 0x7FFFFFFF
        if len(begins) and (begins.max() >= len(texts) or (texts[begins] >> 6 == 2).any()):
            raise damaged
        after = base[:, None] ^ letters
        found = after[(units[after] & (1 << 31 | 0xFF)) == letters]
        found = np.unique(found[~is_known[found]])
        is_known[found] = True
        if len(found):
            waiting.append(found)


def unigram_encoder(vocabulary: Vocabulary, whole: str | None = None) -> Callable[[str], list[int]]:
    """SentencePiece's unigrams, through Hugging Face's `tokenizers`: a function from text to ids.

    Of all ways to cut a word it takes the one whose scores have the largest sum (T. Kudo,
    https://arxiv.org/abs/1804.10959). The function yields no control token for any text but the
    unknown token.

    Raises:
        ModelFileError: there is no unknown token, or the map of characters is damaged.
    """
    from tokenizers import Tokenizer as FastTokenizer
    from tokenizers.models import Unigram
    from tokenizers.normalizers import Precompiled
    from tokenizers.pre_tokenizers import Metaspace, Sequence, WhitespaceSplit

    unk_id, normalizer, types = vocabulary.unk_id, vocabulary.normalizer, vocabulary.types
    if unk_id is None:
        raise ModelFileError("the tokenizer is malformed: it has no unknown token")
    assert normalizer is not None
    scored = [
        (text if types[token] in _REACHABLE else f"{_NO_CHARACTER}{token}", score)
        for token, (text, score) in enumerate(
            zip(vocabulary.tokens, vocabulary.scores.tolist(), strict=True)
        )
    ]
    if normalizer.charsmap:
        check_charsmap(normalizer.charsmap)
    try:
        tokenizer = FastTokenizer(Unigram(scored, unk_id, False))
        if normalizer.charsmap:
            tokenizer.normalizer = Precompiled(normalizer.charsmap)
    except Exception as error:  # the library raises nothing more precise
        raise ModelFileError(
            f"the tokenizer is malformed: {' '.join(str(error).split())}"
        ) from None
    if normalizer.merge_spaces:
        steps = [WhitespaceSplit(), Metaspace(replacement=SPACE, prepend_scheme="always")]
    else:
        steps = [Metaspace(replacement=SPACE, prepend_scheme="never")]
    tokenizer.pre_tokenizer = Sequence(steps)
    encode = _plain_encoder(tokenizer)

    def encode_text(text: str) -> list[int]:
        return encode(text.replace(_NO_CHARACTER, "\ufffd"))

    return encode_text


_ENCODERS: Final[dict[str, Callable[[Vocabulary, str | None], Callable[[str], list[int]]]]] = {
    "spm": spm_encoder,
    "bpe": bpe_encoder,
    "plamo": plamo_encoder,
    "wordpiece": wordpiece_encoder,
    "unigram": unigram_encoder,
}
