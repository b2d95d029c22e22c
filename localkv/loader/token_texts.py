"""The texts of a vocabulary: found and read where they are in the file, few at a time.

A vocabulary has up to 262,144 texts, and a short prompt needs some hundred of them. So a text
becomes a Python string when it is asked for. Texts are found by a hash of 20 bits of their length
and their first bytes, which NumPy computes for all tokens at once; what has the hash is compared.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from functools import cached_property

import numpy as np
import numpy.typing as npt

from localkv.loader.gguf_header import Strings

_WORD = 8
_LONGER = _WORD + 1
"""The length that longer texts have in a hash."""
_MASKS = np.array([(1 << 8 * min(n, _WORD)) - 1 for n in range(_LONGER + 1)], np.uint64)
_OF_LENGTHS = np.arange(_LONGER + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
_FACTOR = np.uint64(0xBF58476D1CE4E5B9)
_HASH_BITS = 20
_SHIFT = np.uint64(64 - _HASH_BITS)


def _words(data: bytes) -> npt.NDArray[np.uint64]:
    """The eight bytes from each byte and from the end on, zeros after it: uint64 [bytes + 1]."""
    return np.ndarray((len(data) + 1,), "<u8", data + bytes(_WORD), strides=(1,))


def _hashes(
    words: npt.NDArray[np.uint64], lengths: npt.NDArray[np.int32] | int
) -> npt.NDArray[np.uint32]:
    """Hashes of texts by their first eight bytes and their lengths: uint32 [n]."""
    n = np.minimum(lengths, _LONGER)
    mixed = ((words & _MASKS[n]) ^ _OF_LENGTHS[n]) * _FACTOR
    return (mixed >> _SHIFT).astype(np.uint32)


def spread(strings: Strings, sizes: npt.NDArray[np.int32], at: int = 0) -> npt.NDArray[np.uint8]:
    """The texts one after another, each at byte `at` of as many bytes as it has room for.

    The other bytes are of any value.
    """
    ends = np.cumsum(sizes, dtype=np.int32)
    places = np.repeat(strings.starts - (ends - sizes) - at, sizes)
    places += np.arange(len(places), dtype=np.int32)
    data = np.frombuffer(strings.data, np.uint8)
    return data.take(places, mode="clip")


class _Hashes:
    """Hashes of many texts, which find the texts that may be a part of another text."""

    def __init__(self, words: npt.NDArray[np.uint64], lengths: npt.NDArray[np.int32]) -> None:
        self._hashes = _hashes(words, lengths)
        self._lengths = lengths

    def equal(self, data: bytes) -> list[int]:
        """Where this text may be."""
        one = _hashes(_words(data)[:1], len(data))
        where: list[int] = np.flatnonzero(
            (self._hashes == one) & (self._lengths == len(data))
        ).tolist()
        return where

    def among(self, texts: Iterable[bytes]) -> list[int]:
        """Where one of these texts may be."""
        pairs = [(int.from_bytes(data[:_WORD], "little"), len(data)) for data in texts]
        words, lengths = np.array(pairs, np.uint64).reshape(-1, 2).T
        return self._selected(_hashes(words, lengths.astype(np.int32)))

    def within(self, data: bytes) -> list[int]:
        """Where parts of this text may be."""
        words = _words(data)
        return self._selected(np.concatenate([_hashes(words, n) for n in range(1, _LONGER + 1)]))

    def _selected(self, hashes: npt.NDArray[np.uint32]) -> list[int]:
        is_wanted = np.zeros(1 << _HASH_BITS, bool)
        is_wanted[hashes] = True
        where: list[int] = np.flatnonzero(is_wanted[self._hashes]).tolist()
        return where


_MOST_READ = 4096
"""Texts that are read one by one, before all are."""
_MOST_FOUND = 256
"""Texts that are searched for one by one, before there is a dictionary of all."""


class TokenTexts:
    """The text of each token, and the token of each text: the first where a text is there twice.

    A token whose text is empty is called `[EMPTY_id]`.

    Attributes:
        strings: the texts in the file, empty ones too.
    """

    def __init__(self, strings: Strings) -> None:
        self.strings = strings
        self._found: dict[str, int | None] = {}
        self._n_read = 0

    def __len__(self) -> int:
        return len(self.strings)

    def __getitem__(self, token: int) -> str:
        self._n_read += 1
        if self._n_read > _MOST_READ:
            return self.every[token]
        return self.strings.text(token) or f"[EMPTY_{token}]"

    def some(self, tokens: Iterable[int]) -> list[str]:
        """The texts of these tokens."""
        text = self.strings.text
        return [text(token) or f"[EMPTY_{token}]" for token in tokens]

    def __iter__(self) -> Iterator[str]:
        return iter(self.every)

    @staticmethod
    def can_find(text: str) -> bool:
        """Whether a text is found by its bytes: no other bytes in a file read as the same.

        U+FFFD is read for bytes that are no UTF-8, and empty tokens have names.
        """
        if not text or "\ufffd" in text or "[EMPTY_" in text:
            return False
        return text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)

    @cached_property
    def every(self) -> list[str]:
        """All texts."""
        return [text or f"[EMPTY_{i}]" for i, text in enumerate(self.strings.texts())]

    @cached_property
    def ids(self) -> dict[str, int]:
        """The token of each text."""
        every = self.every
        return dict(zip(reversed(every), range(len(every) - 1, -1, -1), strict=True))

    def find(self, text: str) -> int | None:
        """The token of a text, None if there is none."""
        if len(self._found) >= _MOST_FOUND or not self.can_find(text):
            return self.ids.get(text)
        if text not in self._found:
            data = text.encode()
            equal = self._hashes.equal(data)
            self._found[text] = next((i for i in equal if self.strings.raw(i) == data), None)
        return self._found[text]

    def find_all(self, texts: Collection[str]) -> dict[str, int]:
        """The tokens of texts, as far as there are some. All must be texts that it `can_find`."""
        wanted = {text.encode(): text for text in texts}
        places = [(i, self.strings.raw(i)) for i in self._hashes.among(wanted)]
        return {wanted[data]: i for i, data in reversed(places) if data in wanted}

    def within(self, text: str) -> list[int]:
        """The tokens whose texts are parts of a text, one that it `can_find`."""
        data, strings = text.encode(), self.strings
        return [i for i in self._hashes.within(data) if strings.raw(i) in data]

    @cached_property
    def _hashes(self) -> _Hashes:
        strings = self.strings
        return _Hashes(_words(strings.data)[strings.starts], strings.ends - strings.starts)

    def are_plain(self) -> bool:
        """Whether no text is there twice, is empty, has a NUL, or has bytes that are no UTF-8."""
        strings = self.strings
        lengths = strings.ends - strings.starts
        joined = spread(strings, lengths + 1)
        joined[np.cumsum(lengths + 1) - 1] = 0
        try:
            joined.tobytes().decode()
        except UnicodeDecodeError:
            return False
        if lengths.min() == 0 or np.count_nonzero(joined == 0) > len(lengths):
            return False
        words, hashes = _words(strings.data), np.zeros(len(lengths), np.uint64)
        for at in range(0, int(lengths.max()), _WORD):
            left = np.flatnonzero(lengths > at)
            part = words[strings.starts[left] + at] & _MASKS[np.minimum(lengths[left] - at, _WORD)]
            mixed = (hashes[left] ^ part) * _FACTOR
            hashes[left] = mixed ^ mixed >> np.uint64(32)
        hashes = np.sort(hashes ^ lengths.astype(np.uint64) * _OF_LENGTHS[1])
        return not (hashes[1:] == hashes[:-1]).any()


class MergeTexts:
    """The merges of a BPE, best first: "left right" each."""

    def __init__(self, strings: Strings) -> None:
        self.strings = strings

    def every(self) -> list[tuple[str, str]]:
        """All merges."""
        return _pairs(self.strings.texts())

    def within(self, text: str) -> list[tuple[str, str]]:
        """The merges whose results may be parts of a text, one that `can_find`; and others."""
        at, hashes = self._joined
        return _pairs(map(self.strings.text, at[hashes.within(text.encode())].tolist()))

    @cached_property
    def _joined(self) -> tuple[npt.NDArray[np.intp], _Hashes]:
        """The merges that have two sides, and the hashes of these joined."""
        data, starts, ends = self.strings.data, self.strings.starts, self.strings.ends
        spaces = np.append(np.flatnonzero(np.frombuffer(data, np.uint8) == ord(" ")), len(data) + 1)
        spaces = spaces.astype(np.int32)[np.searchsorted(spaces, starts + 1)]
        at = np.flatnonzero(spaces < ends)
        starts, spaces, ends = starts[at], spaces[at], ends[at]
        words, lengths = _words(data), spaces - starts
        left, right = words[starts], words[spaces + 1]
        n = np.minimum(lengths, _WORD - 1).astype(np.uint64)
        joined = np.where(lengths < _WORD, left & _MASKS[n] | right << np.uint64(8) * n, left)
        return at, _Hashes(joined, ends - starts - 1)


def _pairs(merges: Iterable[str]) -> list[tuple[str, str]]:
    return [
        (merge[:space], merge[space + 1 :]) for merge in merges if (space := merge.find(" ", 1)) > 0
    ]
