"""`localkv imatrix`."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest

from localkv.loader.importance import Measured, Sums, read_importance, read_measured, write_measured
from support.paths import DATA, MODELS
from support.program import Program

TALES = MODELS / "tales-4M-Q8_0.gguf"
WORDS = ("-m", TALES, "-c", "64")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "stories.txt"
    path.write_text(json.loads((DATA / "llama_cpp_perplexity.json").read_text())["text"][:3000])
    return path


def test_what_is_measured_goes_to_a_file_that_quantize_reads(
    program: Program, tmp_path: Path, text: Path
) -> None:
    out = tmp_path / "i.gguf"
    done = program("imatrix", *WORDS, "-f", text, "-o", out, "--chunks", "3", "--json")
    assert done.code == 0, done.err
    facts = json.loads(done.out)
    assert (facts["n_matrices"], facts["n_chunks"], facts["chunk_size"]) == (35, 3, 64)
    assert facts["ppl"]["value"] > 1
    found = read_importance(str(out))
    assert (found.datasets, found.n_chunks) == ([str(text)], 3)
    assert set(read_measured(str(out)).sums["blk.0.attn_q.weight"].counts) == {192}
    small = tmp_path / "small.gguf"
    words = ("--imatrix", out, "--allow-requantize", TALES, small, "Q4_0")
    assert program("quantize", *words).code == 0


def test_parts_together_are_the_whole(program: Program, tmp_path: Path, text: Path) -> None:
    def run(name: str, *words: str) -> dict[str, Sums]:
        done = program("imatrix", *WORDS, "-f", text, "-o", tmp_path / name, "--no-ppl", *words)
        assert done.code == 0, done.err
        assert "PPL" not in done.out
        return dict(read_measured(str(tmp_path / name)).sums)

    whole = run("whole", "--chunks", "3", "--process-output", "--save-frequency", "2")
    first = run("first", "--chunks", "1", "--process-output")
    run("rest", "--chunks", "2", "--from-chunk", "1", "--process-output")
    parts = ("--in-file", tmp_path / "first", "--in-file", tmp_path / "rest")
    done = program("imatrix", *parts, "-o", tmp_path / "both", "-c", "64")
    assert done.code == 0, done.err
    both = read_measured(str(tmp_path / "both"))
    assert (both.n_chunks, both.datasets) == (3, [str(text)] * 2)
    again = run(
        "again",
        "--in-file",
        str(tmp_path / "first"),
        "--from-chunk",
        "1",
        "--chunks",
        "2",
        "--process-output",
    )
    for name, one in whole.items():
        for other in (both.sums[name], again[name]):
            assert one.counts.tolist() == other.counts.tolist()
            np.testing.assert_allclose(one.squares, other.squares, rtol=1e-5)
    two = read_measured(str(tmp_path / "whole.at_2")).sums["blk.0.attn_q.weight"]
    assert two.counts.tolist() == [128]
    assert first["blk.0.attn_q.weight"].counts.tolist() == [64]


def test_statistics(program: Program, tmp_path: Path) -> None:
    path = tmp_path / "i.gguf"
    sums = {
        "blk.0.attn_q.weight": Sums(np.array([4, 0, 0, 4], np.float32), np.array([2])),
        "blk.1.attn_q.weight": Sums(np.array([8, 0, 0, 8], np.float32), np.array([2])),
        "blk.1.ffn_up_exps.weight": Sums(np.array([1, 3, 9, 9], np.float32), np.array([1, 0])),
        "output.weight": Sums(np.array([1, 1], np.float32), np.array([0])),
    }
    write_measured(path, Measured(sums, ["a"], 1, 2))
    done = program("imatrix", "--in-file", path, "--show-statistics", "--json")
    assert done.code == 0, done.err
    second, first, experts = json.loads(done.out)
    assert (second["layer"], second["tensor"]) == (1, "attn_q")
    assert second["cosine"] == pytest.approx(1)
    assert (first["layer"], first["total"], first["most"], first["active"]) == (0, 4, 2, 0.5)
    assert (first["entropy"], first["deviation"], first["cosine"]) == (1, 1, None)
    assert (experts["n"], experts["total"]) == (2, 4)
    shown = program("imatrix", "--in-file", path, "--show-statistics").out.splitlines()
    assert shown[1].split()[:4] == ["1", "attn_q", "8.00", "0.0000"]


def test_a_file_of_the_former_format_is_added_by_tokens(program: Program, tmp_path: Path) -> None:
    name = b"blk.0.attn_q.weight"
    old = tmp_path / "old.dat"
    old.write_bytes(
        struct.pack("<ii", 1, len(name))
        + name
        + struct.pack("<ii2f", 3, 2, 6.0, 9.0)
        + struct.pack("<ii", 3, 1)
        + b"t"
    )
    done = program("imatrix", "--in-file", old, "-o", tmp_path / "new.gguf", "-c", "128")
    assert done.code == 0, done.err
    new = read_measured(str(tmp_path / "new.gguf"))
    one = new.sums[name.decode()]
    assert (one.squares.tolist(), one.counts.tolist()) == ([768, 1152], [384])
    assert (new.n_chunks, new.chunk_size, new.datasets) == (3, 128, ["t"])
    assert read_importance(str(old)).columns[name.decode()].tolist() == [2, 3]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "no text to measure with"),
        (["-f", "TEXT"], "-m"),
        (["-f", "TEXT", "-m", "MODEL", "--chunks", "0"], "--chunks 0 leaves nothing to measure"),
        (["-f", "TEXT", "-m", "MODEL", "--from-chunk", "99"], "--from-chunk 99: the text has"),
        (["-f", "TEXT", "-m", "MODEL", "-c", "512"], "but a context of 512 needs"),
        (["--in-file", "MODEL"], "not an importance matrix"),
        (["--show-statistics"], "--show-statistics prints what is in one file"),
        (["--in-file", "nothing"], "nothing: no such file"),
    ],
)
def test_what_is_refused(
    program: Program, tmp_path: Path, text: Path, words: list[str], said: str
) -> None:
    (tmp_path / "text.txt").write_text(text.read_text()[:600])
    given = {"TEXT": str(tmp_path / "text.txt"), "MODEL": str(TALES)}
    done = program("imatrix", *[given.get(word, word) for word in words], "-o", tmp_path / "o")
    assert done.code == 2 or "no such file" in said
    assert done.code != 0
    assert said in done.err_lines[0]
    assert not (tmp_path / "o").exists()


def test_files_of_different_models_are_not_combined(program: Program, tmp_path: Path) -> None:
    for name, n in (("a", 2), ("b", 3)):
        sums = {"blk.0.attn_q.weight": Sums(np.ones(n, np.float32), np.array([1]))}
        write_measured(tmp_path / name, Measured(sums, ["t"], 1, 64))
    words = ("--in-file", tmp_path / "a", "--in-file", tmp_path / "b", "-o", tmp_path / "o")
    done = program("imatrix", *words)
    assert done.code == 2
    assert "has 2 values in one importance matrix and 3 in another" in done.err
