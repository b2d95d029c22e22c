"""SQLite's pages without SQLite: rows of a damaged file that SQLite can't read.

The format is that of https://sqlite.org/fileformat2.html: a file of pages of one size, the rows of
a table in leaves, with values too long for a leaf in a chain of further pages.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

MAGIC = b"SQLite format 3\0"
PAGE_SIZE = 4096
"""SQLite's default for a new file, so that of every file of sessions."""

_LEAF = 13
_WAL_HEADER, _FRAME_HEADER = 32, 24
_MOST_COLUMNS = 64

Value = int | float | str | bytes | None


@dataclass(frozen=True)
class Log:
    """The content of a write-ahead log.

    Attributes:
        committed: page number (from 1) -> its newest committed bytes, as SQLite would see it.
        n_pages: of the database after the last commit; 0 if there was none.
        loose: page number -> bytes, of frames that SQLite would not read.
    """

    committed: dict[int, bytes]
    n_pages: int
    loose: list[tuple[int, bytes]]


def read_log(data: bytes, page_size: int = PAGE_SIZE) -> Log:
    """The pages of a write-ahead log."""
    committed: dict[int, bytes] = {}
    pending: dict[int, bytes] = {}
    loose: list[tuple[int, bytes]] = []
    n_pages = 0
    size = _FRAME_HEADER + page_size
    magic, salts = data[:4], data[16:24]
    order = {b"\x37\x7f\x06\x82": "<", b"\x37\x7f\x06\x83": ">"}.get(magic)
    sums = _checksum(data[:24], (0, 0), order) if order else (0, 0)
    sound = order is not None and data[24:32] == struct.pack(">II", *sums)
    for start in range(_WAL_HEADER, len(data) - size + 1, size):
        header, page = (
            data[start : start + _FRAME_HEADER],
            data[start + _FRAME_HEADER :][:page_size],
        )
        number, after = struct.unpack(">II", header[:8])
        if sound and order:
            sums = _checksum(page, _checksum(header[:8], sums, order), order)
            sound = header[8:16] == salts and header[16:24] == struct.pack(">II", *sums)
        if not sound:
            if not order or header[8:16] == salts:  # else it is left from an earlier log
                loose.append((number, page))
            continue
        pending[number] = page
        if after:
            committed |= pending
            pending, n_pages = {}, after
    return Log(committed, n_pages, loose + list(pending.items()))


def _checksum(data: bytes, before: tuple[int, int], order: str) -> tuple[int, int]:
    one, two = before
    words = struct.unpack(f"{order}{len(data) // 4}I", data)
    for first, second in zip(words[::2], words[1::2], strict=True):
        one = (one + first + two) & 0xFFFFFFFF
        two = (two + second + one) & 0xFFFFFFFF
    return one, two


def apply_log(file: Path, log: Log, page_size: int = PAGE_SIZE) -> None:
    """Write the committed pages into the database, as a checkpoint would."""
    if not log.committed:
        return
    with file.open("r+b") as target:
        for number, page in log.committed.items():
            target.seek((number - 1) * page_size)
            target.write(page)
        target.truncate(log.n_pages * page_size)


def make_readable(file: Path) -> None:
    """Let SQLite read the file as it is: there is no log beside it, and the end may be cut off."""
    with file.open("r+b") as target:
        first = bytearray(target.read(PAGE_SIZE))
        if len(first) == PAGE_SIZE and first.startswith(MAGIC):
            first[18:20] = b"\1\1"
            _write_first(target, first)


def transplant(file: Path, sound: Path) -> None:
    """Put the first page of a sound file, which lists the tables, in the place of a damaged one.

    Every file of sessions has its tables at the same pages, since they are made in one order.
    """
    with file.open("r+b") as target:
        first = bytearray(sound.read_bytes()[:PAGE_SIZE])
        first[18:20] = b"\1\1"
        _write_first(target, first)


