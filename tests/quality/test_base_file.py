"""Bases that are written once and read by later runs, and those that are refused."""

from __future__ import annotations

import json
import struct
import tracemalloc
import zipfile
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from localkv.errors import LocalKVError, UsageError
from localkv.quality.base_file import BaseFacts, BaseFile, BaseWriter, vocabulary_hash
from support.program import Program, Result

N_CTX = 32
TEXT = "The fox said hello to the owl, and the owl said hello to the fox. " * 12
CHUNKS = [[1, 2, 3, 4, 5, 6, 7, 8], [1, 9, 8, 7, 6, 5, 4, 3]]
FACTS = BaseFacts("tiny", "f16", "f16", "off", n_ctx=8, n_vocab=10, vocabulary="abc")


@pytest.fixture
def run(program: Program, tiny_model: Path, tmp_path: Path) -> Callable[..., Result]:
    """`localkv perplexity` of three chunks, with more options."""
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")

    def run(*options: object, text: Path = path, n_ctx: int = N_CTX, chunks: int = 3) -> Result:
        sizes = ("-c", n_ctx, "--chunks", chunks)
        return program("perplexity", "-m", tiny_model, "-f", text, *sizes, *options)

    return run


def test_a_saved_base_gives_what_the_run_itself_gives(run, tmp_path: Path) -> None:
    path = tmp_path / "base.npz"
    sweep = ("--sweep", "q4_0/q4_0,f32/f16", "--json")
    first = run(*sweep, "--save-base", path)
    assert (first.code, first.err) == (0, "")
    again = json.loads(run(*sweep, "--base", path).out)
    assert again["results"] == json.loads(first.out)["results"]
    assert again["base"] == {
        "type_k": "f16",
        "type_v": "f16",
        "kv_rotation": "off",
        "file": str(path),
    }
    # one cache, and fewer chunks than the base has
    types = ("-ctk", "q4_0", "-ctv", "q4_0")
    one = json.loads(run("--base", path, *types, "--json", chunks=2).out)
    want = json.loads(run("--kl-divergence", *types, "--json", chunks=2).out)
    assert one["results"] == want["results"]
    assert list(tmp_path.glob("*.part")) == []


def test_without_a_comparison_the_measured_cache_is_the_base(run, tmp_path: Path) -> None:
    path = tmp_path / "base.npz"
    types = ("-ctk", "bf16", "-ctv", "f32")
    result = run(*types, "--save-base", path)
    assert (result.code, result.err) == (0, "")
    assert result.out == run(*types).out
    facts = BaseFile(str(path)).facts
    assert (facts.type_k, facts.type_v, facts.n_ctx) == ("bf16", "f32", N_CTX)
    (found,) = json.loads(run(*types, "--base", path, "--json").out)["results"]
    assert found["divergence"]["kld"]["value"] == 0


def test_the_file_is_an_archive_that_numpy_reads(tmp_path: Path) -> None:
    path = tmp_path / "base.npz"
    logits = np.random.default_rng(0).standard_normal((2, 3, 10)).astype(np.float32)
    with BaseWriter(str(path), FACTS, CHUNKS, n_scored=3) as writer:
        for part in logits:
            writer.write(part)
    with np.load(path) as archive:
        np.testing.assert_array_equal(archive["tokens"], CHUNKS)
        np.testing.assert_array_equal(archive["logits_1"], logits[1])
        assert json.loads(str(archive["facts"]))["n_vocab"] == 10
    base = BaseFile(str(path))
    assert base.facts == FACTS
    np.testing.assert_array_equal(base.logits(0), logits[0])


def test_a_base_of_other_chunks_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "base.npz"
    with BaseWriter(str(path), FACTS, CHUNKS, n_scored=3) as writer:
        for _ in CHUNKS:
            writer.write(np.zeros((3, 10), np.float32))
    base = BaseFile(str(path))
    base.check(8, 10, "abc", CHUNKS)
    base.check(8, 10, "abc", CHUNKS[:1])
    other = [CHUNKS[0], [*CHUNKS[1][:-1], 0]]
    for arguments, message, hint in (
        ((16, 10, "abc", CHUNKS), "was made with a context of 8 tokens, not 16", "use -c 8"),
        ((8, 11, "abc", CHUNKS), "was made with another vocabulary, that of tiny", None),
        ((8, 10, "abd", CHUNKS), "was made with another vocabulary", None),
        ((8, 10, "abc", other), "was made from another text", None),
        ((8, 10, "abc", CHUNKS * 2), "has 2 chunks, but the text has 4", "use --chunks 2"),
    ):
        with pytest.raises(UsageError, match=message) as error:
            base.check(*arguments)
        assert error.value.hint == hint
        assert "\n" not in str(error.value)


def test_vocabularies_are_told_apart() -> None:
    names = [["a", "b"], ["b", "a"], ["ab"], ["a", "b", ""]]
    assert len({vocabulary_hash(tokens) for tokens in names}) == len(names)


