"""Rows of texts on a disk: what leaves the cache's pages, found again by the next process.

A text is cut into blocks of a page's tokens, counted from its beginning; the last one may be
shorter. The rows of a block that lie in one page of a pool are a file, and so is each checkpoint of
recurrent layers. What texts have in common is thus written once, and a pool that has given pages
back lacks their rows only. A file never changes: what it holds depends on its tokens alone, those
before the block included.
Its address is made of hashes: of everything that rows depend on (the group of the folder), of the
tokens before the block, and of its own. Addresses are used to look for files and prove nothing. The
file names what its rows depend on, and has all tokens from the first on and a digest of each
tensor. All of that is compared before a row is used. A file that is damaged is removed.

The engine's thread copies pages, and a thread of its own writes them (`_Writer`), from a queue of
limited size. Rows are read by the engine's thread, in pieces, so that other texts' steps come
between them (`DiskReading`).
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakSet, finalize

import numpy as np
from numpy.typing import NDArray

from localkv.cache.kv_cache import KVCache
from localkv.cache.layout import PAGE_TOKENS, pages_for
from localkv.cache.pages import Checkpoint, PagePool
from localkv.cache.pages import Sequence as CachedSequence
from localkv.cache.row_copies import (
    HeldRows,
    PlaneRows,
    checkpoints_in,
    conv_out,
    empty_rows,
    memory_out,
    planes,
    take_pages,
)
from localkv.engine.disk_folder import DiskFolder
from localkv.engine.prefix import GENERATED, SALTED, KeptText, PrefixCache, n_common
from localkv.engine.state_file import (
    DIGEST,
    DIGESTS,
    DTYPES,
    IDS,
    KINDS,
    MOST_HEADER,
    StateTensor,
    adapters_of,
    bytes_of,
    cache_identity,
    in_parts,
    metadata_digest,
    new_digest,
    write_tensors,
)
from localkv.errors import UsageError

KIND, VERSION = "localkv rows", "1"
STATES = "states"
"""The part of an address that says what a file holds: this, or `_rows_part`."""

ROWS_PART = re.compile(r"rows([0-9]{1,4})p([0-9]{1,4})")

LEAST = 32
"""Tokens for which a file is neither written nor read."""
MOST_QUEUED = 256 << 20
"""Bytes of copies that wait to be written."""
MOST_SIBLINGS = 256
"""Files of one parent that are compared with a text."""
MOST_LEVELS = 256
"""Blocks, from the last one down, in which ends of other texts are looked for."""
MOST_LENGTHS = 16
"""Lengths of a text that are tried."""
MOST_PEEKED = 1024
"""Files whose tokens are remembered."""
MOST_TRIES = 8
"""Attempts to read a text; each one that fails leaves a file less to fail with."""
PAUSE = 60.0
"""Seconds in which nothing is written after the disk has refused something."""

Ids = NDArray[np.int64]
Origin = bytes
"""What texts must have in common, beside their tokens, to share rows across processes: whose they
are, or what else their rows depend on. Texts with a salt and without an origin are not kept."""


@dataclass
class DiskCounts:
    """What was read and written so far.

    Attributes:
        n_found: texts that went on with rows from the disk.
        n_tokens: tokens whose rows these were.
        bytes_read, bytes_written: of files.
        n_left_out: files that were not written, since the queue was full or the disk refused.
        n_damaged: files that were damaged, and removed.
    """

    n_found: int = 0
    n_tokens: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    n_left_out: int = 0
    n_damaged: int = 0


class _Source(NamedTuple):
    """A file that has rows of a text, or a checkpoint of it.

    Attributes:
        pool: index of the one that the rows are of; -1 for a checkpoint.
        span: of a block's rows, as `_spans` counts them.
        start: tokens before its block.
        end: tokens up to the last that it has in common with the text.
        file_end: tokens up to its last.
    """

    name: str
    pool: int
    span: int
    start: int
    end: int
    file_end: int


@dataclass(frozen=True)
class _Found:
    """How a text can go on.

    Attributes:
        length: tokens whose rows are there.
        held: the rows of each pool.
        sources: the files to read, in the order of their blocks.
    """

    length: int
    held: list[HeldRows]
    sources: list[_Source]


@dataclass(frozen=True)
class _Piece:
    """A file to be written.

    Attributes:
        ids: int64 [tokens], `marked`, from the first token on.
        start: tokens before its block.
        tensors: without the tokens.
    """

    name: str
    ids: Ids
    start: int
    metadata: Mapping[str, str]
    tensors: list[StateTensor]

    @property
    def n_bytes(self) -> int:
        return sum(tensor.n_bytes for tensor in self.tensors)


class _Files:
    """The files of one group of a folder, for threads that don't know the cache.

    Args:
        folder: where they are.
        group: of all texts whose rows depend on the same things.
        counts: has what was written.
    """

    def __init__(self, folder: DiskFolder, group: str, counts: DiskCounts) -> None:
        self.folder, self._group, self._counts = folder, group, counts
        self._peeked = OrderedDict[str, Ids | None]()
        self._peeking = threading.Lock()

    def path_of(self, name: str) -> str:
        """Where a file is, or would be."""
        return self.folder.path_of(self._group, name)

    def children(self, parent: str, part: str = "") -> Iterator[tuple[str, Ids]]:
        """Yield the files of a parent, those used last first, with their `peek`.

        Args:
            part: only those whose address ends so.
        """
        for name in self.folder.children(self._group, parent)[:MOST_SIBLINGS]:
            ids = self.peek(name) if name.endswith(part) else None
            if ids is not None:
                yield name, ids

    def peek(self, name: str) -> Ids | None:
        """The tokens of a file's block, `marked`, as it says without proof; None if it can't be
        read."""
        with self._peeking:
            if name in self._peeked:
                self._peeked.move_to_end(name)
                return self._peeked[name]
        found: Ids | None = None
        with suppress(OSError, ValueError, KeyError, TypeError, IndexError, RecursionError):
            path = self.path_of(name)
            with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
                n_header = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(min(n_header, MOST_HEADER)))
                n = int(header[IDS]["shape"][0])
                start = (n - 1) // PAGE_TOKENS * PAGE_TOKENS
                if not 0 < n <= 1 << 31 or header[KINDS]["data_offsets"] != [4 * n, 5 * n]:
                    return None
                file.seek(8 + n_header + 4 * start)
                ids = np.frombuffer(file.read(4 * (n - start)), "<i4")
                file.seek(8 + n_header + 4 * n + start)
                kinds = np.frombuffer(file.read(n - start), np.uint8)
                found = ids.astype(np.int64) + (kinds > 0) * GENERATED
        if found is not None:
            with self._peeking:
                self._peeked[name] = found
                while len(self._peeked) > MOST_PEEKED:
                    self._peeked.popitem(last=False)
        return found

    def is_covered(self, name: str, plain: Ids, end: int) -> bool:
        """Whether a longer file has all rows that one would have."""
        parent, part = name[:32], name.partition(".")[2]
        block = plain[(end - 1) // PAGE_TOKENS * PAGE_TOKENS : end]
        others = self.children(parent, f".{part}")
        return any(n_common(theirs, block) == len(block) for _, theirs in others)

    def write(self, piece: _Piece) -> None:
        """Write a file, and remove shorter ones whose rows it has, too; raises OSError."""
        ids = piece.ids
        tensors = [
            StateTensor(IDS, "I32", (len(ids),), in_parts((ids % GENERATED).astype(np.int32))),
            StateTensor(KINDS, "U8", (len(ids),), in_parts((ids >= GENERATED).astype(np.uint8))),
            *piece.tensors,
        ]
        size = bytes_of(piece.metadata, tensors)
        written = self.folder.write(
            self._group, piece.name, size, lambda file: write_tensors(file, piece.metadata, tensors)
        )
        self._counts.bytes_written += written
        if not written or piece.metadata["part"] == STATES:
            return
        block, part = ids[piece.start :], piece.name.partition(".")[2]
        for other, theirs in self.children(piece.name[:32], f".{part}"):
            if len(theirs) == n_common(theirs, block) < len(block):
                self.remove(other)

    def remove(self, name: str) -> None:
        """Remove a file, if it is still there."""
        self.forget(name)
        self.folder.remove(self.path_of(name))

    def forget(self, name: str) -> None:
        """Forget the tokens of a file that is gone."""
        with self._peeking:
            self._peeked.pop(name, None)


class DiskCache:
    """Keeps rows of a cache's texts in a folder.

    Everything but `counts`, `n_queued` and `flush` is to be called in a turn of the model's.

    Args:
        folder: where files are; other processes may use it.
        cache: whose rows they are.
        identity: what rows of a text depend on beside the cache.
        exact: as `PrefixCache` has it.
        on_problem: told once, by the thread that writes, that the disk refuses to take files.

    Attributes:
        counts: what was read and written.

    Raises:
        UsageError: rows of this cache can't be kept.
    """

    def __init__(
        self,
        folder: DiskFolder,
        cache: KVCache,
        identity: Mapping[str, str],
        *,
        exact: bool,
        on_problem: Callable[[str], None] = lambda line: None,
    ) -> None:
        if not cache.pools and not cache.states:
            raise UsageError("--cache-disk: this model keeps no rows of its texts")
        self.folder, self.cache, self.exact = folder, cache, exact
        self.counts = DiskCounts()
        self._metadata = {
            "kind": KIND,
            "version": VERSION,
            **identity,
            **cache_identity(cache),
            "adapters": adapters_of(cache, cache.scales),
            "exact": str(exact),
            "states": json.dumps([[repr(layer.state)] for layer in cache.states.specs]),
        }
        group = _digest(metadata_digest(self._metadata).encode()).hex()
        self._files = _Files(folder, group, self.counts)
        self._planes = dict[int, list[PlaneRows]]()
        for plane in planes(cache):
            self._planes.setdefault(plane.pool, []).append(plane)
        self._origins: dict[int, Origin] = {0: b""}
        self._saved = WeakSet[KeptText]()
        self._writer = _Writer(self._files.write, on_problem, self.counts)
        finalize(self, self._writer.end)  # its thread does not know us

    def close(self, seconds: float) -> None:
        """Write what waits, for some seconds at most, and let go of the cache."""
        self.flush(seconds)
        self._writer.close()
        self._planes = {}
        del self.cache

    def know(self, salt: int, origin: Origin) -> None:
        """Note what texts of a salt have in common."""
        if salt and origin:
            self._origins[salt] = origin

    # addresses

    def plain(self, ids: Ids) -> Ids:
        """A text's tokens as files have them."""
        plain = ids % SALTED
        return plain if self.exact else plain & ~GENERATED

    def origin_of(self, ids: Ids) -> Origin | None:
        """What a text, `marked`, shares with others; None if it can't be kept."""
        return self._origins.get(int(ids[0]) // SALTED) if len(ids) else None

    @staticmethod
    def _keys(plain: Ids, origin: Origin) -> list[bytes]:
        """The addresses of a text's whole blocks: of none, of the first, of the first two, ..."""
        keys = [_digest(origin)]
        for end in range(PAGE_TOKENS, len(plain) + 1, PAGE_TOKENS):
            keys.append(_digest(keys[-1] + plain[end - PAGE_TOKENS : end].tobytes()))
        return keys

    @staticmethod
    def _name(keys: Sequence[bytes], plain: Ids, end: int, part: str) -> str:
        """The address of a file of the block in which the first `end` tokens end."""
        number = (end - 1) // PAGE_TOKENS
        own = _digest(keys[number] + plain[number * PAGE_TOKENS : end].tobytes())
        return f"{keys[number].hex()}-{own.hex()}.{part}"

    def _has(self, name: str) -> bool:
        return os.path.exists(self._files.path_of(name)) or self._writer.has(name)

    # writing

    def offer(self, text: KeptText) -> bool:
        """Have a text's rows written that are not on the disk yet.

        Returns:
            whether all of them are there, or wait to be written; False if the queue is full, or the
            disk has refused to take files.
        """
        if self._writer.has_dropped:
            self._writer.has_dropped = False
            self._saved.clear()
        if text in self._saved:
            return True
        if self._writer.is_paused:
            return False
        for piece in self._missing(text.sequence, text.ids):
            if not self._writer.put(piece):
                return False
        self._saved.add(text)
        return True

    def leave(self, text: KeptText) -> None:
        """A text leaves the cache."""
        if not self.offer(text):
            self.counts.n_left_out += 1

    def save_some(self, texts: Sequence[KeptText]) -> bool:
        """Have the first text written that is not yet; whether there may be further ones."""
        if self._writer.is_paused:
            return False
        text = next((text for text in texts if text not in self._saved), None)
        if text is not None:
            self.offer(text)
        return text is not None

    def save_all(self, texts: Sequence[KeptText], seconds: float) -> None:
        """Have all texts written, the last ones first, for some seconds at most."""
        end = time.monotonic() + seconds
        for text in reversed(texts):
            while not self.offer(text):
                if self._writer.is_paused or time.monotonic() > end:
                    return
                self._writer.wait(0.05)

    def tell(self, on_problem: Callable[[str], None]) -> None:
        """Tell somebody else once that the disk refuses to take files."""
        self._writer.on_problem = on_problem

    @property
    def n_queued(self) -> int:
        """Bytes that wait to be written."""
        return self._writer.n_bytes

    def flush(self, seconds: float) -> bool:
        """Wait until all is written that was offered, for some seconds at most; whether it is."""
        end = time.monotonic() + seconds
        while self._writer.n_bytes and (left := end - time.monotonic()) > 0:
            self._writer.wait(left)
        return not self._writer.n_bytes

    def _missing(self, sequence: CachedSequence, ids: Ids) -> Iterator[_Piece]:
        """The files of a text that are not there."""
        ids = ids[: sequence.length]
        origin = self.origin_of(ids)
        if origin is None or len(ids) < LEAST:
            return
        plain = self.plain(ids)
        keys, metadata = self._keys(plain, origin), self._metadata_of(origin)
        for start in range(0, len(plain), PAGE_TOKENS):
            end = min(len(plain), start + PAGE_TOKENS)
            for pool in self.cache.pools:
                for span, first, last in _spans(pool, start, end):
                    if not _has_rows(pool, sequence, first):
                        continue
                    part = _rows_part(pool.index, span)
                    name = self._name(keys, plain, end, part)
                    if self._has(name) or (
                        end % PAGE_TOKENS and self._files.is_covered(name, plain, end)
                    ):
                        continue
                    tensors = [
                        self._copied(sequence, plane, first, last)
                        for plane in self._planes[pool.index]
                    ]
                    yield _Piece(name, plain[:end], start, {**metadata, "part": part}, tensors)
        for item in sequence.kept:
            if LEAST <= item.length <= len(plain) and not item.is_mark:
                name = self._name(keys, plain, item.length, STATES)
                if not self._has(name):
                    start = (item.length - 1) // PAGE_TOKENS * PAGE_TOKENS
                    facts = {**metadata, "part": STATES}
                    tensors = self._states(item)
                    yield _Piece(name, plain[: item.length], start, facts, tensors)

    def _metadata_of(self, origin: Origin) -> dict[str, str]:
        return {**self._metadata, "origin": origin.hex()}

    def _copied(
        self, sequence: CachedSequence, plane: PlaneRows, first: int, last: int
    ) -> StateTensor:
        """The rows of a plane from `first` to `last`, out of pages that are copied now."""
        pool = self.cache.pools[plane.pool]
        place = first // PAGE_TOKENS
        ids = sequence.pages[plane.pool][place : pages_for(last)]
        at = place * PAGE_TOKENS
        pages = plane.pages[ids]
        is_ours = isinstance(pages, np.ndarray)
        rows_of_pages = partial(plane.arrays.rows_of_pages, plane.fmt, plane.side, plane.number)
        found = pages if is_ours else rows_of_pages(pages)  # a GPU's go to the host now

        def rows() -> Iterator[NDArray[Any]]:
            ordered = rows_of_pages(found) if is_ours else found
            flat = ordered.swapaxes(1, 2).reshape(-1, *plane.row_shape)[first - at : last - at]
            empty = empty_rows(pool)
            if first < empty.stop and empty.start < last:
                flat = flat.copy()
                flat[max(0, empty.start - first) : empty.stop - first] = 0
            yield flat

        return StateTensor(plane.name, "U8", (last - first, *plane.row_shape), rows)

    def _states(self, item: Checkpoint) -> list[StateTensor]:
        """The states of a checkpoint, which nobody changes."""
        tensors = list[StateTensor]()
        for i, state in self.cache.states.layers.items():
            rows = conv_out(state, [item])
            tensors.append(StateTensor(f"layers.{i}.state.rows", "F32", rows.shape, in_parts(rows)))
            if state.memory is not None:
                memory = memory_out(self.cache.arrays_of(i), state, [item])
                name = f"layers.{i}.state.memory"
                tensors.append(StateTensor(name, "F32", memory.shape, in_parts(memory)))
        return tensors

    # reading

    def find(self, ids: Ids, n_found: int) -> _Found | None:
        """How a text can go on with rows from the disk.

        Args:
            ids: int64 [tokens], `marked`, without the last token, which has to be evaluated.
            n_found: tokens whose rows are in the cache.

        Returns:
            None if that would not spare `LEAST` tokens.
        """
        origin = self.origin_of(ids)
        if origin is None or len(ids) < n_found + LEAST:
            return None
        plain = self.plain(ids)
        search = _Search(self, plain, self._keys(plain, origin))
        best = max(search.lengths(n_found), key=lambda found: found.length, default=None)
        if best is None or best.length < n_found + LEAST:
            return None
        return best

    def opened(self, source: _Source, plain: Ids, origin: Origin) -> _RowsFile:
        """Read a file whose rows a text goes on with.

        Raises:
            OSError: it is gone, or can't be read.
            ValueError: it is damaged, or another one than its address says.
        """
        part = STATES if source.pool < 0 else _rows_part(source.pool, source.span)
        wanted: dict[str, tuple[str, tuple[int, ...]]] = {
            IDS: ("I32", (source.file_end,)),
            KINDS: ("U8", (source.file_end,)),
        }
        if source.pool < 0:
            for i, state in self.cache.states.layers.items():
                wanted[f"layers.{i}.state.rows"] = "F32", (1, *map(int, state.rows.shape[1:]))
                if state.memory is not None:
                    shape = 1, *map(int, state.memory.shape[1:])
                    wanted[f"layers.{i}.state.memory"] = "F32", shape
        else:
            pool = self.cache.pools[source.pool]
            first, last = _rows_of(pool, source._replace(end=source.file_end))
            n_rows = max(0, last - first)
            for plane in self._planes[pool.index]:
                wanted[plane.name] = "U8", (n_rows, *plane.row_shape)
        file = _RowsFile(self._files.path_of(source.name), wanted)
        if file.metadata != {**self._metadata_of(origin), "part": part}:
            raise ValueError("other rows")
        ids = file.tensor(IDS).astype(np.int64) + (file.tensor(KINDS) > 0) * GENERATED
        if n_common(ids, plain) < source.end:
            raise ValueError("other tokens")
        self.counts.bytes_read += file.n_bytes
        return file

    def reading(self, prefixes: PrefixCache, ids: Ids, found: _Found) -> DiskReading:
        """Begin to read a text that was found, into a text that `prefixes` keeps."""
        return DiskReading(self, prefixes, ids, found)

    def is_damaged(self, source: _Source) -> None:
        """Remove a file."""
        self.counts.n_damaged += 1
        self._files.remove(source.name)

    def is_gone(self, source: _Source) -> None:
        """Forget a file that another process has removed."""
        self._files.forget(source.name)

    def used(self, sources: Sequence[_Source]) -> None:
        """Note that files were of use."""
        self.folder.use([self._files.path_of(one.name) for one in sources])

    @property
    def layers_of_states(self) -> list[tuple[int, bool]]:
        """Recurrent layers, and whether each has a memory."""
        return [(i, one.memory is not None) for i, one in self.cache.states.layers.items()]

    def planes_of(self, pool: int) -> list[PlaneRows]:
        """The planes that hold the rows of a pool."""
        return self._planes[pool]

    def whole_block(self, keys: Sequence[bytes], number: int) -> Iterator[_Source]:
        """The files of one of a text's whole blocks."""
        start, end = number * PAGE_TOKENS, (number + 1) * PAGE_TOKENS
        address = f"{keys[number].hex()}-{keys[number + 1].hex()}"
        for pool in self.cache.pools:
            for span, _, _ in _spans(pool, start, end):
                name = f"{address}.{_rows_part(pool.index, span)}"
                if os.path.exists(self._files.path_of(name)):
                    yield _Source(name, pool.index, span, start, end, end)

    def ends(self, keys: Sequence[bytes], plain: Ids, number: int) -> Iterator[_Source]:
        """Files of a block that have some leading tokens of it."""
        start = number * PAGE_TOKENS
        block = plain[start : start + PAGE_TOKENS]
        for name, theirs in self._files.children(keys[number].hex()):
            common, part = n_common(theirs, block), name.partition(".")[2]
            if not common:
                continue
            if part == STATES:
                if common == len(theirs):
                    yield _Source(name, -1, 0, start, start + common, start + common)
            elif (found := ROWS_PART.fullmatch(part)) and int(found[1]) in self._planes:
                places = int(found[1]), int(found[2])
                yield _Source(name, *places, start, start + common, start + len(theirs))


class _Search:
    """Looks for what the disk has of a text.

    Args:
        disk: whose files.
        plain: the text's tokens.
        keys: the addresses of its blocks.
    """

    def __init__(self, disk: DiskCache, plain: Ids, keys: list[bytes]) -> None:
        self._disk, self._plain, self._keys = disk, plain, keys
        self._pools = disk.cache.pools
        self._sources: list[dict[tuple[int, int], _Source]] = [{} for _ in self._pools]
        for number in range(len(keys) - 1):
            for source in disk.whole_block(keys, number):
                self._sources[source.pool][number, source.span] = source
        self._checkpoints = list[_Source]()

    def lengths(self, n_found: int) -> Iterator[_Found]:
        """Yield ways to go on, each with another number of tokens, more than `n_found`."""
        n_whole = self._n_whole()
        lowest = n_whole
        if self._disk.cache.states or any(_gives_back(pool) for pool in self._pools):
            lowest = max(n_found // PAGE_TOKENS, n_whole - MOST_LEVELS)
        lengths = {n_whole * PAGE_TOKENS}
        for number in range(n_whole, min(lowest, n_whole) - 1, -1):
            lengths |= self._add_ends(number)
        most = 0
        for length in sorted(lengths, reverse=True)[:MOST_LENGTHS]:
            if length <= max(most, n_found):
                break
            if (found := self._up_to(length)) is not None:
                most = max(most, found.length)
                yield found

    def _n_whole(self) -> int:
        """Leading blocks that are there of all pools that keep all rows."""
        number = len(self._keys) - 1
        for pool, of_pool in zip(self._pools, self._sources, strict=True):
            if _gives_back(pool):
                continue
            for i in range(number):
                spans = _spans(pool, i * PAGE_TOKENS, (i + 1) * PAGE_TOKENS)
                if any((i, span) not in of_pool for span, _, _ in spans):
                    number = i
                    break
        return number

    def _add_ends(self, number: int) -> set[int]:
        """Take in other texts' files of a block; the lengths that they have in common with this
        text."""
        lengths = set[int]()
        for source in self._disk.ends(self._keys, self._plain, number):
            lengths.add(source.end)
            if source.pool < 0:
                self._checkpoints.append(source)
                continue
            of_pool, place = self._sources[source.pool], (number, source.span)
            if place not in of_pool or source.end > of_pool[place].end:
                of_pool[place] = source
        return lengths

    def _up_to(self, length: int) -> _Found | None:
        """The most that the text can go on with, up to a length."""
        cache = self._disk.cache
        while length:
            held = [self._held(pool, length) for pool in self._pools]
            if any(set(rows.gone) & {*range(pool.kept)} for pool, rows in _both(self._pools, held)):
                return None  # of the sink, which all tokens need
            trial = CachedSequence(len(self._pools), length=0)
            trial.length, trial.n_stepped = length, -1
            trial.gone = [set(rows.gone) for rows in held]
            ends = sorted({one.end for one in self._checkpoints if one.end <= length})
            trial.kept = [Checkpoint(end, None) for end in ends]
            reached = cache.reachable(trial, length, exactly=self._disk.exact)
            if reached == length:
                return self._as_found(length, held)
            length = reached
        return None

    def _held(self, pool: PagePool, length: int) -> HeldRows:
        """The rows that files have of a pool, for a text of some tokens. Pages of a window that no
        token to come sees, nor one some tokens before, count as gone."""
        n_rows = pool.n_rows(length)
        there = np.zeros(n_rows, bool)
        for source in self._sources[pool.index].values():
            if source.start < length:
                first, last = _rows_of(pool, source._replace(end=min(source.end, length)))
                there[first : max(first, last)] = True
        needed = pool.first_place(max(0, length - PAGE_TOKENS))
        gone = tuple(
            place
            for place in range(pages_for(n_rows))
            if pool.kept <= place < needed
            or not there[place * PAGE_TOKENS : (place + 1) * PAGE_TOKENS].all()
        )
        return HeldRows(n_rows, gone)

    def _as_found(self, length: int, held: list[HeldRows]) -> _Found:
        sources = list[_Source]()
        for pool, rows in _both(self._pools, held):
            places = set(range(pages_for(rows.n_rows))) - set(rows.gone)
            for whole in self._sources[pool.index].values():
                source = whole._replace(end=min(whole.end, length))
                first, last = _rows_of(pool, source)
                if first < last and first // PAGE_TOKENS in places:
                    sources.append(source)
        known = dict[int, _Source]()
        for one in self._checkpoints:
            if one.end <= length:
                known[one.end] = one
        most = self._disk.cache.states.config.most
        sources += [known[end] for end in sorted(known)[-most:]] if most else []
        return _Found(length, held, sorted(sources, key=lambda one: (one.start, one.name)))


class DiskReading:
    """Reads rows of a text from the disk into the cache, piece by piece, as a text that is kept.

    Args:
        disk: has them.
        prefixes: of the same cache; takes the text.
        ids: int64 [tokens], `marked`, without the last token.
        found: what `DiskCache.find` said of it.
    """

    def __init__(self, disk: DiskCache, prefixes: PrefixCache, ids: Ids, found: _Found) -> None:
        self._disk, self._prefixes, self._ids = disk, prefixes, ids
        self._cache = disk.cache
        self._n_started_over = self._cache.n_started_over
        self._pieces = self._read(found)
        self.sequence: CachedSequence | None = None

    def go_on(self, seconds: float) -> bool:
        """Read for about some seconds; whether it is done, with success or without."""
        if self._cache.n_started_over != self._n_started_over:
            self.sequence = None  # it has no pages any more
            return True
        end = time.perf_counter() + seconds
        return all(time.perf_counter() < end for _ in self._pieces)

    def give_up(self) -> None:
        """Nobody wants the text."""
        self._pieces.close()
        if self._cache.n_started_over == self._n_started_over:
            self._give_back()

    def _give_back(self) -> None:
        if self.sequence is not None:
            self.sequence.kept = []
            self._cache.cut_back(self.sequence, 0)
            self.sequence = None

    def _read(self, found: _Found | None) -> Generator[None]:
        """Read a text, or what is left of it if files are damaged or gone."""
        plain = self._disk.plain(self._ids)
        origin = self._disk.origin_of(self._ids)
        for _ in range(MOST_TRIES):
            if found is None or origin is None:
                return
            sequence = self.sequence = self._cache.new_sequence(stepped=False)
            sequence.length = sequence.checkpoint = found.length
            if not take_pages(self._cache, sequence, found.held):
                self._give_back()
                return
            self._clear_open_pages(sequence, found)
            states = dict[int, _RowsFile]()
            for source in found.sources:
                try:
                    file = self._disk.opened(source, plain, origin)
                    yield
                    if source.pool < 0:
                        for name in file.names:
                            file.tensor(name)
                        states[source.end] = file
                    else:
                        for plane in self._disk.planes_of(source.pool):
                            self._put(sequence, source, plane, file.tensor(plane.name))
                            yield
                except ValueError:
                    self._disk.is_damaged(source)
                    break
                except OSError:
                    self._disk.is_gone(source)
                    break
            else:
                self._put_states(sequence, states)
                self._keep(sequence, found)
                return
            self._give_back()
            yield
            found = self._disk.find(self._ids, 0)

    def _keep(self, sequence: CachedSequence, found: _Found) -> None:
        self.sequence = None
        self._prefixes.keep(sequence, self._ids[: found.length])
        self._disk.used(found.sources)
        self._disk.counts.n_found += 1
        self._disk.counts.n_tokens += found.length

    def _clear_open_pages(self, sequence: CachedSequence, found: _Found) -> None:
        """Make numbers of the pages that no single file fills."""
        filled = {
            (source.pool, place)
            for source in found.sources
            if source.pool >= 0
            if (place := self._filled(source)) is not None
        }
        for pool, rows in _both(self._cache.pools, found.held):
            gone = sequence.gone[pool.index]
            for place in range(pages_for(rows.n_rows)):
                if place not in gone and (pool.index, place) not in filled:
                    self._cache.clear_page(pool.index, sequence.pages[pool.index][place])

    def _filled(self, source: _Source) -> int | None:
        """The place of the page that a file has all rows of, if there is one."""
        first, last = _rows_of(self._cache.pools[source.pool], source)
        return first // PAGE_TOKENS if last - first == PAGE_TOKENS else None

    def _put(
        self, sequence: CachedSequence, source: _Source, plane: PlaneRows, rows: NDArray[np.uint8]
    ) -> None:
        """Put a file's rows of a plane into their page."""
        pool, arrays = self._cache.pools[source.pool], plane.arrays
        first, last = _rows_of(pool, source)
        place = first // PAGE_TOKENS
        if place in sequence.gone[pool.index]:
            return
        page, at = [sequence.pages[pool.index][place]], place * PAGE_TOKENS
        which = plane.fmt, plane.side, plane.number
        ordered = rows[None, : last - first].swapaxes(1, 2)
        if self._filled(source) is None:
            others = arrays.rows_of_pages(*which, plane.pages[page]).copy()
            others[:, :, first - at : last - at] = ordered
            ordered = others
        plane.pages[page] = arrays.pages_of_rows(*which, np.ascontiguousarray(ordered))

    def _put_states(self, sequence: CachedSequence, states: dict[int, _RowsFile]) -> None:
        if not states:
            return
        lengths = sorted(states)

        def joined(name: str) -> NDArray[np.float32]:
            return np.concatenate([states[length].tensor(name) for length in lengths])

        layers = self._disk.layers_of_states
        sequence.kept = checkpoints_in(
            self._cache,
            lengths,
            {i: joined(f"layers.{i}.state.rows") for i, _ in layers},
            {i: joined(f"layers.{i}.state.memory") for i, has_memory in layers if has_memory},
        )


class _RowsFile:
    """A file in memory, whose size and metadata are as they should be.

    Args:
        path: where it is.
        wanted: dtype and shape of each tensor, in order.

    Raises:
        OSError: it can't be read.
        ValueError: it is damaged, or has other tensors.
    """

    def __init__(self, path: str, wanted: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
        sizes = {
            name: int(np.prod(shape, dtype=np.int64)) * DTYPES[dtype].itemsize
            for name, (dtype, shape) in wanted.items()
        }
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
            n_bytes = os.fstat(file.fileno()).st_size
            n_header = int.from_bytes(file.read(8), "little")
            if n_header > MOST_HEADER or n_bytes != 8 + n_header + sum(sizes.values()):
                raise ValueError("another size")
            header = file.read(n_header)
            self._data = np.empty(sum(sizes.values()), np.uint8)
            if file.readinto(self._data.data) != len(self._data):
                raise ValueError("cut short")
        self.n_bytes = n_bytes
        try:
            found = json.loads(header)["__metadata__"]
            if not all(isinstance(value, str) for value in found.values()):
                raise ValueError("metadata")
            if found.get(DIGEST) != metadata_digest(found):
                raise ValueError("metadata")
            self._digests = json.loads(found[DIGESTS])
        except (KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError("no metadata") from error
        self.metadata = {key: found[key] for key in found.keys() - {DIGEST, DIGESTS}}
        if not isinstance(self._digests, dict) or [*self._digests] != [*wanted]:
            raise ValueError("other tensors")
        self.names, self._wanted, self._places = tuple(wanted), wanted, dict[str, slice]()
        self._checked = set[str]()
        at = 0
        for name, size in sizes.items():
            self._places[name] = slice(at, at + size)
            at += size

    def tensor(self, name: str) -> NDArray[Any]:
        """The values of a tensor.

        Raises:
            ValueError: it is damaged.
        """
        data = self._data[self._places[name]]
        if name not in self._checked:
            found = new_digest()
            found.update(data.data)
            if found.hexdigest() != self._digests[name]:
                raise ValueError("another checksum")
            self._checked.add(name)
        dtype, shape = self._wanted[name]
        return data.view(DTYPES[dtype]).reshape(shape)


class _Writer:
    """A thread that writes pieces, in the order in which they come.

    Args:
        write: writes one; raises OSError.
        on_problem: told once that the disk refuses.
        counts: has what was left out.

    Attributes:
        n_bytes: of what waits.
        has_dropped: files that waited were left out since somebody set it to False.
    """

    def __init__(
        self, write: Callable[[_Piece], None], on_problem: Callable[[str], None], counts: DiskCounts
    ) -> None:
        self._write, self.on_problem, self._counts = write, on_problem, counts
        self._queue = deque[_Piece]()
        self._names = set[str]()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._paused_until = 0.0
        self._has_told = self._is_closed = False
        self.n_bytes, self.has_dropped = 0, False

    @property
    def is_paused(self) -> bool:
        """Whether the disk has refused something a while ago."""
        return time.monotonic() < self._paused_until

    def has(self, name: str) -> bool:
        """Whether a file waits to be written."""
        return name in self._names

    def put(self, piece: _Piece) -> bool:
        """Have a file written; False if there is no room in the queue."""
        with self._changed:
            if self._is_closed or self.is_paused:
                return False
            if self._queue and self.n_bytes + piece.n_bytes > MOST_QUEUED:
                return False
            self._queue.append(piece)
            self._names.add(piece.name)
            self.n_bytes += piece.n_bytes
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="localkv-cache-disk", daemon=True
                )
                self._thread.start()
            self._changed.notify_all()
        return True

    def wait(self, seconds: float) -> None:
        """Wait until a file is written."""
        with self._changed:
            if self.n_bytes:
                self._changed.wait(seconds)

    def end(self) -> None:
        """Take nothing more; the thread ends once all is written that waits."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def close(self) -> None:
        """Write nothing more but what is being written."""
        self._drop_waiting()
        self.end()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._is_closed)
                if not self._queue:
                    return
                piece = self._queue[0]
            try:
                self._write(piece)
            except Exception as error:  # whatever it is, nobody waits for this thread to say so
                self._refused(error)
            with self._changed:
                if self._queue:
                    self._queue.popleft()
                self._names.discard(piece.name)
                self.n_bytes -= piece.n_bytes
                self._changed.notify_all()

    def _drop_waiting(self) -> None:
        """Leave out what waits, but not the file that is being written."""
        with self._changed:
            others = list(self._queue)[1:]
            self._counts.n_left_out += len(others)
            for piece in others:
                self._queue.pop()
                self._names.discard(piece.name)
                self.n_bytes -= piece.n_bytes
            self.has_dropped = True

    def _refused(self, error: Exception) -> None:
        """Give the disk a pause, and leave out what waits."""
        with self._changed:
            self._paused_until = time.monotonic() + PAUSE
            self._counts.n_left_out += 1
        self._drop_waiting()
        if not self._has_told:
            self._has_told = True
            self.on_problem(
                f"--cache-disk: {getattr(error, 'strerror', None) or error}; it goes on without "
                "what can't be written"
            )


def _rows_part(pool: int, span: int) -> str:
    """What the address of a file ends with that holds rows of a pool."""
    return f"rows{pool}p{span}"


def _digest(data: bytes) -> bytes:
    found = new_digest()
    found.update(data)
    return found.digest()


def _first_row(pool: PagePool, start: int) -> int:
    """The first row of a pool that the block after `start` tokens has; a sink's are in the first
    block."""
    return pool.n_rows(start) if start else 0


def _spans(pool: PagePool, start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield a number, the first and the last row (exclusive) of each part of a block's rows that
    lies in one page of a pool.

    Args:
        start, end: tokens before the block, and up to its last.
    """
    first, last = _first_row(pool, start), pool.n_rows(end)
    for span, place in enumerate(range(first // PAGE_TOKENS, pages_for(last))):
        yield span, max(first, place * PAGE_TOKENS), min(last, (place + 1) * PAGE_TOKENS)


def _rows_of(pool: PagePool, source: _Source) -> tuple[int, int]:
    """The first and the last row (exclusive) of a pool that a file has; none if the last comes
    before the first."""
    first = _first_row(pool, source.start)
    at = (first // PAGE_TOKENS + source.span) * PAGE_TOKENS
    return max(first, at), min(pool.n_rows(source.end), at + PAGE_TOKENS)


def _gives_back(pool: PagePool) -> bool:
    """Whether a pool gives pages of a text back that goes on."""
    return pool.tail is not None or pool.layout.reach > 0


def _has_rows(pool: PagePool, sequence: CachedSequence, first: int) -> bool:
    """Whether a sequence has the page of a row as it evaluated it."""
    if pool.tail is not None and sequence.exact_from[pool.index]:
        return False
    return first // PAGE_TOKENS not in sequence.gone[pool.index]


def _both(
    pools: Sequence[PagePool], held: Sequence[HeldRows]
) -> Iterator[tuple[PagePool, HeldRows]]:
    return zip(pools, held, strict=True)