def _write_first(target: BinaryIO, first: bytearray) -> None:
    """Write a first page that counts the pages that there are."""
    n_pages = max(1, target.seek(0, 2) // PAGE_SIZE)
    first[28:32] = struct.pack(">I", n_pages)  # which counts where the next two agree
    first[92:96] = first[24:28]
    target.seek(0)
    target.write(first)


def leaf_rows(data: bytes, pages: list[bytes]) -> Iterator[tuple[int, list[Value]]]:
    """Every row that can be read in leaves of tables: its rowid and its values.

    Args:
        data: the database, whose pages hold the values too long for a leaf.
        pages: where to look for leaves.
    """
    for page in pages:
        for start in (0, 100):
            if page[start : start + 1] == bytes([_LEAF]) and (not start or page[:16] == MAGIC):
                yield from _cells(data, page, start)


def free_pages(data: bytes) -> set[int]:
    """Numbers of pages that are not in use: deleted rows may be in them."""
    free: set[int] = set()
    trunk = int.from_bytes(data[32:36])
    while trunk and trunk not in free:
        page = data[(trunk - 1) * PAGE_SIZE : trunk * PAGE_SIZE]
        n_leaves = min(int.from_bytes(page[4:8]), PAGE_SIZE // 4 - 2)
        free.add(trunk)
        free |= {int.from_bytes(page[at : at + 4]) for at in range(8, 8 + 4 * n_leaves, 4)}
        trunk = int.from_bytes(page[:4])
    return free


def split_pages(data: bytes) -> list[bytes]:
    return [data[at : at + PAGE_SIZE] for at in range(0, len(data), PAGE_SIZE)]


def _cells(data: bytes, page: bytes, start: int) -> Iterator[tuple[int, list[Value]]]:
    n_cells = int.from_bytes(page[start + 3 : start + 5])
    for number in range(min(n_cells, PAGE_SIZE // 4)):
        at = int.from_bytes(page[start + 8 + 2 * number :][:2])
        try:
            n_bytes, at = _varint(page, at)
            rowid, at = _varint(page, at)
            values = _values(_payload(data, page, at, n_bytes))
        except (IndexError, ValueError, struct.error):
            continue
        yield rowid, values


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A number of 1 to 9 bytes, and where it ends."""
    value = 0
    for length in range(8):
        byte = data[at + length]
        value = value << 7 | byte & 0x7F
        if byte < 0x80:
            return value, at + length + 1
    value = value << 8 | data[at + 8]
    return (value - (1 << 64) if value >= 1 << 63 else value), at + 9


def _payload(data: bytes, page: bytes, at: int, n_bytes: int) -> bytes:
    """The bytes of a row, which may go on in other pages."""
    if not 0 < n_bytes <= len(data) + PAGE_SIZE:
        raise ValueError("no such length")
    most, least = PAGE_SIZE - 35, (PAGE_SIZE - 12) * 32 // 255 - 23
    local = n_bytes
    if n_bytes > most:
        local = least + (n_bytes - least) % (PAGE_SIZE - 4)
        local = local if local <= most else least
    if at + local > len(page):
        raise ValueError("beyond its page")
    parts, n_read = [page[at : at + local]], local
    following = int.from_bytes(page[at + local : at + local + 4]) if local < n_bytes else 0
    while n_read < n_bytes:
        start = (following - 1) * PAGE_SIZE
        if not 0 < start <= len(data) - PAGE_SIZE:
            raise ValueError("its chain of pages is broken")
        parts.append(data[start + 4 : start + PAGE_SIZE][: n_bytes - n_read])
        n_read += len(parts[-1])
        following = int.from_bytes(data[start : start + 4])
    return b"".join(parts)


def _values(record: bytes) -> list[Value]:
    """The values of a row: kinds first, then one after the other."""
    end, at = _varint(record, 0)
    kinds = []
    while at < end:
        kind, at = _varint(record, at)
        kinds.append(kind)
    if at != end or not 0 < len(kinds) <= _MOST_COLUMNS:
        raise ValueError("no row")
    values: list[Value] = []
    for kind in kinds:
        value, at = _value(record, at, kind)
        values.append(value)
    return values


def _value(record: bytes, at: int, kind: int) -> tuple[Value, int]:
    if kind in (0, 8, 9):
        return {0: None, 8: 0, 9: 1}[kind], at
    size = {1: 1, 2: 2, 3: 3, 4: 4, 5: 6, 6: 8, 7: 8}.get(kind, (kind - 12) // 2)
    raw = record[at : at + size]
    if kind < 0 or kind in (10, 11) or len(raw) != size:
        raise ValueError("no value")
    if kind < 7:
        return int.from_bytes(raw, signed=True), at + size
    if kind == 7:
        return float(struct.unpack(">d", raw)[0]), at + size
    return (raw.decode(errors="replace") if kind % 2 else raw), at + size
