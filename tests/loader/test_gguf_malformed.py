"""`open_gguf` on files that are broken: one line, whatever the bytes are.

A model file is untrusted input. Whatever it holds, opening it succeeds or raises `ModelFileError`
with a single line that names the file, in little time and memory. Once it is open, every value and
every tensor can be read.
"""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import gguf.constants  # here, so that no example pays for it
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from localkv.errors import LocalKVError, ModelFileError
from localkv.loader.gguf_file import open_gguf
from localkv.quant_formats import WEIGHT_FORMATS
from support.gguf_bytes import (
    ARRAY,
    BOOL,
    F32,
    F64,
    I32,
    STRING,
    U8,
    U32,
    U64,
    GGUFBytes,
    Tensor,
    gguf_bytes,
)
from support.paths import ROOT

HUGE = [2**64 - 1, 2**63, 2**63 - 1, 2**62, 2**48, 2**32, 2**31 - 1]


def valid_file() -> GGUFBytes:
    """Something of everything: 1 to 2 KiB."""
    metadata = [
        ("general.architecture", STRING, "llama"),
        ("general.alignment", U32, 32),
        ("llama.block_count", U32, 2),
        ("llama.rms_eps", F32, 1e-5),
        ("flag", BOOL, 1),
        ("size", U64, 2**40),
        ("tokens", ARRAY, (STRING, ["a", "bc", "", "😀"])),
        ("scores", ARRAY, (F64, [0.5, 1.5])),
        ("types", ARRAY, (I32, [1, -1, 3])),
        ("flags", ARRAY, (BOOL, [0, 1, 1])),
        ("nested", ARRAY, (ARRAY, [(U8, [1, 2]), (ARRAY, [(STRING, ["x"])]), (STRING, [])])),
        ("nothing", ARRAY, (STRING, [])),
    ]
    tensors = [
        Tensor("norm", (8,), 0, bytes(32)),
        Tensor("half", (4, 3), 1, bytes(24)),
        Tensor("q8", (32, 2), 8, bytes(68)),
        Tensor("q4k", (256, 1, 1, 2), 12, bytes(288)),
    ]
    return gguf_bytes(metadata, tensors)


VALID = valid_file()


def refusal(path: Path) -> str:
    """The message of the error that opening the file must end in."""
    with pytest.raises(ModelFileError) as caught:
        open_gguf(path)
    message = str(caught.value)
    assert message.isprintable()
    assert len(message) < 500
    assert path.name in message or repr(path.name)[1:-1] in message
    return message


def patched(label: str, value: int) -> bytes:
    return VALID.patched(label, value)


def with_value(value_type: int, value: object) -> bytes:
    return bytes(gguf_bytes([("key", value_type, value)]).data)


def with_tensors(*tensors: Tensor) -> bytes:
    return bytes(gguf_bytes([], list(tensors)).data)


def norm(name: str, n: int = 8, offset: int | None = None) -> Tensor:
    return Tensor(name, (n,), 0, bytes(4 * n), offset)


def nest(depth: int) -> tuple[int, list[object]]:
    value: tuple[int, list[object]] = (U8, [1])
    for _ in range(depth - 1):
        value = (ARRAY, [value])
    return value


MALFORMED: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "the file is empty"),
    "one byte": (b"G", "truncated: the file ends within the magic"),
    "magic only": (b"GGUF", "truncated: the file ends within the version"),
    "text": (b"hello, I am a model\n", "not a GGUF file: it starts with b'hell'"),
    "git lfs pointer": (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
    "version 1": (patched("version", 1), "GGUF version 1 is not supported"),
    "version 4": (patched("version", 4), "GGUF version 4 is not supported"),
    "version 0": (patched("version", 0), "GGUF version 0 is not supported"),
    "big endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "key twice": (bytes(gguf_bytes([("a", U32, 1), ("a", U32, 2)]).data), "key 'a' is there twice"),
    "key length": (patched("key 0 length", 2**16), "a key at byte 32 has an impossible length"),
    "value type": (patched("key 2 type", 13), "key 'llama.block_count' is of an unknown type 13"),
    "item type": (patched("key 7 value item type", 99), "key 'scores' is an array of an unknown"),
    "boolean": (patched("key 4 value value", 2), "key 'flag' is a boolean of value 2"),
    "booleans": (with_value(ARRAY, (BOOL, [0, 255])), "an array with a boolean of value 255"),
    "nesting": (with_value(ARRAY, nest(5)), "an array of too many arrays"),
    "deep nesting": (with_value(ARRAY, nest(900)), "an array of too many arrays"),
}
for _alignment in (0, 3, 33, 2**32 - 1):
    MALFORMED[f"alignment {_alignment}"] = (
        bytes(gguf_bytes([("general.alignment", U32, _alignment)]).data),
        f"general.alignment is {_alignment}, expected a power of two",
    )
