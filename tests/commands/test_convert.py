"""`localkv convert`: what it prints and writes."""

from __future__ import annotations

from pathlib import Path

from support.checkpoints import cases, write_checkpoint
from support.program import Program


def test_a_checkpoint_becomes_a_file(program: Program, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "Tiny-Qwen", cases()["qwen3"])
    shown = program("convert", str(folder), "--dry-run")
    assert shown.code == 0
    assert "token_embd.weight" in shown.out
    assert "BF16.gguf: " in shown.out
    assert not list(tmp_path.rglob("*.gguf"))
    done = program("convert", str(folder))
    assert done.code == 0, done.err
    assert "24 tensors" in done.err
    path = Path(done.out.strip())
    assert path.parent == folder
    assert program("show", str(path)).code == 0
    named = program("convert", str(folder), "-o", str(tmp_path / "q.gguf"), "--outtype", "q8_0")
    assert named.out == f"{tmp_path / 'q.gguf'}\n"
    wrong = program("convert", str(folder), "-o", str(tmp_path / "q.bin"))
    assert (wrong.code, wrong.err.splitlines()[0][:5]) == (2, "error")
