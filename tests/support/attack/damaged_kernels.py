"""What may lie where a compiled kernel is looked for: right checksums around anything."""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

from localkv.kernels.cpu.jit.machine_code import Function, Functions

Put = Callable[[Path], None]
"""Puts something at a path."""
DIGEST = hashlib.sha256().digest_size


def sealed(name: str, content: bytes) -> bytes:
    """A file whose own checksum is right, whatever its content."""
    return hashlib.sha256(name.encode() + b"\0" + content).digest() + content


def archive(members: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as out:
        for name, data in members.items():
            out.writestr(name, data)
    return file.getvalue()


def contents(functions: Functions) -> Iterator[tuple[str, bytes]]:
    """Contents of a file by what is wrong with them."""
    (name, function), *_ = functions.items()
    entry = [function.symbol, *function.needs]
    for label, index in {
        "no functions": {},
        "a list": [name],
        "a number": 7,
        "an entry that is empty": {name: []},
        "an entry that is no list": {name: 5},
        "a symbol that is a number": {name: [1]},
        "needs that are lists": {name: [function.symbol, ["a"]]},
        "a member that is missing": {name: entry, "more": entry},
        "functions of other names": {"other": entry},
    }.items():
        members = {"index.json": json.dumps(index).encode(), name: function.code}
        yield label, archive({**members, "other": function.code})
    for label, text in {
        "no JSON": b"{",
        "no text": b"\xff\xfe",
        "deep JSON": b"[" * 100_000,
        "a huge number": b"9" * 10_000,
    }.items():
        yield label, archive({"index.json": text, name: function.code})
    yield "no index", archive({name: function.code})
    yield "no archive", b"PK nonsense"
    yield "nothing", b""
    yield "zeros", bytes(5000)
    yield "a bomb", archive({"index.json": b"[" + b" " * (1 << 24)}, zipfile.ZIP_DEFLATED)


def code_of_others(functions: Functions) -> Iterator[tuple[str, Functions]]:
    """Well-formed files whose machine code is none, or lacks something."""
    (name, function), *_ = functions.items()
    for label, symbol, needs, code in (
        ("code that is none", function.symbol, function.needs, b"code"),
        ("empty code", function.symbol, function.needs, b""),
        ("half of the code", function.symbol, function.needs, function.code[:1000]),
        ("code without its end", function.symbol, function.needs, function.code[:-1]),
        ("code of another name", "nothing", function.needs, function.code),
        ("a symbol that is missing", function.symbol, ("no_such_symbol",), function.code),
    ):
        yield label, {name: Function(symbol, needs, code)}


def strange_places(good: bytes, folder: Path) -> Iterator[tuple[str, Put]]:
    """What is there instead of a file, or a file that can't be trusted."""

    def written(path: Path, mode: int) -> None:
        path.write_bytes(good)
        path.chmod(mode)

    def full_folder(path: Path) -> None:
        path.mkdir()
        (path / "file").write_bytes(good)

    def sparse(path: Path) -> None:
        with open(path, "wb") as file:
            file.truncate(1 << 40)

    yield "an empty folder", Path.mkdir
    yield "a folder", full_folder
    yield "a link to nothing", lambda path: path.symlink_to(folder / "nothing")
    yield "a link to itself", lambda path: path.symlink_to(path)
    yield "a link to a folder", lambda path: path.symlink_to(folder)
    yield "a pipe", os.mkfifo
    yield "a file that nobody may read", lambda path: written(path, 0)
    yield "a file that others may write", lambda path: written(path, 0o666)
    yield "a terabyte", sparse


def flipped(name: str, good: bytes, rng: random.Random) -> bytes:
    """One to three bits of the content changed, under a checksum that is right."""
    content = bytearray(good[DIGEST:])
    # most bytes are machine code, which the archive has checksums of its own for
    ends = [*range(min(200, len(content))), *range(max(0, len(content) - 300), len(content))]
    for _ in range(rng.randint(1, 3)):
        at = rng.choice(ends) if rng.random() < 0.8 else rng.randrange(len(content))
        content[at] ^= 1 << rng.randrange(8)
    return sealed(name, bytes(content))


def cut(name: str, good: bytes, rng: random.Random) -> bytes:
    """A part is missing, at the end or within, with and without the right checksum."""
    content = good[DIGEST:]
    first = rng.randrange(len(content))
    last = len(content) if rng.random() < 0.5 else rng.randrange(first, len(content)) + 1
    content = content[:first] + content[last:]
    return sealed(name, content) if rng.random() < 0.8 else good[:DIGEST] + content