MALFORMED |= {
    "alignment type": (
        bytes(gguf_bytes([("general.alignment", STRING, "32")]).data),
        "key 'general.alignment' is a string, expected an integer",
    ),
    "split count type": (
        bytes(gguf_bytes([("split.count", STRING, "2")]).data),
        "key 'split.count' is a string, expected an integer",
    ),
    "split count": (
        bytes(gguf_bytes([("split.count", U64, 2**64 - 1)]).data),
        "key 'split.count' is 18446744073709551615, expected 0 to 99999",
    ),
    "no dimensions": (with_tensors(Tensor("x", (), 0, bytes(4))), "has 0 dimensions"),
    "five dimensions": (with_tensors(Tensor("x", (1,) * 5, 0, bytes(4))), "has 5 dimensions"),
    "zero dimension": (with_tensors(Tensor("x", (32, 0), 0, b"")), "has an empty shape [0, 32]"),
    "half a block": (
        with_tensors(Tensor("x", (48,), 8, bytes(64))),
        "tensor 'x' has rows of 48 values, which is not a multiple of q8_0's block of 32",
    ),
    "tensor twice": (with_tensors(norm("x"), norm("x")), "tensor 'x' is there twice"),
    "overlap": (with_tensors(norm("x", 16), norm("y", 8, 32)), "tensors 'x' and 'y' overlap"),
    "same place": (with_tensors(norm("x", 8, 0), norm("y", 8, 0)), "tensors 'x' and 'y' overlap"),
    "misaligned": (with_tensors(norm("x"), norm("y", 8, 40)), "'y' is at 40, not a multiple of 32"),
    "data cut off": (bytes(VALID.data[:-1]), "truncated: tensor 'q4k' ends at byte"),
    "no data": (bytes(with_tensors(norm("x"))[:-32]), "truncated: tensor 'x' ends at byte"),
    "data past the end": (with_tensors(norm("x", offset=2**63)), "truncated: tensor 'x'"),
    "line break in a name": (
        with_tensors(Tensor("a\nb\x1b[2J", (0,), 0, b"")),
        r"tensor 'a\nb\x1b[2J' has an empty shape",
    ),
    "long name": (with_tensors(Tensor("n" * 60000, (0,), 0, b"")), "..."),
}
for _label in VALID.fields:
    if _label.endswith((" length", " count", " ne0", " ne1")):
        for _value in HUGE[:3]:
            MALFORMED[f"{_label} {_value}"] = (patched(_label, _value), "")


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed(tmp_path: Path, case: str) -> None:
    data, message = MALFORMED[case]
    path = tmp_path / "broken.gguf"
    path.write_bytes(data)
    assert message in refusal(path)


def test_the_file_that_is_broken_by_the_others_is_valid(tmp_path: Path) -> None:
    path = tmp_path / "valid.gguf"
    path.write_bytes(VALID.data)
    opened = open_gguf(path)
    assert len(opened.tensors) == 4
    assert opened.metadata["nested"] == [[1, 2], [["x"]], []]
    path.write_bytes(with_value(ARRAY, nest(4)))
    assert open_gguf(path).metadata["key"] == [[[[1]]]]


@pytest.mark.parametrize("ggml_type", sorted({*range(50), 2**31, 2**32 - 1} - set(WEIGHT_FORMATS)))
def test_types_that_are_not_supported_are_named(tmp_path: Path, ggml_type: int) -> None:
    path = tmp_path / "odd.gguf"
    path.write_bytes(with_tensors(Tensor("blk.0.attn_q.weight", (256,), ggml_type, bytes(1024))))
    message = refusal(path)
    try:
        name = gguf.GGMLQuantizationType(ggml_type).name
    except ValueError:
        name = f"{ggml_type} (unknown)"
    assert f"tensor 'blk.0.attn_q.weight' is of type {name}, which is not supported" in message
    assert all(fmt.name in message for fmt in WEIGHT_FORMATS.values())


