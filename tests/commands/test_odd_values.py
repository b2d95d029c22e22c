"""Odd values of every option of every command: one clear line, never a traceback or a bug."""

from __future__ import annotations

from pathlib import Path

import click
import pytest

from localkv.cli import COMMANDS, cli
from support.program import Program

VALUES = ("", "-1", "1e999", "nan", "{", "x" * 5000, "a:b,c/d", "\0")


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_odd_values(program: Program, command: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    found = cli.get_command(click.Context(cli), command)
    assert found is not None
    params = [param for param in found.params if isinstance(param, click.Option)]
    model = ["no.gguf"] if any("-m" in param.opts for param in params) else []
    for param in params:
        if param.is_flag or param.name == "model":
            continue
        for value in VALUES:
            result = program(command, *model, param.opts[-1], value)
            what = f"{command} {param.opts[-1]} {value[:20]!r}: {result.err[:500]}"
            assert result.code in (0, 1, 2), what
            assert "a bug" not in result.err, what
            assert all(len(line) < 700 for line in result.err_lines), what
            assert result.code == 0 or "error: " in result.err, what


def test_a_file_name_with_nul(program: Program) -> None:
    program.write_config('[complete]\nfile = "\\u0000"\n')
    result = program("complete", "-m", "no.gguf")
    assert result.code == 2
    assert result.err_lines[0].endswith("[complete] file: no file has a NUL in its name")