def test_another_text_or_context_is_one_line(run, tmp_path: Path) -> None:
    path = tmp_path / "base.npz"
    run("--save-base", path)
    other = tmp_path / "other.txt"
    other.write_text("A" + TEXT, encoding="utf-8")
    for options, line in (
        ({"text": other}, f"error: the base {path} was made from another text"),
        ({"n_ctx": 16}, f"error: the base {path} was made with a context of 32 tokens, not 16"),
        ({"chunks": -1}, f"error: the base {path} has 3 chunks, but the text has "),
    ):
        result = run("--base", path, **options)
        assert (result.code, result.out) == (2, "")
        assert result.err_lines[0].startswith(line)
        assert len(result.err_lines) <= 2


def test_files_that_are_no_base(run, tmp_path: Path) -> None:
    saved = tmp_path / "base.npz"
    run("--save-base", saved)
    path = tmp_path / "bad"
    for data in (
        b"",
        b"hello",
        saved.read_bytes()[:-100],
        saved.read_bytes()[: saved.stat().st_size // 2],
    ):
        path.write_bytes(data)
        result = run("--base", path)
        assert (result.code, result.out) == (1, "")
        message = f"error: the base {path} is not a complete file of --save-base"
        assert result.err_lines == [message]
    np.save(tmp_path / "array.npy", np.zeros(3))
    assert run("--base", tmp_path / "array.npy").code == 1
    np.savez(path.with_suffix(".npz"), tokens=np.zeros(3))
    assert run("--base", path.with_suffix(".npz")).code == 1
    missing = run("--base", tmp_path / "none.npz")
    assert missing.code == 2
    assert missing.err_lines == [f"error: the base {tmp_path}/none.npz: No such file or directory"]


def test_a_base_of_llama_perplexity_is_named(tmp_path: Path) -> None:
    path = tmp_path / "base.kld"
    path.write_bytes(b"_logits_" + struct.pack("<3i", 512, 32000, 4))
    with pytest.raises(LocalKVError, match="is llama-perplexity's") as error:
        BaseFile(str(path))
    assert error.value.hint is not None


def test_a_damaged_chunk_is_found(tmp_path: Path) -> None:
    path = tmp_path / "base.npz"
    with BaseWriter(str(path), FACTS, CHUNKS, n_scored=3) as writer:
        for _ in CHUNKS:
            writer.write(np.full((3, 10), 7, np.float32))
    data = path.read_bytes()
    at = data.index(np.full(30, 7, np.float32).tobytes())
    path.write_bytes(data[:at] + b"\1" + data[at + 1 :])
    with pytest.raises(LocalKVError, match="not a complete file"):
        BaseFile(str(path)).logits(0)


def test_an_interrupted_base_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "base.npz"
    path.write_bytes(b"before")

    def interrupted() -> None:
        with BaseWriter(str(path), FACTS, CHUNKS, n_scored=3) as writer:
            writer.write(np.zeros((3, 10), np.float32))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_bytes() == b"before"


def test_a_disk_without_room_is_found_out_first(monkeypatch, run, tmp_path: Path) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
    result = run("--save-base", tmp_path / "base.npz")
    assert (result.code, result.out) == (2, "")
    assert result.err_lines[0].startswith("error: a base of 3 chunks takes 66.80 KiB, but ")
    assert result.err_lines[1] == "hint: use fewer chunks (--chunks)"
    assert list(tmp_path.glob("base*")) == []


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--base", "a", "--save-base", "b"], "error: --base reads a base and --save-base writes"),
        (["--save-base", "no/such/folder/base"], "error: no/such/folder is not a folder"),
        (
            ["--save-base", "b", "--prefill-exact"],
            "error: --save-base writes the logits of a cache",
        ),
    ],
)
def test_options_that_do_not_go_together(run, options: list[str], line: str) -> None:
    result = run(*options)
    assert (result.code, result.out) == (2, "")
    assert result.err_lines[0].startswith(line)


@pytest.mark.parametrize("shape", ["(1099511627776,)", "(1048576, 1048576)", "(-1,)"])
def test_a_base_that_declares_more_than_it_has(tmp_path: Path, shape: str) -> None:
    """Nothing is allocated for it."""
    header = f"{{'descr': '<i4', 'fortran_order': False, 'shape': {shape}}}".ljust(117) + "\n"
    array = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode() + bytes(64)
    refused_base(tmp_path, array, zipfile.ZIP_STORED)


def test_a_base_that_unpacks_to_more_than_it_has(tmp_path: Path) -> None:
    array = BytesIO()
    np.save(array, np.zeros((1 << 12, 1 << 12), np.int32))
    refused_base(tmp_path, array.getvalue(), zipfile.ZIP_DEFLATED)


def refused_base(folder: Path, tokens: bytes, compression: int) -> None:
    path = folder / "base.npz"
    with BaseWriter(str(path), FACTS, CHUNKS[:0], n_scored=4):
        pass
    with zipfile.ZipFile(path) as archive:
        facts = archive.read("facts.npy")
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("facts.npy", facts, zipfile.ZIP_STORED)
        archive.writestr("tokens.npy", tokens)
    tracemalloc.start()
    try:
        with pytest.raises(LocalKVError, match="is not a complete file of --save-base"):
            BaseFile(str(path))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
