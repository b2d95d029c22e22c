"""Files of the logits that caches are compared with, so that a base need not be evaluated again.

A file is a NumPy archive (.npz, not compressed): `facts`, a string of JSON (`BaseFacts`); `tokens`,
int32 [chunks, n_ctx]; and for each chunk `logits_<number>`, float32 [scored tokens, n_vocab]. The
logits are those that the model gave, so divergences are the same as without the file. llama.cpp
keeps 16-bit codes of log-probabilities, half the size, and none more than 16 below the largest. The
error of such a code is no longer small beside the cost of a cache type such as q8_0.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import zipfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from io import BytesIO
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localkv.errors import LocalKVError, UsageError, byte_size, printable

Logits = NDArray[np.float32]
Chunks = Sequence[Sequence[int]]

FORMAT = 1
LLAMA_CPP_MAGIC = b"_logits_"


@dataclass(frozen=True)
class BaseFacts:
    """Where the logits of a base come from.

    Attributes:
        model: its name, for people: a base may well be of other weights.
        type_k, type_v, kv_rotation: the cache.
        n_ctx: tokens of a chunk.
        n_vocab: logits of a token.
        vocabulary: `vocabulary_hash` of the tokens they are for.
    """

    model: str
    type_k: str
    type_v: str
    kv_rotation: str
    n_ctx: int
    n_vocab: int
    vocabulary: str
    format: int = FORMAT


def vocabulary_hash(tokens: Sequence[str]) -> str:
    """A hash that is equal for vocabularies with equal tokens in the same order."""
    return hashlib.sha256("\0".join(tokens).encode()).hexdigest()


class BaseWriter:
    """Writes a base chunk by chunk. The file appears under its name when the last one is in it.

    Args:
        path: the file; an older one is replaced at the end.
        facts: where the logits come from.
        chunks: the token ids of all chunks.
        n_scored: rows of logits of a chunk.

    Raises:
        UsageError: the disk has too little room.
    """

    def __init__(self, path: str, facts: BaseFacts, chunks: Chunks, n_scored: int) -> None:
        self._path = Path(path)
        self._part = self._path.with_name(self._path.name + ".part")
        self._n_chunks = len(chunks)
        self._n_written = 0
        n_bytes = 4 * len(chunks) * n_scored * facts.n_vocab
        free = shutil.disk_usage(self._path.parent).free
        if n_bytes > free:
            raise UsageError(
                f"a base of {len(chunks)} chunks takes {byte_size(n_bytes)}, "
                f"but {printable(self._path.parent)} has {byte_size(free)} left",
                hint="use fewer chunks (--chunks)",
            )
        self._archive = zipfile.ZipFile(self._part, "w", allowZip64=True)
        self._add("facts", np.array(json.dumps(asdict(facts))))
        self._add("tokens", np.array(chunks, np.int32))

    def _add(self, name: str, values: NDArray[np.generic]) -> None:
        try:
            with self._archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, values, allow_pickle=False)
        except OSError as error:
            raise self._given_up(error) from error

    def _given_up(self, error: OSError) -> OSError:
        """The error with the file's name; the written part is deleted."""
        with suppress(OSError, ValueError):
            self._archive.close()
        self._part.unlink(missing_ok=True)
        return OSError(error.errno, error.strerror, str(self._path))

    def write(self, logits: Logits) -> None:
        """The next chunk's: [n_scored, n_vocab]."""
        self._add(f"logits_{self._n_written}", logits)
        self._n_written += 1

    def __enter__(self) -> BaseWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        """An interrupted base is no base."""
        complete = kind is None and self._n_written == self._n_chunks
        try:
            try:
                self._archive.close()
            except OSError as failed:
                raise self._given_up(failed) from failed
            if complete:
                os.replace(self._part, self._path)
        finally:
            self._part.unlink(missing_ok=True)


class BaseFile:
    """A base that was written before; logits are read when they are asked for.

    Raises:
        UsageError: there is no such file.
        LocalKVError: it is no base, or a damaged one.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            with open(path, "rb") as file:
                if file.read(len(LLAMA_CPP_MAGIC)) == LLAMA_CPP_MAGIC:
                    raise LocalKVError(
                        f"the base {printable(path)} is llama-perplexity's, whose log-probabilities"
                        " are rounded too much to compare cache types with",
                        hint="--save-base FILE writes one that is exact",
                    )
        except OSError as error:
            raise UsageError(f"the base {printable(path)}: {error.strerror or error}") from None
        try:
            facts = json.loads(str(self._read("facts")))
            if facts["format"] != FORMAT:
                raise ValueError("another version")
            self.facts = BaseFacts(**facts)
        except (ValueError, KeyError, TypeError):
            raise self._damaged() from None
        self.tokens: NDArray[np.int32] = self._read("tokens")

    def _damaged(self) -> LocalKVError:
        return LocalKVError(
            f"the base {printable(self.path)} is not a complete file of --save-base"
        )

    def _read(self, name: str) -> NDArray[Any]:
        """An array. What its header declares is first compared with the bytes that the file has.

        Raises:
            LocalKVError: it is not there, or not as a base has it.
        """
        try:
            with zipfile.ZipFile(self.path) as archive:
                entry = archive.getinfo(f"{name}.npy")
                n_bytes = os.stat(self.path).st_size
                if entry.compress_type != zipfile.ZIP_STORED or entry.file_size > n_bytes:
                    raise self._damaged()
                data = archive.read(entry)
            file = BytesIO(data)
            if np.lib.format.read_magic(file) != (1, 0):
                raise self._damaged()
            shape, fortran, dtype = np.lib.format.read_array_header_1_0(file)
            start = file.tell()
            if fortran or dtype.hasobject or prod(shape) * dtype.itemsize != len(data) - start:
                raise self._damaged()
            return np.frombuffer(data, dtype, offset=start).reshape(shape)
        except (ValueError, KeyError, EOFError, RuntimeError, zipfile.BadZipFile):
            raise self._damaged() from None

    def check(self, n_ctx: int, n_vocab: int, vocabulary: str, chunks: Chunks) -> None:
        """Refuse a base that says nothing about these chunks.

        Args:
            n_ctx: tokens of a chunk.
            n_vocab: logits of a token.
            vocabulary: `vocabulary_hash` of the model's tokens.
            chunks: the chunks to measure; the base may have more after them.

        Raises:
            UsageError: it was made with another context, vocabulary or text, or is too short.
        """
        base, facts = f"the base {printable(self.path)}", self.facts
        if facts.n_ctx != n_ctx:
            raise UsageError(
                f"{base} was made with a context of {facts.n_ctx} tokens, not {n_ctx}",
                hint=f"use -c {facts.n_ctx}",
            )
        if (facts.n_vocab, facts.vocabulary) != (n_vocab, vocabulary):
            raise UsageError(
                f"{base} was made with another vocabulary, that of {printable(facts.model)}"
            )
        n = min(len(chunks), len(self.tokens))
        if not np.array_equal(self.tokens[:n], np.array(chunks[:n], np.int32)):
            raise UsageError(f"{base} was made from another text")
        if n < len(chunks):
            raise UsageError(
                f"{base} has {n} chunks, but the text has {len(chunks)}", hint=f"use --chunks {n}"
            )

    def logits(self, number: int) -> Logits:
        """The logits of a chunk: float32 [scored tokens, n_vocab]."""
        return self._read(f"logits_{number}")