def test_every_truncation(tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(VALID.data)
    for n in reversed(range(len(VALID.data))):
        os.truncate(path, n)
        refusal(path)


def test_paths_that_are_no_model_file(tmp_path: Path) -> None:
    assert "no such file" in refusal(tmp_path / "missing.gguf")
    assert "is a directory" in refusal(tmp_path)
    assert "no such file" in refusal(tmp_path / "line\nbreak.gguf")
    assert "cannot be read" in refusal(tmp_path / "nul\0.gguf")
    assert "cannot be read" in refusal(tmp_path / ("n" * 300))
    (tmp_path / "file").write_bytes(b"x")
    assert "cannot be read" in refusal(tmp_path / "file" / "model.gguf")
    (tmp_path / "loop.gguf").symlink_to("loop.gguf")
    assert "cannot be read" in refusal(tmp_path / "loop.gguf")
    os.mkfifo(tmp_path / "pipe.gguf")
    assert "not a regular file" in refusal(tmp_path / "pipe.gguf")
    assert "not a regular file" in refusal(Path("/dev/zero"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read any file")
def test_a_file_without_permission(tmp_path: Path) -> None:
    path = tmp_path / "secret.gguf"
    path.write_bytes(VALID.data)
    path.chmod(0)
    assert "Permission denied" in refusal(path)


SPARSE = {
    "more strings than a header may hold": (ARRAY, (STRING, []), "key 0 value count", 2**28),
    "more numbers than a header may hold": (ARRAY, (F64, []), "key 0 value count", 2**28),
    "more arrays than a header may hold": (ARRAY, (ARRAY, []), "key 0 value count", 2**23),
    "a string that fills the file": (STRING, "", "key 0 value length", 2**31),
    "keys": (U8, 0, "key count", 2**24),
    "tensors": (U8, 0, "tensor count", 2**24),
}


@pytest.mark.parametrize("case", SPARSE)
def test_counts_that_fit_in_a_large_file(tmp_path: Path, case: str) -> None:
    """Terabyte files of zeros are cheap to make, so that a count fits is not enough."""
    value_type, value, label, count = SPARSE[case]
    path = tmp_path / "sparse.gguf"
    path.write_bytes(gguf_bytes([("key", value_type, value)]).patched(label, count))
    os.truncate(path, 2**33)
    tracemalloc.start()
    started = time.process_time()
    try:
        refusal(path)
        assert tracemalloc.get_traced_memory()[1] < 2**22
    finally:
        tracemalloc.stop()
    assert time.process_time() - started < 1


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_address_space_of_a_hostile_file(tmp_path: Path) -> None:
    """The operating system sees it, too: nothing is allocated for what a file declares."""
    paths = []
    wide = [label for label, (_, code) in VALID.fields.items() if code == "<Q"]
    for i, label in enumerate(wide):
        for value in HUGE:
            paths.append(tmp_path / f"{i}-{value}.gguf")
            paths[-1].write_bytes(patched(label, value))
    code = """
import resource, sys
from localkv.errors import LocalKVError
from localkv.loader.gguf_file import open_gguf
limit = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize() + (64 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
for path in sys.stdin.read().split():
    try:
        opened = open_gguf(path)
    except LocalKVError:
        continue
    dict(opened.metadata)
"""
    subprocess.run(
        [sys.executable, "-c", code],
        input="\n".join(map(str, paths)),
        text=True,
        check=True,
        cwd=ROOT,
    )


_positions = st.integers(0, len(VALID.data) - 1)
_numbers = st.one_of(
    st.sampled_from([*HUGE, 0, 1, 2, 255, 2**16, 2**24]),
    st.integers(0, 300),
    st.integers(0, 2**64 - 1),
)
MUTATIONS = st.one_of(
    st.tuples(st.just("field"), st.sampled_from(sorted(VALID.fields)), _numbers),
    st.tuples(st.just("flip"), _positions, st.integers(0, 7)),
    st.tuples(st.just("overwrite"), _positions, st.binary(min_size=1, max_size=12)),
    st.tuples(st.just("insert"), _positions, st.binary(min_size=1, max_size=12)),
    st.tuples(st.just("delete"), _positions, st.integers(1, 40)),
    st.tuples(st.just("truncate"), _positions, st.none()),
    st.tuples(st.just("splice"), _positions, _positions),
)


def mutate(mutations: list[tuple]) -> bytes:
    """Apply mutations to the valid file; fields first, since the others move them."""
    data = bytearray(VALID.data)
    for kind, where, what in sorted(mutations, key=lambda mutation: mutation[0] != "field"):
        if kind == "field":
            offset, code = VALID.fields[where]
            size = struct.calcsize(code)
            data[offset : offset + size] = what.to_bytes(8, "little")[:size]
        elif kind == "flip":
            data[where : where + 1] = bytes(byte ^ 1 << what for byte in data[where : where + 1])
        elif kind == "overwrite":
            data[where : where + len(what)] = what
        elif kind == "insert":
            data[where:where] = what
        elif kind == "delete":
            del data[where : where + what]
        elif kind == "truncate":
            del data[where:]
        else:
            data[where:where] = data[what : what + 100]
    return bytes(data)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mutated") / "mutated.gguf"


@pytest.mark.slow
@settings(
    max_examples=2000,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
@given(mutations=st.lists(MUTATIONS, min_size=1, max_size=4))
@example(mutations=[])
def test_mutated_files(scratch: Path, mutations: list[tuple]) -> None:
    scratch.write_bytes(mutate(mutations))
    tracemalloc.start()
    started = time.process_time()
    message = None
    try:
        opened = open_gguf(scratch)
        dict(opened.metadata)
        for name in opened.tensors:
            opened.data(name).sum()
    except LocalKVError as error:
        message = str(error)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20
    assert time.process_time() - started < 1
    assert message is None or (message.isprintable() and scratch.name in message)
